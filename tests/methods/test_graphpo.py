"""GraphPO's own growth and credit, beside what the core's tests say."""

from dataclasses import replace

import numpy as np
import pytest

from graphpo_agent.graph.credit import CreditOptions, graph_credit
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.spo_tree import SpoTree
from graphpo_agent.methods.treerpo import TreeRpo
from graphpo_agent.methods.waves import wave
from tests.methods.shapes import graph_from
from tests.methods.test_waves import CLASSES, GRAPH, graph_of, growth


def test_separate_terms_add_up_to_the_advantage():
    graph = graph_from([None, 0, 0, 1, 1], [None, None, 1.0, 0.0, 1.0])
    credit = CreditOptions(trajectory_weight=1.0)
    (found,) = GraphPO(objective="separate", credit=credit).assign_credit(
        [graph], [np.array([0, 1, 2, 3, 2])]
    )
    assert len(found.advantages) == 2 and found.advantages[1][1:].any()
    np.testing.assert_allclose(found.advantages.sum(axis=0), found.columns["advantage"])


@pytest.mark.parametrize(
    ("layer", "saved", "count", "left"), [(2, 2, 5, 0), (2, 9, 6, 6), (3, 2, 2, 1), (3, 0, 1, 0)]
)
def test_what_a_layer_saved_and_could_not_place_goes_to_the_next(layer, saved, count, left):
    graph = graph_of([(v, None) for v in range(layer - 1)])
    one = replace(growth(graph), active=np.array([layer - 1]), layer=layer, memory=saved)
    plan = GraphPO(schedule=(2, 3)).plan(one)
    assert [(branch.node, branch.count) for branch in plan.branches] == [(layer - 1, count)]
    assert (plan.memory, plan.saved, plan.reallocated) == (left, 0, saved - left)


@pytest.mark.parametrize(
    ("room", "counts", "reallocated"),
    [
        (None, [2, 5, 5], 2),
        (9, [2, 5, 5], 2),
        (6, [2, 3, 4], 0),  # rounds: each one more, then the two that are not redundant
        (2, [1, 2, 2], 0),
        (1, [1, 1, 2], 0),
        (0, [1, 1, 1], 0),
    ],
)
def test_where_few_paths_may_begin_the_redundant_state_comes_last(room, counts, reallocated):
    # 1 is a longer way to the state of 2, and 3 is more novel than both.
    graph = RolloutGraph.root("g", token_ids=[1], key="start").append(
        [
            NewNode(0, (7,) * tokens, (1,) * tokens, (-1.0,) * tokens, False, None, key=key)
            for tokens, key in ((2, "a"), (1, "a"), (1, "b"))
        ]
    )
    one = replace(
        growth(graph), active=np.array([1, 2, 3]), layer=2, memory=0, trajectories_left=room
    )
    plan = GraphPO(schedule=(3, 4)).plan(one)
    assert [branch.node for branch in plan.branches] == [1, 2, 3]
    assert [branch.count for branch in plan.branches] == counts
    assert (plan.saved, plan.reallocated) == (2, reallocated)


@pytest.mark.parametrize("layered", [SpoTree(schedule=(4, 3)), TreeRpo(schedule=(4, 3))])
def test_where_few_paths_may_begin_all_states_fork_alike(layered):
    graph = graph_of([(0, None)] * 4)
    one = replace(growth(graph), active=np.arange(1, 5), layer=2, memory=None, trajectories_left=5)
    assert [branch.count for branch in layered.plan(one).branches] == [3, 2, 2, 2]
    start = replace(growth(graph_of([])), active=np.zeros(1, np.int64), layer=1, memory=None)
    assert [b.count for b in layered.plan(replace(start, trajectories_left=3)).branches] == [3]


@pytest.mark.parametrize(
    ("parents", "active", "tokens", "counts"),
    [
        ((0, 0, 2), [1, 3], None, {1: 4, 3: 2}),  # both go on
        ((0, 0, 2), [1, 3], 95, {1: 4}),  # the longer one waits
        ((0, 0, 1), [2, 3], 85, {3: 2}),  # the shorter one waits
    ],
)
def test_the_shortest_active_state_represents_its_class_whatever_its_layer(
    parents, active, tokens, counts
):
    # All tokens cost 10 an edge, 100 a path; the last node and the one of depth 1 are one state.
    graph = RolloutGraph.root("g", token_ids=[1])
    for v, parent in enumerate(parents, 1):
        key = "same" if v in active else f"state {v}"
        graph = graph.append([NewNode(parent, (7,), (1,), (-1.0,), False, None, key=key)])
    one = replace(
        growth(graph, tokens=tokens),
        active=np.array(active),
        edge_tokens=10,
        memory=0,
        tokens_behind=lambda v: 100 - 10 * int(graph.depth[v]),
    )
    plan = GraphPO(schedule=(2, 4, 4)).plan(one)
    assert {branch.node: branch.count for branch in plan.branches} == counts
    assert plan.saved == sum(4 - count for count in counts.values())


def test_what_states_of_several_layers_save_adds_up():
    # 2 is the state of 1, and 5, one edge deeper, that of 4.
    graph = RolloutGraph.root("g", token_ids=[1])
    for parent, key in ((0, "a"), (0, "a"), (0, "x"), (3, "b"), (3, "b")):
        graph = graph.append([NewNode(parent, (7,), (1,), (-1.0,), False, None, key=key)])
    one = replace(growth(graph), active=np.array([1, 2, 4, 5]), memory=0)
    plan = GraphPO(schedule=(3, 4, 6)).plan(one)
    assert {branch.node: branch.count for branch in plan.branches} == {1: 6, 2: 2, 4: 9, 5: 3}
    assert (plan.saved, plan.reallocated, plan.memory) == (5, 5, 0)


def test_graphpo_s_waves_continue_merged_states():
    graph = RolloutGraph.root("g", token_ids=[1])
    for v in range(1, GRAPH.num_nodes):
        reward = float(GRAPH.reward[v]) if GRAPH.terminal[v] else None
        key = None if reward is not None else f"state {CLASSES[v]}"
        node = NewNode(
            int(GRAPH.parent[v]), (7,), (1,), (-1.0,), reward is not None, reward, key=key
        )
        graph = graph.append([node])
    one = growth(graph, paths=12)
    scores = graph_credit(graph, CLASSES, CreditOptions()).score
    plan = GraphPO(schedule=(2,), refill="uncertain").plan(one)
    assert plan.branches == wave(one, CLASSES, scores) != wave(one, np.arange(8), scores)
