"""TreePO: a tree of limited width, each leaf compared within all its subtrees."""

from collections import Counter
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.methods.growth import Growth
from graphpo_agent.methods.treepo import TreePO
from tests.graph.oracle import Graph
from tests.graph.strategies import graph_of
from tests.methods.growing import World, ends_at, grow
from tests.methods.shapes import credit_of, graph_from, plain_records, trajectory_advantages
from tests.methods.test_waves import graph_of as waiting_graph
from tests.methods.test_waves import growth

# compute_tree_reinforce_plus_plus_baseline_outcome_advantage of multimodal-art-projection/TreePO
# at f055523 with its whitening replaced by the identity, run on all these graphs as one batch, the
# names of the leaves made as in recipe/dapo/dapo_ray_trainer.py: advantages in leaf order, by
# "average" and by "group_size".
AUTHORS = [
    (
        [None, 0, 0, 1, 1, 2, 2, 3, 4, 4, 6],
        [None, None, None, None, None, 1.0, None, 0.0, 1.0, 1.0, 0.0],
        [0.45, -0.6333333333333333, 0.24444444444444446, 0.24444444444444446, -0.55],
        [0.42857142857142855, -0.625, 0.30000000000000004, 0.30000000000000004, -4 / 7],
    ),
    ([None, 0, 1, 2], [None, None, None, 1.0], [1.0], [1.0]),
    (
        [None, 0, 0, 0, 2, 2, 4, 4, 6],
        [None, 1.0, None, 0.0, None, 0.25, None, 1.0, 0.0],
        [0.55, -0.45, -0.18333333333333335, 0.5444444444444444, -0.45555555555555555],
        [0.55, -0.45, -0.1875, 0.55, -0.44999999999999996],
    ),
    (
        [None, 0, 1, 1, 2, 2, 0, 6, 7],
        [None, None, None, 0.0, 1.0, 0.0, None, None, 1.0],
        [-0.41666666666666663, 0.5555555555555556, -0.4444444444444444, 0.5],
        [-0.42857142857142855, 0.5555555555555556, -0.4444444444444444, 0.5],
    ),
]

# generate_sequences_tree_deepth_first_vanilla_mode of the same snapshot with a scripted engine:
# width, divergence, which paths of each layer end (x), and how often each active path is continued.
AUTHORS_GROWTH = [
    (
        16,
        2,
        ["..", "....", "." * 8, "." * 16, "." * 16, "x" * 16],
        [[2], [2] * 2, [2] * 4, [2] * 8, [1] * 16, [1] * 16],
    ),
    (
        16,
        2,
        ["x.", "....", "..xx...x", "..x..xx...x.", "xxxxxxxx"],
        [[2], [4], [2, 2, 2, 2], [2, 2, 2, 2, 4], [1] * 8],
    ),
    (
        16,
        2,
        ["..", "xx..", ".....x..", ".....xxx.....", ".xx.x...x.", "xxxxxx"],
        [[2], [2, 2], [4, 4], [1, 1, 1, 1, 1, 1, 7], [1] * 10, [1] * 6],
    ),
    (
        16,
        2,
        ["..", "....", "xx...xxx", "xxxxx..x.x.", "xx.x", "x"],
        [[2], [2, 2], [2, 2, 2, 2], [3, 3, 5], [1, 1, 1, 1], [1]],
    ),
    (5, 2, ["x.", "...x", "x.x", "x"], [[2], [4], [1, 1, 1], [1]]),
    (7, 3, ["xx.", "xx...", ".x.", ".x", "x"], [[3], [5], [1, 1, 1], [1, 1], [1]]),
    # With a fallback: the last counts are of finished paths that are taken up again.
    (16, 2, ["xx", "xxxx", "x" * 10], [[2], [2, 2], [2] * 5]),
    (5, 2, ["xx", "xxx"], [[2], [2, 1]]),
]


def scripted(layers):
    """Ends of edges in the order in which they are sampled."""
    marks = iter("".join(layers))
    return lambda depth, rng: "terminal" if next(marks) == "x" else "goes_on"


@pytest.mark.parametrize(("parents", "rewards", "average", "group_size"), AUTHORS)
def test_the_authors_numbers(parents, rewards, average, group_size):
    graph = graph_from(parents, rewards)
    plain = trajectory_advantages(TreePO(), graph)
    np.testing.assert_allclose(plain, average, atol=1e-6)
    weighted = trajectory_advantages(TreePO(aggregate="group_size"), graph)
    np.testing.assert_allclose(weighted, group_size, atol=1e-6)


def test_by_hand():
    #   0 ─┬─ 1 ─┬─ 3 R=1
    #      │     ├─ 4 R=0
    #      │     └─ 5 stopped early
    #      └─ 2 ─── 6 R=1
    graph = graph_from([None, 0, 0, 1, 1, 1, 2], [None, None, None, 1.0, 0.0, None, 1.0])
    credit = credit_of(TreePO(), graph)
    a3 = ((1 - 2 / 3) + (1 - 1 / 2)) / 2
    a4 = ((0 - 2 / 3) + (0 - 1 / 2)) / 2
    a6 = 1 - 2 / 3  # alone below node 2, which does not count
    np.testing.assert_allclose(trajectory_advantages(TreePO(), graph), [a3, a4, a6])
    np.testing.assert_allclose(credit.advantages[0, 1:], [(a3 + a4) / 2, a6, a3, a4, 0, a6])
    assert credit.rows is not None and credit.rows.tolist() == [3, 4, 6]
    assert not credit.columns
    weighted = trajectory_advantages(TreePO(aggregate="group_size"), graph)
    assert weighted[0] == pytest.approx((3 * (1 - 2 / 3) + 2 * (1 - 1 / 2)) / 5)


