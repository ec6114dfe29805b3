"""Sums over grown graphs, of which a step's metrics are made; those of its parts add up."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.methods.method import Credit
from graphpo_agent.rollout.grow import Rollout

__all__ = ["Tally", "credit_tally", "num_merged", "rollout_tally"]

_TOTALS = ("tokens/", "budget/")
_UNITS = {
    "reward/mean": "trained",
    "reward/mixed_prompts": "graphs",
    "rollout/response_tokens": "judged",
    "rollout/turns": "judged",
    "rollout/nodes": "graphs",
    "rollout/terminals": "graphs",
    "rollout/left_out": "paths",
}
"""What the metric of a name is a mean over, where that is not all edges."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What is counted of some graphs; the sum of two is that of both together.

    Attributes:
        sums: by the name of the metric.
        units: how many ``graphs``, ``edges``, ``paths``, ``judged`` paths and ``trained`` ones of
            these there are.
    """

    sums: Mapping[str, float] = field(default_factory=dict[str, float])
    units: Mapping[str, float] = field(default_factory=dict[str, float])

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(_added(self.sums, other.sums), _added(self.units, other.units))

    @property
    def metrics(self) -> dict[str, float]:
        """Totals of tokens and budgets, means of the rest; NaN where there is nothing to count."""
        return {name: value / self._count(name) for name, value in self.sums.items()}

    def _count(self, name: str) -> float:
        if name.startswith(_TOTALS):
            return 1
        return self.units.get(_UNITS.get(name, "edges"), 0) or float("nan")


def rollout_tally(rollouts: Sequence[Rollout]) -> Tally:
    """What was grown.

    The mean reward is that of the trajectories that are trained: rollouts from the middle of one,
    which only estimate a value, say little of how often the policy is right.
    """
    graphs = [rollout.graph for rollout in rollouts]
    rewards = [graph.reward[graph.terminals] for graph in graphs]
    trained = [graph.reward[graph.terminal & (graph.num_trained > 0)] for graph in graphs]
    judged = [r.states[v] for r in rollouts for v in r.graph.terminals.tolist()]
    left_out = [r.left_out[v] for r in rollouts for v in r.graph.leaves.tolist()]
    statuses = Counter(status for rollout in rollouts for status in rollout.statuses[1:])
    ledgers = [rollout.ledger for rollout in rollouts]
    sums = {
        "reward/mean": float(sum(each.sum() for each in trained)),
        "reward/mixed_prompts": sum(len(set(each.tolist())) > 1 for each in rewards),
        "rollout/response_tokens": sum(state.response_tokens for state in judged),
        "rollout/turns": sum(state.depth for state in judged),
        "rollout/nodes": sum(graph.num_nodes for graph in graphs),
        "rollout/terminals": len(judged),
        "rollout/left_out": sum(left_out),
        "rollout/merge_rate": sum(num_merged(rollout.classes) for rollout in rollouts),
        **{f"rollout/status/{name}": number for name, number in statuses.items()},
        "tokens/generated": sum(ledger.generated_tokens for ledger in ledgers),
        "tokens/prefilled": sum(ledger.prefilled_tokens for ledger in ledgers),
        "tokens/summary": sum(ledger.summary_tokens for ledger in ledgers),
        "tokens/tool_calls": sum(ledger.tool_calls for ledger in ledgers),
        "budget/saved": sum(ledger.saved for ledger in ledgers),
        "budget/reallocated": sum(ledger.reallocated for ledger in ledgers),
    }
    units = {
        "graphs": len(graphs),
        "edges": sum(graph.num_edges for graph in graphs),
        "paths": len(left_out),
        "judged": len(judged),
        "trained": sum(map(len, trained)),
    }
    return Tally(sums, units)


def credit_tally(credits: Sequence[Credit]) -> Tally:
    """How many of the edges carry signal; of the graphs that ``rollout_tally`` counts."""
    sums: dict[str, float] = {}
    for credit in credits:
        found = {"credit/nonzero": _nonzero(credit.advantages.sum(axis=0))}
        step_reward = credit.columns.get("step_reward")
        if step_reward is not None:
            found["credit/unscored"] = int(np.isnan(step_reward[1:]).sum())
        efficiency = credit.columns.get("efficiency_advantage")
        if efficiency is not None:
            found["credit/efficiency_nonzero"] = _nonzero(efficiency)
        sums = _added(sums, found)
    return Tally(sums)


def num_merged(classes: IntArray) -> int:
    """Nodes that share their class with another node."""
    return int(np.count_nonzero(np.bincount(classes)[classes] > 1))


def _nonzero(values: np.ndarray) -> int:
    """Edges with such a value, the root left out; NaN is none."""
    return int(np.count_nonzero(np.nan_to_num(values[1:])))


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}
