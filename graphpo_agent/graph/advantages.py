"""The equations of Algorithm 1's stages 2 and 3 (paper, sections 3.3 and 3.4).

Pure functions over arrays with one entry per node; an edge is named by the node it leads to, and
its entry at a root is NaN. Undefined scores and rewards are NaN. All functions work on one tree
or on several side by side (``parent`` is -1 at every root, parents come before children), as
long as no class spans two of them. Classes are named by the position of a member.
"""

from typing import Literal

import numpy as np

from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.forest import by_layer

__all__ = [
    "Backup",
    "Combine",
    "Normalize",
    "Singleton",
    "class_scores",
    "correctness_advantage",
    "efficiency_advantage",
    "inherit_advantages",
    "node_scores",
    "own_counts",
    "step_rewards",
    "trajectory_advantage",
    "z_scores",
]

Backup = Literal["leaf", "mean", "class"]
Singleton = Literal["zero", "inherit"]
Normalize = Literal["std", "none", "rms"]
Combine = Literal["mean", "sum"]

_EPSILON = 1e-6  # added to a standard deviation before dividing by it
_NO_SPREAD = 1e-12  # a standard deviation up to here is 0


def own_counts(
    parent: IntArray,
    depth: IntArray,
    terminal: BoolArray,
    reward: FloatArray,
    *,
    backup: Literal["leaf", "mean"] = "leaf",
) -> tuple[FloatArray, FloatArray]:
    """The paper's c_own and t_own, along direct edges (section 3.3).

    Args:
        parent: [n].
        depth: [n].
        terminal: [n].
        reward: [n], NaN where not terminal.
        backup: ``leaf`` sums the rewards below a node; ``mean`` takes t_own times the mean over
            its children of their own ratio, children without one left out.

    Returns:
        ``correct`` and ``total`` [n]; a terminal counts itself.
    """
    total = terminal.astype(np.float64)
    correct = np.where(terminal, reward, 0.0)
    for nodes in by_layer(depth)[:0:-1]:
        above = parent[nodes]
        np.add.at(total, above, total[nodes])
        if backup == "leaf":
            np.add.at(correct, above, correct[nodes])
            continue
        known = nodes[total[nodes] > 0]
        parents, place = np.unique(parent[known], return_inverse=True)
        ratio = np.bincount(place, correct[known] / total[known]) / np.bincount(place)
        correct[parents] = total[parents] * ratio
    return correct, total


def node_scores(
    correct: FloatArray, total: FloatArray, classes: IntArray, pool_weight: float
) -> FloatArray:
    """The paper's S(v), own counts pooled over the class (section 3.3).

    Args:
        correct: [n] c_own.
        total: [n] t_own.
        classes: [n].
        pool_weight: w in [0, 1].

    Returns:
        [n]; NaN where no terminal counts.
    """
    n = len(classes)
    others_correct = np.bincount(classes, correct, n)[classes] - correct
    others_total = np.bincount(classes, total, n)[classes] - total
    weight = total + pool_weight * others_total
    pooled = correct + pool_weight * others_correct
    return np.divide(pooled, weight, out=np.full(n, np.nan), where=weight > 0)


def class_scores(
    parent: IntArray, terminal: BoolArray, reward: FloatArray, classes: IntArray
) -> FloatArray:
    """S(Q): the mean, over the direct edges that leave any member of Q, of where they lead.

    An edge leads to the score of the class it reaches, or to the reward of a terminal; edges that
    reach an undefined score are left out. Computed from the leaves up over the class graph, which
    must have no cycle.

    Returns:
        [n] the score of each node's class, a terminal's its reward; NaN where undefined.
    """
    n = len(parent)
    sums, known = np.zeros(n), np.zeros(n)
    child = np.flatnonzero(parent >= 0)
    source, target = classes[parent[child]], classes[child]
    ends = terminal[child]
    np.add.at(sums, source[ends], reward[child[ends]])
    np.add.at(known, source[ends], 1.0)
    source, target = source[~ends], target[~ends]
    waiting = np.bincount(source, minlength=n)
    while len(source):
        ready = waiting[target] == 0
        if not ready.any():
            raise ValueError("the class graph has a cycle")
        a, b = source[ready], target[ready]
        np.subtract.at(waiting, a, 1)
        a, b = a[known[b] > 0], b[known[b] > 0]
        np.add.at(sums, a, sums[b] / known[b])
        np.add.at(known, a, 1.0)
        source, target = source[~ready], target[~ready]
    score = np.divide(sums, known, out=np.full(n, np.nan), where=known > 0)
    return np.where(terminal, reward, score[classes])


