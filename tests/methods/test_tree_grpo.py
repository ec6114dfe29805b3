"""Tree-GRPO: two z-scores per trained leaf, K leaves per tree, trees that grow in rounds."""

import json
import math
from collections import Counter
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.records import parse_graph
from graphpo_agent.graph.rollout_graph import default_trees
from graphpo_agent.methods.tree_grpo import TreeGrpo
from graphpo_agent.methods.treerl import TreeRL
from tests.graph.oracle import Graph
from tests.graph.strategies import graph_of
from tests.methods.growing import World, ends_at, grow
from tests.methods.shapes import credit_of, forests, graph_from, record_from, trajectory_advantages
from tests.methods.test_waves import growth as growth_of

# compute_advantage(data, "tree") of AMAP-ML/Tree-GRPO at 90b1709 (verl/trainer/ppo/
# ray_trainer_ts.py), run on all these prompts as one batch: rewards by tree, advantages by tree.
AUTHORS = [
    (
        [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]],
        [
            [1.800194512753039, -1.868341217932004, -1.868341217932004],
            [0.6454959743703234, 0.6454959743703234, 0.6454959743703234],
        ],
    ),
    ([[0.0], [1.0], [1.0]], [[-1.1546985383827153], [1.5773483155179508], [1.5773483155179508]]),
    ([[1.0]], [[1.9999980926531862]]),
    ([[0.0, 0.0], [0.0, 0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0, 0.0]]),
    (
        [[0.8, 0.2, 0.0], [1.0, 0.1, 0.1], [0.3]],
        [
            [2.2661629850163214, -0.7266411708812948, -1.7242425561805002],
            [2.817184994570569, -1.2423438294443585, -1.2423438294443585],
            [0.1522231202615989],
        ],
    ),
]


@pytest.mark.parametrize(("rewards", "advantages"), AUTHORS)
def test_the_authors_numbers(rewards, advantages):
    numbers = [tree for tree, leaves in enumerate(rewards) for _ in leaves]
    flat = [reward for leaves in rewards for reward in leaves]
    expected = [advantage for leaves in advantages for advantage in leaves]
    # Every leaf hangs below the prompt by an edge of its own; only `tree` says what belongs where.
    graph = graph_from([None, *[0] * len(flat)], [None, *flat], trees=[None, *numbers])
    np.testing.assert_allclose(
        trajectory_advantages(TreeGrpo(), graph), expected, rtol=0, atol=2e-6
    )


def test_by_hand():
    #   0 ─┬─ 1 ─┬─ 3 R=1     tree 0; 4 was stopped early and counts nowhere
    #      │     └─ 4
    #      ├─ 2 ─── 5 R=0     tree 1
    #      └─ 6 R=1           tree 0: a continuation of the prompt
    graph = graph_from(
        [None, 0, 0, 1, 1, 2, 0],
        [None, None, None, 1.0, None, 0.0, 1.0],
        trees=[None, 0, 1, 0, 0, 1, 0],
    )
    credit = credit_of(TreeGrpo(), graph)
    std = math.sqrt(1 / 3)  # of 1, 0, 1
    right, wrong = (1 / 3) / (std + 1e-6), (-2 / 3) / (std + 1e-6)
    # Tree 0 holds equal rewards; tree 1 one leaf, which adds its raw reward, 0.
    np.testing.assert_allclose(trajectory_advantages(TreeGrpo(), graph), [right, wrong, right])
    np.testing.assert_allclose(
        credit.advantages, [[math.nan, right, wrong, right, 0, wrong, right]]
    )
    assert credit.rows is not None and credit.rows.tolist() == [3, 5, 6]
    assert not credit.columns


def slow_z(values, only=None):
    if len(values) == 1:
        return [values[0] / (1 + 1e-6) if only is None else only]
    std = stdev(values)
    return [(x - mean(values)) / (std + 1e-6) if std > 1e-12 else 0.0 for x in values]


def slow_advantages(rewards, trees, only=None):
    """Of a list of leaves: reward and tree of each, and what is worth the only one of a tree."""
    if not rewards:
        return []
    out = slow_z(rewards, only)
    for tree in set(trees):
        inside = [i for i, x in enumerate(trees) if x == tree]
        for i, z in zip(inside, slow_z([rewards[i] for i in inside], only), strict=True):
            out[i] += z
    return out


@given(forests(), st.sampled_from([("raw", None), ("zero", 0.0)]))
def test_against_the_definition(record, singleton):
    name, only = singleton
    method = TreeGrpo(singleton=name)
    g, graph = Graph(record["nodes"]), graph_of(record)
    leaves = [v for v in g.ids if g.terminal(v)]
    expected = slow_advantages(
        [g.reward(v) for v in leaves], [g.node[v].get("tree") for v in leaves], only
    )
    credit = credit_of(method, graph)
    assert credit.rows is not None and graph.node_ids[credit.rows].tolist() == leaves
    np.testing.assert_allclose(trajectory_advantages(method, graph), expected, atol=1e-9)


@given(forests(), st.integers(1, 4))
def test_the_leaves_that_are_not_kept_count_nowhere(record, kept):
    graph = graph_of(record)
    advantages = trajectory_advantages(TreeGrpo(kept=kept), graph)
    trained = ~np.isnan(advantages)
    trees, rewards = graph.tree[graph.terminals], graph.reward[graph.terminals]
    for tree, leaves in Counter(trees.tolist()).items():
        assert trained[trees == tree].sum() == min(kept, leaves)
    expected = slow_advantages(rewards[trained].tolist(), trees[trained].tolist())
    np.testing.assert_allclose(advantages[trained], expected, atol=1e-9)
    credit = credit_of(TreeGrpo(kept=kept), graph)
    assert credit.rows is not None
    np.testing.assert_array_equal(credit.rows, graph.terminals[trained])


