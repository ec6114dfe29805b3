"""TreeRPO: siblings compared by the rewards expected after them."""

import math
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.methods.treerpo import TreeRpo
from tests.graph.oracle import Graph
from tests.graph.strategies import graph_of
from tests.methods.growing import World, ends_at, grow
from tests.methods.shapes import credit_of, graph_from, plain_records, untrained


def test_by_hand():
    #   0 ── 1 ── 3 R=1       V(1) = 2/3, V(2) = 0
    #   │    ├─── 4 R=0
    #   │    └─── 5 R=1
    #   └─ 2 ── 6 R=0         a group of one goes on with the edge before
    #        └─ 7 stopped early
    graph = graph_from(
        [None, 0, 0, 1, 1, 1, 2, 2],
        [None, None, None, 1.0, 0.0, 1.0, 0.0, None],
        tokens=[[1]] * 8,
    )
    credit = credit_of(TreeRpo(), graph)
    std = math.sqrt(2) / 3  # of 2/3 and 0
    first = (1 / 3) / (std + 1e-6)
    spread = math.sqrt(1 / 3)  # of 1, 0, 1
    right, wrong = (1 / 3) / (spread + 1e-6), (-2 / 3) / (spread + 1e-6)
    nan = math.nan
    np.testing.assert_allclose(
        credit.advantages, [[nan, first, -first, right, wrong, right, -first, nan]], rtol=1e-12
    )
    np.testing.assert_allclose(
        credit.columns["score"], [1 / 3, 2 / 3, 0.0, 1.0, 0.0, 1.0, 0.0, nan]
    )
    assert untrained(credit) == [True, *[False] * 6, True]
    assert credit.rows is None
    assert credit_of(TreeRpo(singleton="zero"), graph).advantages[0, 6] == 0.0
    centred = credit_of(TreeRpo(normalize="none"), graph)
    np.testing.assert_allclose(
        centred.advantages, [[nan, 1 / 3, -1 / 3, 1 / 3, -2 / 3, 1 / 3, -1 / 3, nan]]
    )


@given(plain_records(), st.sampled_from(["none", "std"]))
def test_against_the_definition(record, normalize):
    g, graph = Graph(record["nodes"]), graph_of(record)
    value = {}
    for v in reversed(g.ids):
        below = [value[c] for c in g.children[v] if value[c] is not None]
        value[v] = g.reward(v) if g.terminal(v) else (mean(below) if below else None)
    credit = credit_of(TreeRpo(normalize=normalize), graph)
    before = {g.root: 0.0}
    for v, advantage in zip(graph.node_ids.tolist(), credit.advantages[0], strict=True):
        if v == g.root or value[v] is None:
            assert math.isnan(advantage)
            continue
        siblings = [x for x in (value[c] for c in g.children[g.parent[v]]) if x is not None]
        spread = stdev(siblings) if len(siblings) > 1 else 0.0
        expected = value[v] - mean(siblings) if spread > 1e-12 else 0.0
        if normalize == "std":
            expected /= spread + 1e-6
        if len(siblings) == 1:
            expected = before[g.parent[v]]
        before[v] = expected
        assert advantage == pytest.approx(expected, abs=1e-6)


def test_it_grows_as_an_n_ary_tree():
    grown = grow(TreeRpo(), World(ends_at(3)))
    assert np.bincount(grown.graph.depth).tolist() == [1, 4, 16, 64]
    assert grown.plans[-1].branches == ()


def test_a_bad_schedule_is_one_line():
    with pytest.raises(ConfigError, match="layer 1 has 0"):
        TreeRpo(schedule=(0,))
