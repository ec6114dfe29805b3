"""The credit of whole graphs: stages 2 and 3 of Algorithm 1 put together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphpo_agent.errors import ConfigError, GraphError
from graphpo_agent.graph.advantages import (
    Backup,
    Combine,
    Normalize,
    Singleton,
    class_scores,
    correctness_advantage,
    efficiency_advantage,
    node_scores,
    own_counts,
    step_rewards,
    trajectory_advantage,
)
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.equivalence import edge_similarity
from graphpo_agent.graph.forest import Forest, join, on_cycles
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = ["CreditOptions", "GraphCredit", "graph_credit", "graph_credits"]


@dataclass(frozen=True, slots=True)
class CreditOptions:
    """How a graph is turned into advantages. The defaults are the paper's.

    Example, the settings that gave the best gradients on long horizons::

        CreditOptions(backup="class", normalize="rms", singleton="inherit", trajectory_weight=1.0)

    Attributes:
        pool_weight: w of the node score, 0 to 1: the weight of equivalent nodes' terminals.
        efficiency_weight: lambda_eff, at least 0.
        efficiency_combine: an edge on several efficiency paths takes their mean or their sum.
        singleton: a correctness group of fewer than two edges gets 0, or the advantage of the
            edge before it.
        backup: how counts rise to a node: over the leaves below it, as the mean over its
            children, or as the mean over the edges that leave its class.
        normalize: a correctness group is divided by its standard deviation, by nothing, or by
            the root mean square over all groups of the graph.
        trajectory_weight: mu, at least 0: the weight of the trajectory advantage.

    Raises:
        ConfigError: a value outside its range.
    """

    pool_weight: float = 0.7
    efficiency_weight: float = 0.2
    efficiency_combine: Combine = "mean"
    singleton: Singleton = "zero"
    backup: Backup = "leaf"
    normalize: Normalize = "std"
    trajectory_weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.pool_weight <= 1:
            raise ConfigError(f"pool_weight {self.pool_weight} is outside [0, 1]")
        for name, weight in (
            ("efficiency_weight", self.efficiency_weight),
            ("trajectory_weight", self.trajectory_weight),
        ):
            if not 0 <= weight < float("inf"):
                raise ConfigError(f"{name} {weight} is not a finite number of at least 0")
        for name, value, choices in (
            ("efficiency_combine", self.efficiency_combine, ("mean", "sum")),
            ("singleton", self.singleton, ("zero", "inherit")),
            ("backup", self.backup, ("leaf", "mean", "class")),
            ("normalize", self.normalize, ("std", "none", "rms")),
        ):
            if value not in choices:
                raise ConfigError(f"{name} is {value!r}, want one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True, eq=False)
class GraphCredit:
    """The credit of one graph, one entry per node.

    Example: a root with a right and a wrong answer::

        correct = [1, 1, 0]    total = [2, 1, 1]    score = [.5, 1, 0]
        step_reward = [nan, .5, -.5]    correctness_advantage = [nan, .707, -.707]

    Attributes:
        classes: [n] equivalence classes.
        correct: [n] the paper's c_own: rewards of the terminals below (and of itself).
        total: [n] the paper's t_own: how many terminals that are.
        score: [n] S(v), NaN where undefined.
        step_reward: [n] r_step of the edge to v, NaN at the root and where undefined.
        correctness_advantage: [n] A_cor, NaN at the root, 0 on unscored edges.
        efficiency_advantage: [n] A_eff, NaN at the root.
        trajectory_advantage: [n] A_traj, NaN at the root; None when its weight is 0.
        advantage: [n] A_dual, NaN at the root.
        unscored: [n] edges whose step reward is undefined; False at the root.
    """

    classes: IntArray
    correct: FloatArray
    total: FloatArray
    score: FloatArray
    step_reward: FloatArray
    correctness_advantage: FloatArray
    efficiency_advantage: FloatArray
    trajectory_advantage: FloatArray | None
    advantage: FloatArray
    unscored: BoolArray


def graph_credit(graph: RolloutGraph, classes: IntArray, options: CreditOptions) -> GraphCredit:
    """The credit of one graph (Algorithm 1, stages 2 and 3). See ``graph_credits``."""
    return graph_credits([graph], [classes], options)[0]


def graph_credits(
    graphs: Sequence[RolloutGraph], classes: Sequence[IntArray], options: CreditOptions
) -> list[GraphCredit]:
    """The credit of several graphs in one pass (Algorithm 1, stages 2 and 3).

    Args:
        graphs: the rollout graphs of a step.
        classes: for each, the equivalence class of each node.
        options: the settings.

    Raises:
        GraphError: ``backup: class`` with classes (given in a file) that form a cycle.
    """
    if not graphs:
        return []
    forest = join(graphs)
    starts = forest.starts.tolist()
    joined = np.concatenate([c + start for c, start in zip(classes, starts, strict=False)])
    if options.backup == "class":
        _refuse_cycles(graphs, forest, joined)
    similarity = np.concatenate([edge_similarity(graph) for graph in graphs])
    whole = _forest_credit(forest, joined, similarity, options)
    return [
        _cut(whole, own, slice(start, end))
        for own, start, end in zip(classes, starts, starts[1:], strict=False)
    ]


def _forest_credit(
    forest: Forest, classes: IntArray, similarity: FloatArray, options: CreditOptions
) -> GraphCredit:
    parent, edges = forest.parent, forest.parent >= 0
    leaf_counts = own_counts(parent, forest.depth, forest.terminal, forest.reward)
    correct, total = leaf_counts
    if options.backup == "mean":
        correct, total = own_counts(
            parent, forest.depth, forest.terminal, forest.reward, backup="mean"
        )
    if options.backup == "class":
        score = class_scores(parent, forest.terminal, forest.reward, classes)
    else:
        score = node_scores(correct, total, classes, options.pool_weight)
    step_reward = step_rewards(parent, score, similarity)
    correctness = correctness_advantage(
        parent,
        classes,
        step_reward,
        forest.graph_of,
        singleton=options.singleton,
        normalize=options.normalize,
    )
    efficiency = efficiency_advantage(
        parent, forest.depth, classes, score, combine=options.efficiency_combine
    )
    advantage = correctness + options.efficiency_weight * efficiency
    trajectory = None
    if options.trajectory_weight > 0:
        trajectory = trajectory_advantage(
            parent, forest.terminal, forest.reward, *leaf_counts, forest.graph_of
        )
        advantage += options.trajectory_weight * trajectory
    return GraphCredit(
        classes=classes,
        correct=correct,
        total=total,
        score=score,
        step_reward=step_reward,
        correctness_advantage=correctness,
        efficiency_advantage=efficiency,
        trajectory_advantage=trajectory,
        advantage=advantage,
        unscored=edges & np.isnan(step_reward),
    )


def _cut(whole: GraphCredit, classes: IntArray, nodes: slice) -> GraphCredit:
    trajectory = whole.trajectory_advantage
    return GraphCredit(
        classes=classes,
        correct=whole.correct[nodes],
        total=whole.total[nodes],
        score=whole.score[nodes],
        step_reward=whole.step_reward[nodes],
        correctness_advantage=whole.correctness_advantage[nodes],
        efficiency_advantage=whole.efficiency_advantage[nodes],
        trajectory_advantage=None if trajectory is None else trajectory[nodes],
        advantage=whole.advantage[nodes],
        unscored=whole.unscored[nodes],
    )


def _refuse_cycles(graphs: Sequence[RolloutGraph], forest: Forest, classes: IntArray) -> None:
    caught = np.flatnonzero(on_cycles(forest.parent, classes))
    if len(caught):
        graph = graphs[int(forest.graph_of[caught[0]])]
        raise GraphError(
            f"graph {graph.id!r}: backup 'class' needs classes without cycles, and the given ones "
            "have one; let the classes be computed"
        )
