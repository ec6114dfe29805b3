"""GRPO's groups and DAPO's shaping."""

import json
import math
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.methods.dapo import Dapo, overlong_penalty
from graphpo_agent.methods.grpo import Grpo
from tests.graph.strategies import graph_of
from tests.methods.growing import World, ends_at, grow
from tests.methods.shapes import credit_of, graph_from, plain_records, trajectory_advantages

AUTHORS = json.loads((Path(__file__).parent / "dapo_authors.json").read_text())["groups"]


def chains_of(rewards, lengths):
    """One chain of two edges per reward, of so many tokens together."""
    parents, told, tokens = [None], [None], [None]
    for reward, length in zip(rewards, lengths, strict=True):
        parents += [0, len(parents)]
        told += [None, reward]
        tokens += [length // 2, length - length // 2]
    return graph_from(parents, told, num_tokens=tokens)


@pytest.mark.parametrize("group", AUTHORS)
def test_numbers_are_the_authors(group):
    graph = chains_of(group["rewards"], group["lengths"])
    settings = {k: group[k] for k in ("max_length", "overlong_buffer", "overlong_factor")}
    penalty = overlong_penalty(
        np.array(group["lengths"]),
        group["max_length"],
        group["overlong_buffer"],
        group["overlong_factor"],
    )
    assert group["rewards"] + penalty == pytest.approx(group["shaped"], abs=1e-6)
    expected = [0.0] * len(penalty) if group["filtered"] else group["dapo"]
    close = {"abs": 2e-4, "rel": 2e-4}
    assert trajectory_advantages(Dapo(**settings), graph) == pytest.approx(expected, **close)
    assert trajectory_advantages(Grpo(), graph) == pytest.approx(group["grpo"], **close)
    centred = trajectory_advantages(Grpo(normalize="none"), graph)
    assert centred == pytest.approx(group["centred"], abs=1e-5)


def test_shaping_by_hand():
    # L_max 10, B 4: nothing up to 6 tokens, then a quarter per token, and on beyond the limit.
    assert overlong_penalty(np.array([1, 6, 7, 8, 10, 12]), 10, 4, 1.0).tolist() == [
        *(0.0, 0.0, -0.25, -0.5, -1.0, -1.5)
    ]
    # Rewards 1 and 1 and 0 become 1, 0.5 and 0: mean 0.5, std 0.5.
    graph = chains_of([1.0, 1.0, 0.0], [6, 8, 5])
    shaped = trajectory_advantages(Dapo(max_length=10, overlong_buffer=4), graph)
    assert shaped == pytest.approx([1.0, 0.0, -1.0], abs=1e-5)
    credit = credit_of(Dapo(max_length=10, overlong_buffer=4), graph)
    assert credit.rows is not None and credit.rows.tolist() == [2, 4, 6]
    assert credit.columns == {}
    assert credit.advantages[0, 1:] == pytest.approx([1.0, 1.0, 0.0, 0.0, -1.0, -1.0], abs=1e-5)


def test_observations_count_towards_the_length():
    fields = {"num_tokens": [None, 5], "loss_mask": [None, [1, 1, 0, 0, 0]]}
    graph = graph_from([None, 0], [None, 1.0], **fields)
    dapo = Dapo(max_length=6, overlong_buffer=4)
    assert trajectory_advantages(dapo, graph) == pytest.approx([1.0 - 3 / 4], abs=1e-5)


@given(
    st.sampled_from([0.0, 0.1, 1 / 3, 1.0]), st.lists(st.integers(2, 40), min_size=2, max_size=9)
)
def test_a_group_that_agrees_before_shaping_has_no_signal(reward, lengths):
    graph = chains_of([reward] * len(lengths), lengths)
    credit = credit_of(Dapo(max_length=10, overlong_buffer=10), graph)
    assert not credit.has_signal
    assert credit.trajectory_advantages is not None
    assert credit.trajectory_advantages.tolist() == [0.0] * len(lengths)


@pytest.mark.parametrize("method", [Grpo, Dapo])
def test_a_group_of_one_keeps_its_reward_unless_told_otherwise(method):
    graph = graph_from([None, 0, 0], [None, 0.6, None])
    assert trajectory_advantages(method(), graph) == pytest.approx([0.6], abs=1e-5)
    assert trajectory_advantages(method(singleton="zero"), graph).tolist() == [0.0]
    none = graph_from([None, 0], [None, None])
    assert len(trajectory_advantages(method(), none)) == 0
    assert credit_of(method(), none).advantages[0, 1:].tolist() == [0.0]


def by_loops(record, *, longest, buffer, factor):
    """leaf id -> advantage, from the definitions."""
    parent = {x["id"]: x["parent"] for x in record["nodes"]}
    length = {x["id"]: x.get("num_tokens", 1) for x in record["nodes"]}
    reward = {x["id"]: x["reward"] for x in record["nodes"] if x["terminal"]}
    shaped = {}
    for leaf in reward:
        total, v = 0, leaf
        while parent[v] is not None:
            total += length[v]
            v = parent[v]
        over = total - (longest - buffer)
        shaped[leaf] = reward[leaf] - (factor * over / buffer if over > 0 else 0.0)
    if len(reward) == 1:
        return shaped
    if len(set(reward.values())) <= 1 or stdev(shaped.values()) <= 1e-12:
        return dict.fromkeys(reward, 0.0)
    m, s = mean(shaped.values()), stdev(shaped.values())
    return {leaf: (x - m) / (s + 1e-6) for leaf, x in shaped.items()}


@given(plain_records(), st.integers(1, 12), st.integers(1, 12), st.sampled_from([1.0, 0.3, 2.0]))
def test_advantages_are_the_definition_s_on_random_trees(record, buffer, more, factor):
    graph = graph_of(record)
    longest = buffer + more
    expected = by_loops(record, longest=longest, buffer=buffer, factor=factor)
    dapo = Dapo(max_length=longest, overlong_buffer=buffer, overlong_factor=factor)
    got = trajectory_advantages(dapo, graph)
    leaves = graph.node_ids[graph.terminals].tolist()
    for leaf, advantage in zip(leaves, got.tolist(), strict=True):
        assert advantage == pytest.approx(expected[leaf], rel=1e-5, abs=1e-5)


@given(plain_records())
def test_without_shaping_it_is_grpo(record):
    graph = graph_of(record)
    np.testing.assert_array_equal(
        trajectory_advantages(Dapo(), graph), trajectory_advantages(Grpo(), graph)
    )


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(2, 30)), min_size=2, max_size=8))
def test_half_the_factor_serves_rewards_of_one_and_zero(group):
    rewards, lengths = zip(*group, strict=True)
    if len(set(rewards)) == 1:
        return
    penalty = overlong_penalty(np.array(lengths), 20, 10, 1.0)
    signed = 2 * np.array(rewards) - 1 + penalty
    dapo = Dapo(max_length=20, overlong_buffer=10, overlong_factor=0.5)
    got = trajectory_advantages(dapo, chains_of(rewards, lengths))
    if signed.std() > 1e-9:
        expected = (signed - signed.mean()) / signed.std(ddof=1)
        assert got == pytest.approx(expected, abs=2e-4)


