"""Accuracy on held-out tasks: one trajectory (or several) per task, no graph."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.protocols import Policy
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.rollout.outages import Outages
from graphpo_agent.types import SamplingParams, Task

__all__ = ["Evaluation", "Judged", "by_level", "judged_paths", "leaves", "measured", "sample"]


@dataclass(frozen=True, slots=True)
class Judged:
    """One trajectory as an evaluation counts it.

    Attributes:
        reward: None where an outage of a tool or of the verifier left it unscored; 0 where it was
            stopped early instead of judged.
        generated_tokens: the policy's own.
        turns: edges.
    """

    task: Task
    reward: float | None
    generated_tokens: int
    turns: int


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

    def trusted(self, met: Outages, limit: float) -> "Evaluation":
        """The same without an accuracy where the outages ``met`` reach a share of ``limit``."""
        if not met.reaches(limit):
            return self
        nan = float("nan")
        return replace(self, accuracy=nan, standard_error=nan, best=nan)


def sample(
    grower: Grower,
    policy: Policy,
    tasks: Sequence[Task],
    samples: int,
    sampling: SamplingParams,
    seed: int,
    finished: Callable[[Rollout], object] = lambda rollout: None,
    drawn: Callable[[int], object] = lambda num_tokens: None,
) -> list[Rollout]:
    """Sample ``samples`` independent trajectories of each task and judge them.

    The random numbers depend on ``seed`` and the task only, so that two policies are compared
    on the same draws, and tasks may be sampled apart. ``finished`` is given each task's as soon as
    they are there, ``drawn`` the number of tokens of each continuation.
    """
    method = Grpo(group_size=samples)
    parts = (seed, "evaluation")
    return grower.grow(policy, tasks, method, sampling, parts, finished=finished, drawn=drawn)


def judged_paths(rollouts: Sequence[Rollout]) -> list[Judged]:
    """The trajectories of some tasks, those of each in the order of ``leaves``."""
    found: list[Judged] = []
    for rollout in rollouts:
        graph = rollout.graph
        for leaf, reward in leaves(rollout):
            path = graph.path(leaf)
            generated = int(graph.num_trained[path].sum())
            found.append(Judged(rollout.task, reward, generated, len(path)))
    return found


def leaves(rollout: Rollout) -> list[tuple[int, float | None]]:
    """The last node of each path beside its reward (``Judged.reward``), in the order of nodes."""
    graph = rollout.graph
    return [
        (leaf, None if rollout.left_out[leaf] else 0.0 if np.isnan(reward) else reward)
        for leaf, reward in zip(
            graph.leaves.tolist(), graph.reward[graph.leaves].tolist(), strict=True
        )
    ]


def measured(trajectories: Sequence[Judged]) -> Evaluation:
    """The means over the trajectories of all tasks; there is at least one."""
    rewards: dict[str, list[float]] = {}
    for one in trajectories:
        if one.reward is not None:
            rewards.setdefault(one.task.id, []).append(one.reward)
    means = np.array([np.mean(each) for each in rewards.values()])
    counted = sum(map(len, rewards.values()))
    nan = float("nan")
    return Evaluation(
        accuracy=float(means.mean()) if len(means) else nan,
        standard_error=float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else nan,
        best=float(np.mean([max(each) for each in rewards.values()])) if rewards else nan,
        response_tokens=float(np.mean([one.generated_tokens for one in trajectories])),
        turns=float(np.mean([one.turns for one in trajectories])),
        num_tasks=len(means),
        num_trajectories=counted,
        num_dropped=len(trajectories) - counted,
    )


def by_level(trajectories: Sequence[Judged]) -> dict[str, Evaluation]:
    """The same means over the tasks of each ``metadata.level``, in the order of the levels.

    Empty where no task says its level; numbers come before names.
    """
    of_level: dict[str, list[Judged]] = {}
    for one in trajectories:
        level = one.task.metadata.get("level")
        if level is not None:
            of_level.setdefault(str(level), []).append(one)
    order = sorted(of_level, key=lambda name: (not name.isdecimal(), len(name), name))
    return {level: measured(of_level[level]) for level in order}
