"""SPO-tree: values by nested means, advantages as their differences, what is trained, growth."""

import math
from statistics import mean, pstdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.methods.spo_tree import SpoTree
from tests.graph.oracle import Graph
from tests.graph.strategies import graph_of
from tests.methods.growing import World, ends_at, grow
from tests.methods.shapes import credit_of, graph_from, plain_records, untrained

#   0 ── 1 ── 3 R=1          V(1) = .5    V(2) = 1    V(0) = .75, the mean over leaves would be 2/3
#   │    ├─── 4 R=0
#   │    └─── 5 stopped early
#   └─ 2 R=1
PARENTS = [None, 0, 0, 1, 1, 1]
REWARDS = [None, None, 1.0, 1.0, 0.0, None]

# HybridInferenceStrategy._construct_tree and extract_edges_from_tree of AIFrameResearch/SPO
# at b9fc6a2, run on these trees: the value of every node but the root, then the advantage of every
# edge that it trains, by "rloo" and by "grpo".
AUTHORS = [
    (
        [None, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 8, 8],
        [None] * 7 + [1.0, None, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        [0.5, 0.75, 0.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        {
            1: (0.08333333333333331, 0.26726123334099605),
            2: (0.3333333333333333, 1.0690449333639844),
            3: (-0.4166666666666667, -1.3363061667049807),
            4: (-0.5, -0.9999999800000003),
            5: (0.5, 0.9999999800000003),
            6: (-0.25, -0.9999999600000016),
            7: (0.25, 0.9999999600000016),
            14: (-0.5, -0.9999999800000003),
            15: (0.5, 0.9999999800000003),
        },
    ),
    (
        [None, 0, 0, 2, 2, 2],
        [None, 0.0, None, 1.0, 0.0, 1.0],
        [0.0, 0.6666666666666666, 1.0, 0.0, 1.0],
        {
            1: (-0.3333333333333333, -0.999999970000001),
            2: (0.3333333333333333, 0.999999970000001),
            3: (0.33333333333333337, 0.7071067661865479),
            4: (-0.6666666666666666, -1.4142135323730955),
            5: (0.33333333333333337, 0.7071067661865479),
        },
    ),
    (
        [None, 0, 0, 1, 1, 2, 2, 3, 3, 3, 5, 5, 5, 6, 6, 6],
        [None, None, None, None, 0.25, None, None, 0.25, 0.25, 0.0, 0.0, 1.0, 0.25, 1.0, 0.25, 0.0],
        [5 / 24, 5 / 12, 1 / 6, 0.25, 5 / 12, 5 / 12, 0.25, 0.25, 0, 0, 1, 0.25, 1, 0.25, 0],
        {
            1: (-0.10416666666666669, -0.9999999040000093),
            2: (0.10416666666666669, 0.9999999040000093),
            3: (-0.04166666666666666, -0.9999997600000572),
            4: (0.041666666666666685, 0.9999997600000579),
            7: (0.08333333333333334, 0.7071067211865527),
            8: (0.08333333333333334, 0.7071067211865527),
            9: (-0.16666666666666666, -1.4142134423731052),
            10: (-0.4166666666666667, -0.9805806526139976),
            11: (0.5833333333333333, 1.3728129136595966),
            12: (-0.16666666666666669, -0.3922322610455991),
            13: (0.5833333333333333, 1.3728129136595966),
            14: (-0.16666666666666669, -0.3922322610455991),
            15: (-0.4166666666666667, -0.9805806526139976),
        },
    ),
]


def test_by_hand():
    graph = graph_from(PARENTS, REWARDS)
    credit = credit_of(SpoTree(), graph)
    nan = math.nan
    np.testing.assert_allclose(credit.columns["score"], [0.75, 0.5, 1.0, 1.0, 0.0, nan])
    np.testing.assert_allclose(credit.advantages, [[nan, -0.25, 0.25, 0.5, -0.5, nan]])
    assert credit.rows is None and credit.trajectory_advantages is None
    divided = credit_of(SpoTree(normalize="std"), graph)
    edge = 0.25 / (0.25 + 1e-8)
    leaf = 0.5 / (0.5 + 1e-8)
    np.testing.assert_allclose(
        divided.advantages, [[nan, -edge, edge, leaf, -leaf, nan]], rtol=1e-12
    )
    np.testing.assert_array_equal(divided.columns["advantage"], divided.advantages[0])


@pytest.mark.parametrize(("parents", "rewards", "values", "advantages"), AUTHORS)
def test_the_authors_numbers(parents, rewards, values, advantages):
    graph = graph_from(parents, rewards, tokens=[[7]] * len(parents))
    for place, normalize in enumerate(("none", "std")):
        credit = credit_of(SpoTree(normalize=normalize), graph)
        np.testing.assert_allclose(credit.columns["score"][1:], values, atol=1e-12)
        expected = [advantages.get(v, (0.0, 0.0))[place] for v in range(1, len(parents))]
        np.testing.assert_allclose(credit.advantages[0, 1:], expected, atol=1e-6)
        trained = [v for v, without in enumerate(untrained(credit)) if not without]
        assert trained == sorted(advantages)


def slow_values(g):
    value = {}
    for v in reversed(g.ids):
        below = [value[c] for c in g.children[v] if value[c] is not None]
        value[v] = g.reward(v) if g.terminal(v) else (mean(below) if below else None)
    return value


@given(plain_records(), st.sampled_from(["none", "std"]))
def test_against_the_definition(record, normalize):
    g, graph = Graph(record["nodes"]), graph_of(record)
    value = slow_values(g)
    credit = credit_of(SpoTree(normalize=normalize, singleton="zero"), graph)
    for v, score, advantage in zip(
        graph.node_ids.tolist(), credit.columns["score"], credit.advantages[0], strict=True
    ):
        assert math.isnan(score) if value[v] is None else score == pytest.approx(value[v])
        if v == g.root or value[v] is None:
            assert math.isnan(advantage)
            continue
        siblings = [x for x in (value[c] for c in g.children[g.parent[v]]) if x is not None]
        expected = value[v] - mean(siblings)
        if normalize == "std":
            expected /= pstdev(siblings) + 1e-8
        assert advantage == pytest.approx(expected, abs=1e-6)


def test_what_carries_no_loss():
    tokens = [[1, 2], [3, 4], [5], [6, 7], [8], [9]]
    logprobs = [[0, 0], [-0.05, -0.2], [-0.05], [-3, -0.1], [-1], [-1]]
    rewards = [None, None, 1.0, 1.0, 1.0, None]
    graph = graph_from(PARENTS, rewards, tokens=tokens, logprobs=logprobs)
    without_zeros = credit_of(SpoTree(), graph)
    assert not without_zeros.has_signal and all(untrained(without_zeros))
    graph = graph_from(PARENTS, REWARDS, tokens=tokens, logprobs=logprobs)
    # exp(-0.05) = .951, exp(-0.1) = .905, exp(-0.2) = .819; node 5 was stopped early.
    expected = [True, True, True, False, True, False, True, False, True]
    assert untrained(credit_of(SpoTree(), graph)) == expected
    everything = untrained(credit_of(SpoTree(max_probability=None), graph))
    assert everything == [True, True, False, False, False, False, False, False, True]
    graph = graph_from(PARENTS, rewards, tokens=tokens)
    kept = untrained(credit_of(SpoTree(drop_zero=False), graph))
    assert kept == [True, True, False, False, False, False, False, False, True]


def test_a_probability_at_the_limit_is_masked_as_a_float32():
    graph = graph_from(
        [None, 0, 0],
        [None, 1.0, 0.0],
        tokens=[[1], [2, 3], [4]],
        logprobs=[[0], [float(np.log(np.float32(0.9))), -0.11], [-1]],
    )
    assert untrained(credit_of(SpoTree(), graph)) == [True, True, False, False]


def test_rounding_is_no_difference():
    graph = graph_from([None, 0, 0, 0], [None, 0.1, 0.1, 0.1], tokens=[[1]] * 4)
    assert 0.1 - sum([0.1] * 3) / 3 != 0.0
    credit = credit_of(SpoTree(normalize="std"), graph)
    assert not credit.has_signal and all(untrained(credit))


def test_a_file_without_log_probabilities_has_the_same_advantages():
    known = graph_from(
        PARENTS, REWARDS, tokens=[[1]] * 6, logprobs=[[0], [-0.01], [-1], [-1], [-1], [-1]]
    )
    bare = graph_from(PARENTS, REWARDS)
    np.testing.assert_array_equal(
        credit_of(SpoTree(), bare).advantages, credit_of(SpoTree(), known).advantages
    )
    assert untrained(credit_of(SpoTree(), bare)) == []
    assert untrained(credit_of(SpoTree(), known)) == [True, True, False, False, False, True]


def test_edges_without_siblings_go_on_with_the_credit_of_the_edge_before():
    #   0 ── 1 ── 2 ── 3 R=1       V = 1 along the first answer, 0 along the second
    #   └─── 4 ── 5 ── 6 R=0
    #             └─── 7 stopped early: has no value
    parents, rewards = [None, 0, 1, 2, 0, 4, 5, 5], [None, None, None, 1.0, None, None, 0.0, None]
    graph = graph_from(parents, rewards, tokens=[[1]] * 8)
    alone = credit_of(SpoTree(singleton="zero"), graph)
    np.testing.assert_array_equal(alone.advantages[0, 1:], [0.5, 0, 0, -0.5, 0, 0, np.nan])
    assert untrained(alone) == [True, False, True, True, False, True, True, True]
    on = credit_of(SpoTree(), graph)
    np.testing.assert_array_equal(on.advantages[0, 1:], [0.5, 0.5, 0.5, *[-0.5] * 3, np.nan])
    assert untrained(on) == [True, *[False] * 6, True]
    chain = graph_from([None, 0, 1], [None, None, 1.0])
    assert not credit_of(SpoTree(), chain).has_signal


def test_a_prompt_alone():
    credit = credit_of(SpoTree(), graph_from([None], [None]))
    assert np.isnan(credit.advantages).all() and not credit.has_signal


def test_it_grows_by_layers_and_then_on():
    grown = grow(SpoTree(schedule=(3, 2)), World(ends_at(4)))
    assert [len(g.active) for g in grown.growths] == [1, 3, 6, 6, 0]
    assert [{n for _, n in grown.counts(h)} for h in range(1, 5)] == [{3}, {2}, {1}, {1}]
    assert len(grown.graph.terminals) == 6
    assert np.bincount(grown.graph.depth).tolist() == [1, 3, 6, 6, 6]


def test_chains_that_fill_a_budget_do_not_branch():
    first = iter([True, True])

    def end(depth, rng):
        return "terminal" if next(first, False) or depth == 4 else "goes_on"

    # The tree's two paths end at once, in a layer after which the schedule would branch by 9.
    world = World(end, edge_tokens=1, max_layers=60, tokens=40)
    graph = grow(SpoTree(schedule=(2, 9, 9)), world).graph
    assert graph.num_edges == 40
    assert graph.num_children[1:].max() == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"schedule": ()}, "schedule"),
        ({"schedule": (6, 0)}, "layer 2"),
        ({"max_probability": 0.0}, "max_probability"),
        ({"max_probability": 1.5}, "max_probability"),
    ],
)
def test_bad_settings_are_one_line(settings, says):
    with pytest.raises(ConfigError, match=says) as error:
        SpoTree(**settings)
    assert "\n" not in str(error.value)
