"""Which tasks a policy can begin at all: asked before a run, not when it comes to one of them."""

from collections.abc import Sequence

from graphpo_agent.errors import DataError
from graphpo_agent.protocols import Expander, Policy
from graphpo_agent.types import Task

__all__ = ["check_fitting", "fitting_tasks", "told_left_out"]

_AT_ONCE = 256
"""Prompts that the policy holds; it need not hold those of a whole data set."""


def fitting_tasks(
    expander: Expander, policy: Policy, tasks: Sequence[Task]
) -> tuple[list[Task], list[str]]:
    """The tasks whose prompt leaves room in the policy's context.

    Releases the policy's contexts.

    Returns:
        These tasks in their order, and in one line each what is wrong with the others.
    """
    fitting: list[Task] = []
    reasons: list[str] = []
    for start in range(0, len(tasks), _AT_ONCE):
        for task in tasks[start : start + _AT_ONCE]:
            try:
                expander.start(policy, task)
            except DataError as error:
                reasons.append(str(error))
            else:
                fitting.append(task)
        policy.release()
    return fitting, reasons


def check_fitting(expander: Expander, policy: Policy, tasks: Sequence[Task]) -> None:
    """Raise DataError where a task's prompt does not fit, before any other is begun."""
    _, reasons = fitting_tasks(expander, policy, tasks)
    if reasons:
        more = f" ({len(reasons):,} such tasks of {len(tasks):,})" if len(reasons) > 1 else ""
        raise DataError(f"{reasons[0]}{more}")


def told_left_out(reasons: Sequence[str]) -> list[str]:
    """A line about training tasks that are left out; none where all fit."""
    return [
        f"{len(reasons):,} training tasks are left out, as the first: {reason}"
        for reason in reasons[:1]
    ]