@given(plain_records(), st.sampled_from(["average", "group_size"]))
def test_against_the_definition(record, aggregate):
    g, graph = Graph(record["nodes"]), graph_of(record)
    leaves = [v for v in g.ids if g.terminal(v)]
    expected = []
    for leaf in leaves:
        terms = []
        for state in g.ancestors(leaf):
            group = [g.reward(x) for x in leaves if state in g.ancestors(x)]
            if state == g.root and len(group) == 1:
                terms.append((g.reward(leaf), 1))
            elif len(group) > 1:
                terms.append((g.reward(leaf) - mean(group), len(group)))
        weights = [1 if aggregate == "average" else size for _, size in terms]
        total = sum(term * weight for (term, _), weight in zip(terms, weights, strict=True))
        expected.append(total / sum(weights))
    found = trajectory_advantages(TreePO(aggregate=aggregate), graph)
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(("width", "divergence", "ends", "counts"), AUTHORS_GROWTH)
def test_it_grows_as_the_authors_code(width, divergence, ends, counts):
    grown = grow(TreePO(width=width, divergence=divergence), World(scripted(ends)))
    found = [[n for _, n in grown.counts(h)] for h in range(1, len(ends) + 1)]
    assert found == counts
    assert len(grown.plans) == len(ends) + 1 and not grown.plans[-1].branches
    for asked, plan in zip(grown.growths, grown.plans, strict=True):
        if len(asked.active):
            assert [branch.node for branch in plan.branches] == asked.active.tolist()


def fallback_of(graph, seed, width):
    """The plan where all paths have ended."""
    nothing = np.zeros(0, np.int64)
    growth = Growth(
        graph=graph,
        reached=np.arange(1, graph.num_nodes),
        active=nothing,
        layer=9,
        memory=None,
        tokens_left=None,
        trajectories_left=None,
        path_tokens=10,
        edge_tokens=4,
        tokens_behind=lambda v: 10,
        seed=seed,
        decode=str,
    )
    return [(branch.node, branch.count) for branch in TreePO(width=width).plan(growth).branches]


def test_a_finished_path_is_taken_up_at_any_earlier_state_alike():
    # One finished path over nodes 1, 2, 3; node 4 was stopped early.
    graph = graph_from([None, 0, 1, 2, 1], [None, None, None, 1.0, None])
    plans = [fallback_of(graph, seed, width=16) for seed in range(600)]
    assert all(len(plan) == 1 and plan[0][1] == 2 for plan in plans)
    picked = Counter(node for ((node, _),) in plans)
    assert set(picked) == {0, 1, 2}
    assert all(150 < count < 250 for count in picked.values())  # 200 each


def test_which_path_is_taken_up_is_left_to_chance_and_none_twice_in_a_layer():
    graph = graph_from([None, 0, 0, 0, 1, 2, 3], [None, None, None, None, 1.0, 0.0, 1.0])
    first = Counter()
    for seed in range(300):
        plan = fallback_of(graph, seed, width=6)
        assert [count for _, count in plan] == [2, 1]  # three of six paths are there
        inner = [node for node, _ in plan if node]
        assert len(inner) == len(set(inner))
        first[plan[0][0]] += 1
    assert first[0] > 100 and all(20 < first[node] < 90 for node in (1, 2, 3))  # 150 and 50 each


def test_without_a_finished_path_it_begins_again_at_the_prompt():
    graph = graph_from([None, 0, 1, 0], [None] * 4)
    assert fallback_of(graph, 0, width=16) == [(0, 2)]
    assert fallback_of(graph, 0, width=3) == [(0, 1)]
    assert fallback_of(graph, 0, width=2) == []


@pytest.mark.parametrize(("width", "divergence"), [(16, 2), (7, 3), (1, 2), (4, 1)])
def test_it_reaches_its_width_exactly(width, divergence):
    for seed in range(12):
        world = World(ends_at(5, finish=0.4, stop=0.3))
        graph = grow(TreePO(width=width, divergence=divergence), world, seed).graph
        assert len(graph.leaves) == width


def test_what_is_left_of_a_budget_goes_to_chains():
    graph = grow(TreePO(width=4), World(ends_at(3), trajectories=7)).graph
    assert len(graph.leaves) == 7
    assert np.bincount(graph.parent[1:])[0] == 2 + 3


@pytest.mark.parametrize(
    ("tokens", "counts"), [(None, {1: 2, 2: 2, 3: 4}), (30, {1: 2, 2: 2, 3: 4}), (15, {1: 2, 2: 2})]
)
def test_what_a_budget_lets_wait_is_not_divided(tokens, counts):
    # Three of at most 8 paths are active; each can cost 10 more, an edge 4.
    one = growth(waiting_graph([(0, None)] * 3), tokens=tokens)
    one = replace(one, reached=np.array([1, 2, 3, 4]), active=np.array([1, 2, 3]), edge_tokens=4)
    plan = TreePO(width=8, divergence=2).plan(one)
    assert {branch.node: branch.count for branch in plan.branches} == counts
    assert list(plan.waiting) == [v for v in (1, 2, 3) if v not in counts]


@pytest.mark.parametrize("settings", [{"width": 0}, {"divergence": 0}])
def test_bad_settings_are_one_line(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"treepo: {name} is 0"):
        TreePO(**settings)
