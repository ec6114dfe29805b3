"""Waves: where the rest of a budget goes."""

from collections import Counter

import numpy as np
import pytest

from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.growth import Growth
from graphpo_agent.methods.tree import tree
from graphpo_agent.methods.waves import wave
from tests.methods.growing import World, ends_at, grow

NAN = float("nan")


def graph_of(edges):
    """Edges (parent, reward or None), one policy token each unless a third number says."""
    graph = RolloutGraph.root("g", token_ids=[1])
    for parent, reward, *length in edges:
        n = length[0] if length else 1
        node = NewNode(parent, (7,) * n, (1,) * n, (-1.0,) * n, reward is not None, reward)
        graph = graph.append([node])
    return graph


def growth(graph, tokens=None, paths=None, seed=0):
    nothing = np.zeros(0, np.int64)
    return Growth(
        graph=graph,
        reached=nothing,
        active=nothing,
        layer=5,
        memory=None,
        tokens_left=tokens,
        trajectories_left=paths,
        path_tokens=4,
        edge_tokens=4,
        tokens_behind=lambda v: 10,
        seed=seed,
        decode=str,
    )


# 0 ── 1 ── 3 (R=1)      1 and 2 are one state; below 1 right and wrong, below 2 wrong
#  │    └── 4 (R=0)
#  └── 2 ── 5 (R=0)      6: a certain state
#  └── 6 ── 7 (R=0)
GRAPH = graph_of([(0, None), (0, None), (1, 1.0), (1, 0.0), (2, 0.0), (0, None), (6, 0.0)])
CLASSES = np.array([0, 1, 1, 3, 4, 5, 6, 7])
SCORES = np.array([1 / 4, 1 / 3, 1 / 3, 1.0, 0.0, 0.0, 0.0, 0.0])


def continued(branches, classes):
    counts = Counter()
    for branch in branches:
        counts[classes[branch.node]] += branch.count
    return counts


def test_continuations_go_where_the_rule_says():
    # Root: S = (1/4 * 3 + 1/2) / 4 = 5/16, 3 edges, cost 2; class 1: S = 1/3, 3 edges, cost 1.
    root, merged = (5 / 16 * 11 / 16) ** 0.5 / 2**0.5, (2 / 9) ** 0.5
    edges = {0: 3, 1: 3}
    wanted = Counter()
    for _ in range(6):
        gains = {0: root * 3 / edges[0], 1: merged * 3 / edges[1]}
        best = max(gains, key=gains.__getitem__)
        edges[best] += 1
        wanted[best] += 1
    found = continued(wave(growth(GRAPH, paths=12), CLASSES, SCORES), CLASSES)
    assert found == wanted and set(wanted) == {0, 1}


def test_tokens_are_spent_to_about_a_half():
    for tokens in (1, 2, 9, 40, 400):
        branches = wave(growth(GRAPH, tokens=tokens), CLASSES, SCORES)
        cost = sum(branch.count * (2 if branch.node == 0 else 1) for branch in branches)
        assert branches and cost <= max(tokens / 2 + 1, 2)
        assert cost >= tokens / 2 - 1


def test_where_all_agree_the_root_alone_is_continued():
    wrong = graph_of([(0, None), (0, None), (1, 0.0), (2, 0.0)])
    branches = wave(growth(wrong, paths=8), np.arange(5), np.zeros(5))
    assert [(branch.node, branch.count) for branch in branches] == [(0, 4)]


def test_members_of_a_class_take_turns_by_chance():
    nodes = Counter()
    for seed in range(40):
        for branch in wave(growth(GRAPH, paths=2, seed=seed), CLASSES, SCORES):
            nodes[branch.node] += branch.count
    assert set(nodes) == {1, 2} and min(nodes.values()) > 8


def test_nothing_is_left_for_a_wave_without_a_budget():
    assert wave(growth(GRAPH), CLASSES, SCORES) == ()
    assert wave(growth(GRAPH, tokens=0), CLASSES, SCORES) == ()


