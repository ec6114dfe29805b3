"""Where two methods must say the same: one's special case is the other."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.spo_tree import SpoTree
from graphpo_agent.methods.tree import tree
from graphpo_agent.methods.tree_grpo import TreeGrpo
from graphpo_agent.methods.treepo import TreePO
from graphpo_agent.methods.treerl import TreeRL
from graphpo_agent.methods.treerpo import TreeRpo
from tests.graph.strategies import graph_of
from tests.methods.growing import World, ends_at, grow
from tests.methods.shapes import credit_of, graph_from, plain_records, trajectory_advantages


def unmerged(**credit) -> GraphPO:
    """GraphPO without merging; without states its edges have eta = 0."""
    return tree(credit=CreditOptions(**credit))


def balanced(schedule, rewards):
    """A tree whose nodes of each layer have the same number of children; rewards leaf by leaf."""
    parents, layer = [None], [0]
    for count in schedule:
        children = [v for v in layer for _ in range(count)]
        layer = list(range(len(parents), len(parents) + len(children)))
        parents += children
    inner = len(parents) - len(layer)
    return graph_from(parents, [None] * inner + list(rewards))


@given(
    st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 3, 2), (4, 1, 2)]),
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=16, max_size=16),
)
def test_spo_tree_by_sibling_std_is_graphpo_unmerged_on_balanced_trees(schedule, rewards):
    graph = balanced(schedule, rewards[: math.prod(schedule)])
    spo = credit_of(SpoTree(normalize="std", singleton="zero"), graph)
    graphpo = credit_of(unmerged(), graph)
    np.testing.assert_allclose(spo.columns["score"], graphpo.columns["score"], atol=1e-12)
    # The one divides by n, the other by n − 1.
    siblings = graph.num_children[graph.parent[1:]]
    ddof = np.sqrt((siblings - 1) / siblings)
    np.testing.assert_allclose(
        spo.advantages[0, 1:] * ddof, graphpo.advantages[0, 1:], rtol=2e-5, atol=2e-5
    )
    step_rewards = credit_of(SpoTree(singleton="zero"), graph).advantages[0, 1:]
    np.testing.assert_allclose(step_rewards, graphpo.columns["step_reward"][1:], atol=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        SpoTree(),
        SpoTree(normalize="std"),
        TreeRpo(),
        TreeRpo(normalize="none"),
        TreeRL(select=None),
    ],
)
@given(plain_records(), st.data())
def test_where_edges_that_nothing_leaves_are_cut_makes_no_difference(method, record, data):
    of_tokens = ("num_tokens", "loss_mask", "logprobs")
    bare = [{x: y for x, y in node.items() if x not in of_tokens} for node in record["nodes"]]
    nodes = [node | {"tokens": [7, 8, 9]} for node in bare]
    whole = graph_of(record | {"nodes": nodes})
    places = st.tuples(st.integers(1, max(1, whole.num_edges)), st.integers(1, 2))
    cuts = data.draw(st.lists(places, unique_by=lambda place: place[0])) if whole.num_edges else []
    parts = whole.split(sorted(cuts))
    assert parts.num_nodes == whole.num_nodes + len(cuts)
    found, expected = (
        np.sort(np.repeat(credit_of(method, graph).advantages[0], np.diff(graph.offsets)))
        for graph in (parts, whole)
    )
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_on_unbalanced_trees_they_differ():
    graph = graph_from([None, 0, 0, 1, 1], [None, None, 1.0, 1.0, 0.0])
    assert credit_of(SpoTree(), graph).columns["score"][0] == 0.75
    assert credit_of(unmerged(), graph).columns["score"][0] == pytest.approx(2 / 3)


@given(plain_records())
def test_treerpo_is_graphpo_unmerged_with_means_over_children(record):
    graph = graph_of(record)
    found = np.nan_to_num(credit_of(TreeRpo(), graph).advantages)
    graphpo = credit_of(unmerged(backup="mean", singleton="inherit"), graph)
    expected = np.nan_to_num(graphpo.advantages)
    np.testing.assert_allclose(found, expected, atol=1e-9)


@given(plain_records())
def test_spo_tree_is_graphpo_s_step_reward_with_means_over_children(record):
    graph = graph_of(record)
    expected = credit_of(unmerged(backup="mean"), graph).columns["step_reward"]
    found = credit_of(SpoTree(singleton="zero"), graph).advantages[0]
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("rewards", list(product([0.0, 1.0], repeat=4)))
def test_grpo_is_the_graph_of_chains_without_merging(rewards):
    # Four chains of two edges; an edge without siblings hands on the advantage before it.
    graph = graph_from([None, 0, 0, 0, 0, 1, 2, 3, 4], [None] * 5 + list(rewards))
    grpo = credit_of(Grpo(group_size=4), graph)
    graphpo = credit_of(unmerged(singleton="inherit"), graph)
    np.testing.assert_allclose(grpo.advantages, graphpo.advantages, atol=1e-9)
    treepo = trajectory_advantages(TreePO(), graph)
    np.testing.assert_allclose(treepo, trajectory_advantages(Grpo(normalize="none"), graph))


def test_grpo_grows_the_graph_of_chains():
    world = World(ends_at(4, finish=0.3))
    grpo, graphpo = grow(Grpo(group_size=5), world), grow(tree(schedule=(5,)), world)
    np.testing.assert_array_equal(grpo.graph.parent, graphpo.graph.parent)
    np.testing.assert_array_equal(grpo.graph.token_ids, graphpo.graph.token_ids)
    spo = grow(SpoTree(schedule=(5,)), world)
    np.testing.assert_array_equal(grpo.graph.token_ids, spo.graph.token_ids)


@pytest.mark.parametrize("rewards", [[1.0], [0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.25, 1.0, 0.0]])
def test_tree_grpo_with_a_leaf_per_tree_adds_the_raw_reward_to_grpo(rewards):
    graph = graph_from([None, *[0] * len(rewards)], [None, *rewards])
    grpo = trajectory_advantages(Grpo(), graph)
    expected = grpo + np.array(rewards) / (1 + 1e-6)
    np.testing.assert_allclose(trajectory_advantages(TreeGrpo(), graph), expected, atol=1e-12)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=9))
def test_tree_grpo_with_one_tree_is_twice_grpo(rewards):
    count = len(rewards)
    graph = graph_from([None, *[0] * count], [None, *rewards], trees=[None, *[0] * count])
    doubled = 2 * trajectory_advantages(Grpo(), graph)
    np.testing.assert_allclose(trajectory_advantages(TreeGrpo(), graph), doubled, atol=1e-12)


@given(plain_records())
def test_treerl_s_state_value_is_the_global_advantage(record):
    graph = graph_of(record)
    value = credit_of(TreeRL(), graph).columns["score"]
    rewards = graph.reward[graph.terminals]
    count = len(rewards)
    for v in range(graph.num_nodes):
        below = [graph.reward[x] for x in graph.terminals if v == 0 or v in graph.path(x)]
        if count < 2 or not below:
            assert math.isnan(value[v])
            continue
        expected = count / (count - 1) * (np.mean(below) - rewards.mean())
        assert value[v] == pytest.approx(expected, abs=1e-9)