def test_which_leaves_are_kept_depends_on_the_graph_alone():
    def star(name, rewards, first_token):
        record = record_from(
            [None, *[0] * 12],
            [None, *rewards],
            trees=[None, *[0] * 6, *[1] * 6],
            tokens=[[1], *([first_token + i] for i in range(12))],
        )
        return parse_graph(json.dumps(record | {"id": name}))

    def kept(graph, *others):
        graphs = [*others, graph]
        classes = [np.arange(x.num_nodes) for x in graphs]
        rows = TreeGrpo(kept=3).assign_credit(graphs, classes)[-1].rows
        assert rows is not None
        return rows.tolist()

    graph = star("g", [0.0, 1.0] * 6, 5)
    chosen = kept(graph)
    assert chosen == kept(graph) == kept(graph, star("h", [1.0] * 12, 9))
    assert chosen == kept(star("g", [1.0] * 12, 5))  # whatever their rewards
    drawn = {tuple(kept(star("g", [1.0] * 12, token))) for token in range(40)}
    assert len(drawn) > 20  # other tokens, other leaves
    often = Counter(leaf for leaves in drawn for leaf in leaves)
    assert set(often) == set(range(1, 13)) and max(often.values()) < 4 * min(often.values())


@pytest.mark.parametrize(("trees", "expansions", "rounds"), [(2, 2, 1), (3, 2, 2), (1, 4, 3)])
def test_it_grows_in_rounds(trees, expansions, rounds):
    method = TreeGrpo(trees=trees, expansions=expansions, rounds=rounds)
    for seed in range(8):
        grown = grow(method, World(ends_at(4, finish=0.3, stop=0.2)), seed)
        graph = grown.graph
        leaves = Counter(graph.tree[graph.leaves].tolist())
        assert leaves == dict.fromkeys(range(trees), 1 + expansions * rounds)
        starts = [h for h, growth in enumerate(grown.growths) if h and not len(growth.active)]
        assert len(starts) == rounds + 1 and not grown.plans[starts[-1]].branches
        for h in starts[:-1]:
            shown = grown.growths[h].graph
            per_tree = Counter()
            for branch in grown.plans[h].branches:
                assert branch.offset is None and branch.count == 1
                assert branch.node == 0 or shown.tree[branch.node] == branch.tree
                assert shown.num_children[branch.node] > 0
                per_tree[branch.tree] += 1
            assert per_tree == dict.fromkeys(range(trees), expansions)
        for v in range(1, graph.num_nodes):
            above = graph.parent[v]
            assert above == 0 or graph.tree[above] == graph.tree[v]


def test_expansions_are_drawn_with_replacement_from_the_prompt_and_inner_nodes():
    # One trunk of three edges: the prompt and two inner nodes, alike.
    picked = Counter()
    twice = 0
    for seed in range(300):
        grown = grow(TreeGrpo(trees=1), World(ends_at(3)), seed)
        first, second = (branch.node for branch in grown.plans[3].branches)
        picked.update([first, second])
        twice += first == second
    assert set(picked) == {0, 1, 2}
    assert all(150 < count < 250 for count in picked.values())  # 200 each
    assert 60 < twice < 140  # a third of 300


def test_what_is_left_of_a_budget_goes_to_chains():
    world = World(ends_at(3), trajectories=9)
    graph = grow(TreeGrpo(trees=2, expansions=1), world).graph
    assert len(graph.leaves) == 9
    assert sorted(Counter(graph.tree[graph.leaves].tolist()).values()) == [1] * 5 + [2] * 2


@pytest.mark.parametrize("settings", [{"trees": 0}, {"expansions": 0}, {"rounds": -1}, {"kept": 0}])
def test_bad_settings_are_one_line(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"tree_grpo: {name} is"):
        TreeGrpo(**settings)


def test_new_trees_are_numbered_behind_the_given_ones():
    parent, tree = np.array([-1, 0, 0, 2, 0]), np.array([-1, 3, -1, -1, -1])
    assert default_trees(parent, tree).tolist() == [-1, 3, 4, 4, 5]


def test_the_structure_s_own_paths_grow_together_where_no_budget_limits_them():
    method = TreeGrpo(trees=2, expansions=2, rounds=1)
    grown = grow(method, World(end=ends_at(4)))
    expanded = 0
    for growth, plan in zip(grown.growths, grown.plans, strict=True):
        if len(growth.active) and growth.memory in (0, 1):
            assert [b.node for b in plan.branches] == growth.active.tolist() and not plan.waiting
            expanded += growth.memory
    assert expanded


@pytest.mark.parametrize(
    "method", [TreeGrpo(trees=2, expansions=2, rounds=1), TreeRL(trees=2, forks=1, rounds=1)]
)
def test_the_chains_that_use_up_a_budget_are_a_round_of_their_own(method):
    structure = graph_from([None, 0, 0], [None, 1.0, 0.0])
    begun = method.plan(replace(growth_of(structure, tokens=8), memory=1))
    assert [(branch.node, branch.count) for branch in begun.branches] == [(0, 2)]
    # One of them goes on, and a new one begins beside it.
    one = growth_of(graph_from([None, 0, 0, 0], [None, 1.0, 0.0, None]), tokens=18)
    going = method.plan(replace(one, active=np.array([3]), memory=begun.memory))
    assert [(branch.node, branch.count) for branch in going.branches] == [(3, 1), (0, 2)]