@pytest.mark.parametrize("seed", range(5))
def test_graphpo_spends_the_rest_of_its_budget_in_waves(seed):
    method = GraphPO(
        schedule=(6, 3), refill="uncertain", credit=CreditOptions(backup="class", normalize="rms")
    )
    world = World(end=ends_at(4, finish=0.3), tokens=200)
    grown = grow(method, world, seed)
    assert grown.graph.num_trained.sum() == 200
    later = [b.node for plan in grown.plans[1:] for b in plan.branches]
    inner = sum(node != 0 for node in later)
    assert inner > 0
    counts = Counter(later)
    assert max(grown.graph.num_children[1:]) > 3, "a state in the middle was continued again"
    assert counts[0] < sum(counts.values())


@pytest.mark.parametrize("refill", ["prompt", "uncertain"])
def test_what_fills_a_budget_does_not_branch(refill):
    for method in (GraphPO(schedule=(2, 3, 4, 2, 2), refill=refill), tree(schedule=(2, 3, 4))):
        for seed in range(4):
            grown = grow(method, World(end=ends_at(3), tokens=400, max_layers=2000), seed)
            schedule_ends = next(i for i, g in enumerate(grown.growths) if i and not len(g.active))
            for g, plan in list(zip(grown.growths, grown.plans, strict=True))[schedule_ends:]:
                for branch in plan.branches:
                    assert branch.count == 1 or branch.node not in g.active
            assert grown.graph.num_trained.sum() == 400


def test_a_class_with_more_evidence_is_continued_more_often():
    # Both classes have S = 1/2 and cost 1: 1 was left by four edges, 2 by two.
    graph = graph_of([(0, None), (0, None), *[(1, i % 2) for i in range(4)], (2, 1.0), (2, 0.0)])
    scores = np.array([0.5, 0.5, 0.5, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    counts = {b.node: b.count for b in wave(growth(graph, paths=16), np.arange(9), scores)}
    # √(S(1 − S)) is 1/2 everywhere; edges and costs of the root and both classes:
    had, cost = {0: 2, 1: 4, 2: 2}, {0: 2, 1: 1, 2: 1}
    edges, wanted = dict(had), Counter()
    for _ in range(8):
        best = max(had, key=lambda v: had[v] / edges[v] / cost[v] ** 0.5)
        edges[best] += 1
        wanted[best] += 1
    assert counts == wanted and wanted[1] > wanted[2]


@pytest.mark.parametrize(("tokens", "count"), [(4, 1), (6, 2), (7, 2), (9, 2), (10, 3)])
def test_the_half_is_rounded_to_whole_continuations(tokens, count):
    # Every continuation of the root costs 2: as many as come nearest to half the tokens.
    wrong = graph_of([(0, None), (0, None), (1, 0.0), (2, 0.0)])
    (branch,) = wave(growth(wrong, tokens=tokens), np.arange(5), np.zeros(5))
    assert (branch.node, branch.count) == (0, count)


def test_observations_cost_nothing():
    graph = RolloutGraph.root("g", token_ids=[1])
    for parent, reward in ((0, None), (1, 0.0)):
        node = NewNode(parent, (7,) * 9, (1,) + (0,) * 8, (-1.0,) + (NAN,) * 8, reward == 0, reward)
        graph = graph.append([node])
    (branch,) = wave(growth(graph, tokens=12), np.arange(3), np.zeros(3))
    assert (branch.node, branch.count) == (0, 3)  # of 2 policy tokens each


def test_a_path_that_was_stopped_early_is_not_taken_up_again():
    # 8, the same state as 1 and 2, was never continued.
    graph = GRAPH.append([NewNode(0, (7,), (1,), (-1.0,), False, None)])
    classes, scores = np.append(CLASSES, 1), np.append(SCORES, 1 / 3)
    nodes = {
        branch.node
        for seed in range(20)
        for branch in wave(growth(graph, paths=2, seed=seed), classes, scores)
    }
    assert nodes == {1, 2}
