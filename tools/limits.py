"""Checks of the numbers that a configuration gives to a tool."""

from graphpo_agent.errors import ToolError

__all__ = ["check_counts", "check_seconds"]


def check_counts(owner: str, **counts: int) -> None:
    """Let whole numbers of at least 1 pass.

    Example: ``check_counts("search tool", topk=0)`` raises ``search tool: topk must be a whole
    number of at least 1, found 0``.

    Raises:
        ToolError: one of them is something else; names it.
    """
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ToolError(
                f"{owner}: {name} must be a whole number of at least 1, found {value!r}"
            )


def check_seconds(owner: str, **seconds: float) -> None:
    """Let finite numbers above 0 pass.

    Raises:
        ToolError: one of them is something else; names it.
    """
    for name, value in seconds.items():
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise ToolError(f"{owner}: {name} must be a number above 0, found {value!r}")
