"""The paper's theory, measured: estimates from sampled rewards with known values.

Appendix "Theoretical Analysis". Seeds are fixed; a sample variance from N draws of a bounded
variable has a relative standard error of about √(2/N), and tolerances are 4 of those.
"""

from dataclasses import replace

import numpy as np
import pytest

from graphpo_agent.graph.advantages import correctness_advantage
from graphpo_agent.graph.credit import CreditOptions, graph_credit, graph_credits
from graphpo_agent.graph.equivalence import MergeOptions, find_classes
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph

REPEATS = 6000
TOLERANCE = 4 * np.sqrt(2 / REPEATS)


def plain(parent, key=None, reward=None):
    return NewNode(parent, (7,), (1,), (-0.5,), reward is not None, reward, key=key)


def star(members_of_states, terminals_each):
    """A root, ``members_of_states[s]`` members of each state s, and answers below each."""
    graph = RolloutGraph.root("star", token_ids=[1])
    states = [s for s, count in enumerate(members_of_states) for _ in range(count)]
    graph = graph.append([plain(0, key=f"state {s}") for s in states])
    members = range(1, graph.num_nodes)
    answers = [plain(v, reward=0.0) for v in members for _ in range(terminals_each)]
    return graph.append(answers), np.array(states)


def sampled_scores(members_of_states, terminals_each, values, pool_weight, seed):
    """[REPEATS, members] S of every member; a member's answers are right with its value."""
    graph, states = star(members_of_states, terminals_each)
    classes = find_classes(graph, MergeOptions(merge_terminals="never"))
    rng = np.random.default_rng(seed)
    chance = np.repeat(np.asarray(values)[states], terminals_each)
    draws = rng.random((REPEATS, len(chance))) < chance
    reward = np.full((REPEATS, graph.num_nodes), np.nan)
    reward[:, graph.terminal] = draws
    many = [replace(graph, reward=row) for row in reward]
    credits = graph_credits(many, [classes] * REPEATS, CreditOptions(pool_weight=pool_weight))
    return np.stack([credit.score[1 : 1 + len(states)] for credit in credits])


def rho(size, pool_weight):
    return (1 + (size - 1) * pool_weight**2) / (1 + pool_weight * (size - 1)) ** 2


