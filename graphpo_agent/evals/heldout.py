"""Accuracy on held-out tasks: one trajectory (or several) per task, no graph."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm

from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.protocols import Policy
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.types import SamplingParams, Task

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over all sampled trajectories.

    Attributes:
        accuracy: mean reward.
        standard_error: of the accuracy over tasks; NaN for fewer than two.
        response_tokens: policy tokens per trajectory.
        turns: edges per trajectory.
        num_trajectories: tasks times samples.
    """

    accuracy: float
    standard_error: float
    response_tokens: float
    turns: float
    num_trajectories: int


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
    # A path that was stopped early instead of judged counts as wrong.
    rewards = np.array([np.nansum(rollout.graph.reward) / samples for rollout in rollouts])
    spread = rewards.std(ddof=1) / np.sqrt(len(rewards)) if len(rewards) > 1 else float("nan")
    trajectories = len(rollouts) * samples
    evaluation = Evaluation(
        accuracy=float(rewards.mean()),
        standard_error=float(spread),
        response_tokens=sum(r.ledger.generated_tokens for r in rollouts) / trajectories,
        turns=sum(r.graph.num_edges for r in rollouts) / trajectories,
        num_trajectories=trajectories,
    )
    return evaluation, rollouts
