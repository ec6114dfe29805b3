"""GRPO: independent trajectories, each with the z-score of its reward among its group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.advantages import z_scores
from graphpo_agent.graph.arrays import FloatArray
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Growth, Plan, steady_chains
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten
from graphpo_agent.methods.rows import trajectory_credit

__all__ = ["GroupOfOne", "Grpo", "group_advantages"]

GroupOfOne = Literal["raw", "zero"]


@dataclass(frozen=True, slots=True)
class Grpo:
    """Grows ``group_size`` chains; A = (R - mean)/(std + 1e-6), std with ddof 1.

    The numbers are those of verl 0.9.1 (``compute_grpo_outcome_advantage``), but for groups of two
    or more equal rewards: they get 0 exactly, where verl's float32 mean may leave up to 1e-2.
    DeepSeekMath (section 4.1) names neither ddof nor 1e-6. Early-stopped paths belong to no group.

    Attributes:
        group_size: chains per prompt.
        normalize: ``none`` centres only (Dr. GRPO).
        singleton: advantage of the only finished trajectory of a graph: its reward as it is, as
            verl has it, or 0.
    """

    group_size: int = 8
    normalize: Literal["std", "none"] = "std"
    singleton: GroupOfOne = "raw"
    name: str = "grpo"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def plan(self, growth: Growth) -> Plan:
        """``group_size`` chains, or as many as the budget holds; see ``steady_chains``."""
        return steady_chains(growth, self.group_size)

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """Group-relative advantages of the terminals of each graph."""
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        rewards = graph.reward[graph.terminals]
        advantages = group_advantages(rewards, normalize=self.normalize, singleton=self.singleton)
        return trajectory_credit(graph, advantages)


def group_advantages(
    rewards: FloatArray,
    *,
    normalize: Literal["std", "none"] = "std",
    singleton: GroupOfOne = "raw",
) -> FloatArray:
    """[m] advantages of the rewards [m] of one group; see ``Grpo`` for the settings."""
    if singleton == "zero" and len(rewards) == 1:
        return np.zeros(1)
    return z_scores(rewards, normalize=normalize)