@pytest.mark.parametrize("pool_weight", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_variance_of_a_pooled_score(size, pool_weight):
    """Lemma "Variance with equivalence-class pooling", with equality for equal values."""
    value, m = 0.3, 4
    scores = sampled_scores([size], m, [value], pool_weight, seed=size)
    expected = rho(size, pool_weight) * value * (1 - value) / m
    assert scores[:, 0].var(ddof=1) == pytest.approx(expected, rel=TOLERANCE)
    assert scores[:, 0].mean() == pytest.approx(value, abs=4 * np.sqrt(expected / REPEATS))


def test_bias_of_a_pooled_score_stays_within_the_spread_of_the_class():
    """The same lemma's bias bound: pooling moves S towards the other members' values."""
    graph, _ = star([2], 4)
    low, high, w = 0.4, 0.6, 0.7
    rng = np.random.default_rng(5)
    many = []
    for draw in rng.random((REPEATS, 8)) < np.repeat([low, high], 4):
        reward = np.full(graph.num_nodes, np.nan)
        reward[graph.terminal] = draw
        many.append(replace(graph, reward=reward))
    classes = find_classes(graph, MergeOptions(merge_terminals="never"))
    credits = graph_credits(many, [classes] * REPEATS, CreditOptions(pool_weight=w))
    mean = np.mean([credit.score[1] for credit in credits])
    assert mean == pytest.approx((low + w * high) / (1 + w), abs=4 * 0.5 / np.sqrt(4 * REPEATS))
    assert abs(mean - low) < high - low


def centred(scores):
    """The theorem's raw advantages: each child's estimate minus the children's mean."""
    return scores - scores.mean(axis=1, keepdims=True)


def test_graph_advantage_varies_less_than_tree_and_tree_less_than_grpo():
    """Theorem "GraphPO yields lower-variance advantage estimates via shared suffixes"."""
    values, m, w, size = [0.2, 0.5, 0.8], 4, 0.7, 2
    first_members = np.arange(3) * size
    graph = sampled_scores([size] * 3, m, values, w, seed=11)[:, first_members]
    tree = sampled_scores([1] * 3, m, values, w, seed=12)
    grpo = sampled_scores([1] * 3, 1, values, w, seed=13)
    var_graph, var_tree, var_grpo = (centred(x).var(axis=0, ddof=1) for x in (graph, tree, grpo))
    assert (var_graph <= rho(size, w) * var_tree * (1 + 2 * TOLERANCE)).all()
    assert (var_tree <= var_grpo).all()
    # Answers are independent, so the tree's estimate has exactly 1/m of GRPO's variance.
    np.testing.assert_allclose(var_tree, var_grpo / m, rtol=2 * TOLERANCE)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_variance_of_a_centred_advantage_in_a_group(size):
    """Proposition "Lower correctness-advantage variance": (1 − 1/K) σ², K edges in the group."""
    sigma = 0.7
    rng = np.random.default_rng(size)
    # REPEATS roots side by side, each with a group of ``size`` edges and independent rewards.
    roots = np.arange(REPEATS) * (size + 1)
    parent = np.repeat(roots, size + 1)
    parent[roots] = -1
    reward = rng.normal(0, sigma, len(parent))
    reward[roots] = np.nan
    graph_of = np.repeat(np.arange(REPEATS), size + 1)
    everyone = np.arange(len(parent))
    advantage = correctness_advantage(parent, everyone, reward, graph_of, normalize="none")
    expected = (1 - 1 / size) * sigma**2
    assert advantage[roots + 1].var(ddof=1) == pytest.approx(expected, rel=TOLERANCE)


def test_merging_enlarges_the_group():
    """The same proposition's K_G ≥ K_T: members' edges are compared with each other."""
    graph = RolloutGraph.root("g", token_ids=[1])
    graph = graph.append([plain(0, "s"), plain(0, "s")])
    graph = graph.append([plain(1, reward=1.0), plain(2, reward=0.0)])
    tree = graph_credit(graph, np.arange(5), CreditOptions())
    merged = graph_credit(graph, find_classes(graph, MergeOptions()), CreditOptions())
    assert (tree.correctness_advantage[3:] == 0).all()  # two groups of one
    assert merged.correctness_advantage[3:] == pytest.approx([0.7071, -0.7071], abs=1e-3)


def test_efficiency_gradient_is_the_advantage_times_the_gradient_of_the_path():
    """Lemma "Path-length gradient", for ways that share no edge."""
    graph = RolloutGraph.root("ways", token_ids=[1])
    for length in (1, 2, 4):  # three ways to the state "s"
        last = 0
        for h in range(length):
            key = "s" if h == length - 1 else f"way {length}, step {h}"
            graph = graph.append([plain(last, key)])
            last = graph.num_nodes - 1
        graph = graph.append([plain(last, reward=1.0), plain(last, reward=0.0)])
    classes = find_classes(graph, MergeOptions(merge_terminals="never"))
    members = np.flatnonzero(classes == 1)
    assert graph.depth[members].tolist() == [1, 2, 4]
    credit = graph_credit(graph, classes, CreditOptions())
    gradient = np.random.default_rng(3).standard_normal((graph.num_nodes, 5))  # ∇ log π(edge)
    summed = credit.efficiency_advantage[1:] @ gradient[1:]
    length = np.array([1.0, 2.0, 4.0])
    value = credit.score[members].mean() * (length.mean() - length) / length.std(ddof=1)
    paths = np.stack([gradient[graph.path(v)].sum(axis=0) for v in members.tolist()])
    np.testing.assert_allclose(summed, value @ paths, rtol=1e-5)