def step_rewards(parent: IntArray, score: FloatArray, similarity: FloatArray) -> FloatArray:
    """The paper's r_step(u, v) = (S(v) − S(u)) (1 − eta(u, v)) of the edge to v (section 3.3).

    Args:
        parent: [n].
        score: [n] S.
        similarity: [n] eta of each node with its parent, in [0, 1].

    Returns:
        [n]; NaN at roots and where either score is undefined.
    """
    return np.where(parent >= 0, (score - score[parent]) * (1.0 - similarity), np.nan)


def correctness_advantage(
    parent: IntArray,
    classes: IntArray,
    step_reward: FloatArray,
    graph_of: IntArray,
    *,
    singleton: Singleton = "zero",
    normalize: Normalize = "std",
) -> FloatArray:
    """The paper's A_cor: step rewards compared among the edges that leave one class (section 3.4).

    Args:
        parent: [n].
        classes: [n].
        step_reward: [n] r_step.
        graph_of: [n] number of each node's graph.
        singleton: what a group of fewer than two scored edges gets: 0, or the advantage of the
            edge before it (0 at an edge that leaves a root).
        normalize: divide by the group's standard deviation (ddof 1), by nothing, or by the root
            mean square of the deviations over all groups of two or more of the graph.

    Returns:
        [n]; NaN at roots, 0 on edges without a step reward.
    """
    n = len(parent)
    advantage = np.where(parent >= 0, 0.0, np.nan)
    edges = np.flatnonzero(~np.isnan(step_reward))
    group = classes[parent[edges]]
    deviation, std, size = _group_moments(step_reward[edges], group, n)
    grouped = size >= 2
    if normalize == "std":
        scale = std + _EPSILON
    elif normalize == "rms":
        graph = graph_of[edges]
        squares = np.bincount(graph[grouped], deviation[grouped] ** 2, minlength=n)
        counts = np.bincount(graph[grouped], minlength=n)
        scale = np.sqrt(squares / np.maximum(counts, 1))[graph] + _EPSILON
    else:
        scale = np.ones(len(edges))
    spread = grouped & (std > _NO_SPREAD)
    advantage[edges[spread]] = deviation[spread] / scale[spread]
    if singleton == "inherit":
        inherit_advantages(advantage, parent, edges[~grouped])
    return advantage


