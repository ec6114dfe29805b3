"""What a verifier says of a finished path, checked."""

from graphpo_agent.errors import RewardError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.protocols import RewardFn
from graphpo_agent.types import Outcome, Task

__all__ = ["verdict"]


def verdict(reward_fn: RewardFn, task: Task, outcome: Outcome) -> float | None:
    """The verifier's reward; None where it met an outage.

    Raises:
        RewardError: it is not in [0, 1], or cannot be had.
    """
    try:
        found = reward_fn(task, outcome)
    except CallFailed as failure:
        if failure.outage:
            return None
        raise RewardError(f"task {task.id}: no verdict: {failure}") from None
    try:
        reward = float(found)
    except (TypeError, ValueError):
        raise RewardError(
            f"task {task.id}: the verifier returned {found!r:.60}, which is no number"
        ) from None
    if not 0.0 <= reward <= 1.0:
        raise RewardError(
            f"task {task.id}: the verifier returned {reward}, which is outside [0, 1]; "
            "rescale or binarise it"
        )
    return reward
