"""GraphPO's own growth and credit, beside what the core's tests say."""

from dataclasses import replace

import numpy as np
import pytest

from graphpo_agent.graph.credit import CreditOptions, graph_credit
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.graphpo import GraphPO
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