def _group_moments(
    values: FloatArray, group: IntArray, num_groups: int
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Per value: its deviation from its group's mean, the group's std (ddof 1) and its size."""
    size = np.bincount(group, minlength=num_groups)
    mean = np.bincount(group, values, num_groups) / np.maximum(size, 1)
    deviation = values - mean[group]
    squares = np.bincount(group, deviation**2, num_groups)
    std = np.sqrt(squares / np.maximum(size - 1, 1))
    return deviation, std[group], size[group]


def inherit_advantages(advantage: FloatArray, parent: IntArray, lone: IntArray) -> None:
    """Give lone edges, in place, the advantage of the nearest edge before them that is not lone.

    Args:
        advantage: [n], NaN at roots; an edge behind nothing but lone ones gets 0.
        parent: [n].
        lone: nodes whose edges are lone.
    """
    source = np.arange(len(parent))
    source[lone] = parent[lone]
    while (source[source] != source).any():
        source = source[source]
    inherited = advantage[source[lone]]
    advantage[lone] = np.where(np.isnan(inherited), 0.0, inherited)


def efficiency_advantage(
    parent: IntArray,
    depth: IntArray,
    classes: IntArray,
    score: FloatArray,
    *,
    combine: Combine = "mean",
) -> FloatArray:
    """The paper's A_eff: shorter ways to the same state are better (section 3.4).

    Each member v of a class Q of two or more gets S̄_Q (mean ℓ − ℓ_v) / std ℓ (ddof 1), ℓ being
    the edges from the members' deepest common ancestor; S̄_Q is the mean of the defined scores.
    Every edge on that way receives the whole value. Classes without a defined score or with equal
    ℓ are skipped.

    Args:
        parent: [n].
        depth: [n].
        classes: [n].
        score: [n] S.
        combine: an edge on several ways takes the mean of what it receives, or the sum.

    Returns:
        [n]; NaN at roots, 0 on edges that receive nothing.
    """
    n = len(parent)
    scored = ~np.isnan(score)
    num_scored = np.bincount(classes[scored], minlength=n)
    gate = np.bincount(classes[scored], score[scored], n) / np.maximum(num_scored, 1)
    # ℓ is the depth up to a constant of the class, so both have the same deviations.
    deviation, std, _ = _group_moments(depth.astype(np.float64), classes, n)
    member = np.flatnonzero((std > _NO_SPREAD) & (num_scored[classes] > 0))
    group = classes[member]
    value = -gate[group] * deviation[member] / (std[member] + _EPSILON)
    received, times = np.zeros(n), np.zeros(n)
    place = member
    for h in range(int(depth[member].max(initial=0)), 0, -1):
        apart = _apart(place, group, n)
        place, group, value = place[apart], group[apart], value[apart]
        climbing = depth[place] == h
        edges = place[climbing]
        np.add.at(received, edges, value[climbing])
        np.add.at(times, edges, 1.0)
        place[climbing] = parent[edges]
    if combine == "mean":
        received /= np.maximum(times, 1.0)
    return np.where(parent >= 0, received, np.nan)


def _apart(place: IntArray, group: IntArray, num_groups: int) -> BoolArray:
    """Per entry, whether its group has not yet come together in one place."""
    low, high = np.full(num_groups, np.iinfo(np.int64).max), np.full(num_groups, -1)
    np.minimum.at(low, group, place)
    np.maximum.at(high, group, place)
    return low[group] < high[group]


def trajectory_advantage(
    parent: IntArray,
    terminal: BoolArray,
    reward: FloatArray,
    correct: FloatArray,
    total: FloatArray,
    graph_of: IntArray,
) -> FloatArray:
    """A_traj of the edge to v: (mean reward below v − mean of the graph) / std of the graph.

    Args:
        parent: [n].
        terminal: [n].
        reward: [n], NaN where not terminal.
        correct: [n] c_own by leaves.
        total: [n] t_own.
        graph_of: [n] number of each node's graph.

    Returns:
        [n]; NaN at roots; 0 where v has no terminal below it and where the graph's rewards do not
        differ.
    """
    n = len(parent)
    ends = np.flatnonzero(terminal)
    graph = graph_of[ends]
    size = np.bincount(graph, minlength=n)
    mean = np.bincount(graph, reward[ends], n) / np.maximum(size, 1)
    squares = np.bincount(graph, (reward[ends] - mean[graph]) ** 2, n)
    std = np.sqrt(squares / np.maximum(size - 1, 1))[graph_of]
    below = np.divide(correct, total, out=np.zeros(n), where=total > 0)
    known = (total > 0) & (std > _NO_SPREAD)
    advantage = np.where(known, (below - mean[graph_of]) / (std + _EPSILON), 0.0)
    return np.where(parent >= 0, advantage, np.nan)


def z_scores(rewards: FloatArray, *, normalize: Literal["std", "none"] = "std") -> FloatArray:
    """GRPO's group advantage: (R − mean) / (std + 1e-6), std with ddof 1.

    A group of one has mean 0 and standard deviation 1, so that its reward is its advantage; a
    larger group of equal rewards has advantage 0.

    Args:
        rewards: [m] of one group.
        normalize: ``none`` centres only.
    """
    if len(rewards) <= 1:
        mean, std = 0.0, 1.0
    else:
        mean, std = rewards.mean(), rewards.std(ddof=1)
    if std <= _NO_SPREAD:
        return np.zeros(len(rewards))
    return rewards - mean if normalize == "none" else (rewards - mean) / (std + _EPSILON)
