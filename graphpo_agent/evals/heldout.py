"""Accuracy on held-out tasks: one trajectory (or several) per task, no graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm

from graphpo_agent.errors import ToolError
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.protocols import Policy
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.types import SamplingParams, Task

__all__ = ["Evaluation", "by_level", "check_outages", "evaluate", "leaves"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over sampled trajectories.

    A trajectory that an outage of a tool or of the verifier left unscored says nothing about the
    policy: it counts in neither accuracy nor standard error, and a task that has no other is left
    out of both.

    Attributes:
        accuracy: mean over tasks of the mean reward of a task's trajectories; NaN where an outage
            met them all.
        standard_error: of the accuracy over tasks; NaN for fewer than two.
        best: mean over tasks of the highest reward of a task's trajectories (pass@k where rewards
            are 0 and 1); NaN as the accuracy.
        response_tokens: policy tokens per trajectory, dropped ones included.
        turns: edges per trajectory, dropped ones included.
        num_tasks: those that count.
        num_trajectories: those that count.
        num_dropped: the others.
    """

    accuracy: float
    standard_error: float
    best: float
    response_tokens: float
    turns: float
    num_tasks: int
    num_trajectories: int
    num_dropped: int


def evaluate(
    grower: Grower,
    policy: Policy,
    tasks: Sequence[Task],
    samples: int,
    sampling: SamplingParams,
    seed: int,
    progress: bool = False,
) -> tuple[Evaluation, list[Rollout]]:
    """Sample ``samples`` independent trajectories of each task and judge them.

    The random numbers depend on ``seed`` and the task only, so that two policies are compared
    on the same draws. ``progress`` shows a bar where the output is a terminal.
    """
    method = Grpo(group_size=samples)
    with tqdm(total=len(tasks), unit="task", disable=None if progress else True) as bar:
        rollouts = grower.grow(
            policy, tasks, method, sampling, (seed, "evaluation"), finished=bar.update
        )
    return _measured(rollouts), rollouts


def by_level(rollouts: Sequence[Rollout]) -> dict[str, Evaluation]:
    """The same means over the tasks of each ``metadata.level``, in the order of the levels.

    Empty where no task says its level; numbers come before names.
    """
    said = (rollout.task.metadata.get("level") for rollout in rollouts)
    levels = {str(level) for level in said if level is not None}
    return {
        level: _measured([r for r in rollouts if str(r.task.metadata.get("level")) == level])
        for level in sorted(levels, key=lambda name: (not name.isdecimal(), len(name), name))
    }


def _measured(rollouts: Sequence[Rollout]) -> Evaluation:
    rewards = [[reward for _, reward in leaves(rollout)] for rollout in rollouts]
    counted = [kept for each in rewards if (kept := [r for r in each if r is not None])]
    means = np.array([np.mean(each) for each in counted])
    sampled, num_trajectories = sum(map(len, rewards)), sum(map(len, counted))
    return Evaluation(
        accuracy=float(means.mean()) if len(means) else float("nan"),
        standard_error=float(means.std(ddof=1) / len(means) ** 0.5)
        if len(means) > 1
        else float("nan"),
        best=float(np.mean([max(each) for each in counted])) if counted else float("nan"),
        response_tokens=sum(r.ledger.generated_tokens for r in rollouts) / sampled,
        turns=sum(r.graph.num_edges for r in rollouts) / sampled,
        num_tasks=len(means),
        num_trajectories=num_trajectories,
        num_dropped=sampled - num_trajectories,
    )


def leaves(rollout: Rollout) -> list[tuple[int, float | None]]:
    """The last node of each path beside its reward, in the order of the nodes.

    None is a path that is left out for an outage. Another that was stopped early instead of judged
    counts as wrong.
    """
    graph = rollout.graph
    ends = np.setdiff1d(np.arange(graph.num_nodes), graph.parent)
    rewards = [float(graph.reward[node]) for node in ends]
    return [
        (int(node), None if rollout.left_out[node] else 0.0 if np.isnan(reward) else reward)
        for node, reward in zip(ends, rewards, strict=True)
    ]


def check_outages(rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]) -> None:
    """Refuse rollouts of which every path was dropped: nothing can be said of a policy by them.

    Raises:
        ToolError: it is so; says what the first outage gave the policy to read.
    """
    if any(rollout.graph.terminal.any() for rollout in rollouts):
        return
    rewards = [reward for rollout in rollouts for _, reward in leaves(rollout)]
    if not rewards or any(reward is not None for reward in rewards):
        return
    raise ToolError(
        f"a tool or the verifier met an outage on each of the {len(rewards)} trajectories; see "
        f"that its service is there and try again{_told(rollouts, decode)}"
    )


def _told(rollouts: Sequence[Rollout], decode: Callable[[Sequence[int]], str]) -> str:
    """What the first outage gave the policy to read."""
    for rollout in rollouts:
        if "tool_outage" in rollout.statuses:
            graph, node = rollout.graph, rollout.statuses.index("tool_outage")
            edge = slice(graph.offsets[node], graph.offsets[node + 1])
            observed = graph.token_ids[edge][~graph.loss_mask[edge]]
            return f"; the first one was told: {decode(observed.tolist())}"
    return ""  # it was in a prefix, or the verifier's
