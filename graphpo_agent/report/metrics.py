"""One step's rollouts and credits as numbers. All are means over what the name says."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.methods.method import Credit
from graphpo_agent.rollout.grow import Rollout

__all__ = ["credit_metrics", "num_merged", "rollout_metrics"]


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What was grown in a step; sums for tokens, means for the rest.

    The mean reward is that of the trajectories that are trained: rollouts from the middle of one,
    which only estimate a value, say little of how often the policy is right.
    """
    graphs = [rollout.graph for rollout in rollouts]
    rewards = [graph.reward[graph.terminals] for graph in graphs]
    trained = [graph.reward[graph.terminal & (graph.num_trained > 0)] for graph in graphs]
    terminal_states = [r.states[v] for r in rollouts for v in r.graph.terminals.tolist()]
    edges = sum(graph.num_edges for graph in graphs)
    statuses = Counter(status for rollout in rollouts for status in rollout.statuses[1:])
    generated = sum(rollout.ledger.generated_tokens for rollout in rollouts)
    return {
        "reward/mean": _mean(np.concatenate(trained)),
        "reward/mixed_prompts": _mean([len(set(r.tolist())) > 1 for r in rewards]),
        "rollout/response_tokens": _mean([s.response_tokens for s in terminal_states]),
        "rollout/turns": _mean([s.depth for s in terminal_states]),
        "rollout/nodes": _mean([graph.num_nodes for graph in graphs]),
        "rollout/terminals": _mean([len(r) for r in rewards]),
        "rollout/left_out": _mean([r.left_out[v] for r in rollouts for v in r.graph.leaves]),
        "rollout/merge_rate": sum(num_merged(rollout.classes) for rollout in rollouts)
        / max(1, edges),
        **{f"rollout/status/{name}": n / max(1, edges) for name, n in statuses.items()},
        "tokens/generated": generated,
        "tokens/prefilled": sum(rollout.ledger.prefilled_tokens for rollout in rollouts),
        "tokens/summary": sum(rollout.ledger.summary_tokens for rollout in rollouts),
        "tokens/tool_calls": sum(rollout.ledger.tool_calls for rollout in rollouts),
        "budget/saved": sum(rollout.ledger.saved for rollout in rollouts),
        "budget/reallocated": sum(rollout.ledger.reallocated for rollout in rollouts),
    }


def credit_metrics(credits: Sequence[Credit]) -> dict[str, float]:
    """How much of what was grown carries signal, as shares of all edges."""
    advantages = np.concatenate([credit.advantages[:, 1:].sum(axis=0) for credit in credits])
    metrics = {"credit/nonzero": _mean(np.nan_to_num(advantages) != 0)}
    step_rewards = _column(credits, "step_reward")
    if step_rewards is not None:
        metrics["credit/unscored"] = _mean(np.isnan(step_rewards))
    efficiency = _column(credits, "efficiency_advantage")
    if efficiency is not None:
        metrics["credit/efficiency_nonzero"] = _mean(np.nan_to_num(efficiency) != 0)
    return metrics


def num_merged(classes: IntArray) -> int:
    """Nodes that share their class with another node."""
    return int(np.count_nonzero(np.bincount(classes)[classes] > 1))


def _column(credits: Sequence[Credit], name: str) -> np.ndarray | None:
    if not all(name in credit.columns for credit in credits):
        return None
    return np.concatenate([credit.columns[name][1:] for credit in credits])


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
