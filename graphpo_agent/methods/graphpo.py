"""GraphPO (paper, sections 3.2 to 3.4)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.budget import allocate, branching_at
from graphpo_agent.graph.credit import CreditOptions, GraphCredit, graph_credit, graph_credits
from graphpo_agent.graph.equivalence import MergeOptions, find_classes
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Branch, Growth, Plan, dealt, onward, steady_chains
from graphpo_agent.methods.method import Credit, Whiten
from graphpo_agent.methods.waves import wave

__all__ = ["GraphPO"]

_COMPLETE = "complete"
"""The memory of a graph whose schedule is done; before that it is the pool of what was saved."""


@dataclass(frozen=True, slots=True)
class GraphPO:
    """Grows by schedule, merges equivalent states, credits with the dual-group advantage.

    Attributes:
        schedule: b_h per layer; 1 beyond it.
        merging: which states are taken as the same.
        reallocate: where what redundant states save goes; see ``allocate``.
        credit: how a graph is turned into advantages.
        objective: both advantages clipped together, or apart.
        refill: what a budget leaves when all paths have ended goes to chains from the prompt, or
            to continuations of uncertain states, in waves (see ``wave``).
    """

    schedule: tuple[int, ...] = (2, 5, 4, 2, 2)
    merging: MergeOptions = field(default_factory=MergeOptions)
    reallocate: Literal["novel", "uncertain", "none"] = "novel"
    credit: CreditOptions = field(default_factory=CreditOptions)
    objective: Literal["joint", "separate"] = "joint"
    refill: Literal["prompt", "uncertain"] = "prompt"
    name: str = "graphpo"
    needs_states: bool = True
    whiten: Whiten = "none"

    def plan(self, growth: Growth) -> Plan:
        """Algorithm 1, stage 1: halve the redundant, give what is saved to the rest."""
        if growth.memory is _COMPLETE or not len(growth.active):
            return self._refill(growth)
        pool = growth.memory or 0
        plan = onward(growth, pool)
        going = np.array([branch.node for branch in plan.branches])
        layers = growth.graph.depth[going] + 1
        branching = {layer: branching_at(self.schedule, layer) for layer in np.unique(layers)}
        if not pool and set(branching.values()) == {1}:  # nothing to save and nothing to give
            return plan
        graph, classes = growth.graph, find_classes(growth.graph, self.merging)
        uncertain = self.reallocate == "uncertain"
        scores = graph_credit(graph, classes, self.credit).score if uncertain else None
        counts = np.zeros(len(going), np.int64)
        order: list[NDArray[np.int64]] = []
        saved = 0
        for layer, number in branching.items():
            here = layers == layer
            allocation = allocate(
                graph,
                classes,
                going[here],
                number,
                pool,
                options=self.merging,
                reallocate=self.reallocate,
                scores=scores,
                all_active=growth.active,
            )
            counts[here], pool = allocation.continuations, allocation.saved_pool
            order.append(np.flatnonzero(here)[allocation.order])
            saved += allocation.saved
        counts = dealt(going, counts, np.concatenate(order), growth.trajectories_left)
        usual = np.array([branching[layer] for layer in layers])
        reallocated = int(np.maximum(counts - usual, 0).sum())
        branches = tuple(map(Branch, going.tolist(), counts.tolist()))
        return Plan(branches, pool, saved, reallocated, plan.waiting)

    def _refill(self, growth: Growth) -> Plan:
        """What the budget still holds once all paths of the schedule have ended."""
        if self.refill == "prompt":
            return steady_chains(growth, 0, _COMPLETE)
        if len(growth.active):
            return onward(growth, _COMPLETE)
        classes = find_classes(growth.graph, self.merging)
        scores = graph_credit(growth.graph, classes, self.credit).score
        return Plan(wave(growth, classes, scores), _COMPLETE)

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """Algorithm 1, stages 2 and 3."""
        return [self._credit(credit) for credit in graph_credits(graphs, classes, self.credit)]

    def _credit(self, credit: GraphCredit) -> Credit:
        terms = [credit.advantage]
        if self.objective == "separate":
            efficiency = self.credit.efficiency_weight * credit.efficiency_advantage
            terms = [credit.advantage - efficiency, efficiency]
        columns = {
            "correct": credit.correct,
            "total": credit.total,
            "score": credit.score,
            "step_reward": credit.step_reward,
            "correctness_advantage": credit.correctness_advantage,
            "efficiency_advantage": credit.efficiency_advantage,
        }
        if credit.trajectory_advantage is not None:
            columns["trajectory_advantage"] = credit.trajectory_advantage
        columns["advantage"] = credit.advantage
        return Credit(credit.classes, np.stack(terms), columns)
