"""GRPO: independent trajectories, each with the z-score of its reward among its group."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.advantages import z_scores
from graphpo_agent.graph.budget import Allocation, branching_at
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.method import Credit

__all__ = ["Grpo"]


@dataclass(frozen=True, slots=True)
class Grpo:
    """Grows ``group_size`` chains; A = (R - mean)/(std + 1e-6), std with ddof 1.

    ``normalize="none"`` centres only (Dr. GRPO). An edge that several trajectories share is
    trained with the mean of their advantages; on chains there is no such edge.
    """

    group_size: int = 8
    normalize: Literal["std", "none"] = "std"
    name: str = "grpo"
    needs_states: bool = False
    max_tokens: int | None = None
    merging: MergeOptions = field(default_factory=lambda: MergeOptions(merge="none"))

    def allocate(
        self,
        graph: RolloutGraph,
        classes: NDArray[np.int64],
        active: NDArray[np.int64],
        layer: int,
        carried: int,
    ) -> Allocation:
        """``group_size`` continuations of the prompt, then one of each path."""
        continuations = np.full(len(active), branching_at((self.group_size,), layer), np.int64)
        return Allocation(continuations, saved_pool=0, saved=0, reallocated=0)

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """Group-relative advantages of the terminals of each graph."""
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        of_trajectory = z_scores(graph.reward[graph.terminals], normalize=self.normalize)
        return Credit(
            classes=np.arange(graph.num_nodes),
            advantages=_edge_means(graph, of_trajectory)[None],
            trajectory_advantages=of_trajectory,
        )


def _edge_means(graph: RolloutGraph, of_trajectory: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n] mean advantage of the trajectories through each edge; 0 without one, NaN at the root."""
    total, count = np.zeros(graph.num_nodes), np.zeros(graph.num_nodes)
    for leaf, advantage in zip(graph.terminals.tolist(), of_trajectory.tolist(), strict=True):
        path = graph.path(leaf)
        total[path] += advantage
        count[path] += 1
    means = total / np.maximum(count, 1)
    means[0] = np.nan
    return means