def test_it_grows_chains_and_fills_a_budget():
    world = World(ends_at(3))
    grown = grow(Dapo(group_size=5), world)
    assert [grown.counts(layer) for layer in (1, 2)] == [[(0, 5)], [(v, 1) for v in range(1, 6)]]
    assert len(grown.graph.terminals) == 5 and grown.graph.num_nodes == 16
    filled = grow(Dapo(group_size=5), World(ends_at(2), trajectories=7))
    assert len(filled.graph.terminals) == 7
    by_default = grow(Dapo(), World(ends_at(1)))
    assert len(by_default.graph.terminals) == 16


SHAPED = {"max_length": 8, "overlong_buffer": 4}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_length": 8}, "both max_length and overlong_buffer"),
        ({"overlong_buffer": 8}, "both max_length and overlong_buffer"),
        ({"max_length": 8, "overlong_buffer": 9}, "overlong_buffer 9 is outside 1 to max_length 8"),
        ({"max_length": 8, "overlong_buffer": 0}, "overlong_buffer 0 is outside"),
        ({"overlong_factor": 0.5}, "overlong_factor needs max_length and overlong_buffer"),
        ({**SHAPED, "overlong_factor": -1.0}, "overlong_factor -1.0 is not a finite number of at"),
        ({**SHAPED, "overlong_factor": math.nan}, "overlong_factor nan"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings, says):
    with pytest.raises(ConfigError, match=says):
        Dapo(**settings)
