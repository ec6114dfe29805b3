"""The ids of the graphs that a run writes down: which step, and which task."""

__all__ = ["split_step_id", "step_id"]

_STEP = "step-"


def step_id(step: int, task: str) -> str:
    """Example: ``step_id(7, "kb-12")`` is ``"step-7/kb-12"``."""
    return f"{_STEP}{step}/{task}"


def split_step_id(graph: str) -> tuple[int, str] | None:
    """Step and task of a graph that a run wrote down; None for any other id.

    Example: ``split_step_id("step-7/kb-12")`` is ``(7, "kb-12")``.
    """
    first, slash, task = graph.partition("/")
    step = first.removeprefix(_STEP)
    return (int(step), task) if slash and first != step and step.isdecimal() else None
