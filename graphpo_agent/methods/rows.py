"""Credit that belongs to whole trajectories, each trained as a row of its own."""

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.method import Credit

__all__ = ["edge_means", "trajectory_credit"]


def trajectory_credit(graph: RolloutGraph, of_trajectory: NDArray[np.float64]) -> Credit:
    """The credit of a graph whose trained trajectories have one advantage each.

    Args:
        graph: any; its nodes are all taken as different states.
        of_trajectory: [num_terminals] in leaf order; NaN for a trajectory that is not trained.
    """
    return Credit(
        classes=np.arange(graph.num_nodes),
        advantages=edge_means(graph, of_trajectory)[None],
        trajectory_advantages=of_trajectory,
        rows=graph.terminals[~np.isnan(of_trajectory)],
    )


def edge_means(graph: RolloutGraph, of_trajectory: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n] mean advantage of the trained trajectories through each edge; NaN at the root.

    An edge that no trained trajectory runs through has 0.
    """
    total, count = np.zeros(graph.num_nodes), np.zeros(graph.num_nodes)
    for leaf, advantage in zip(graph.terminals.tolist(), of_trajectory.tolist(), strict=True):
        if not np.isnan(advantage):
            path = graph.path(leaf)
            total[path] += advantage
            count[path] += 1
    means = total / np.maximum(count, 1)
    means[0] = np.nan
    return means
