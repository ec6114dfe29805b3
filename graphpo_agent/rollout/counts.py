"""What the parts of a run have counted (``Counting``): failures of services, verdicts of judges."""

import threading

from graphpo_agent.protocols import Counting

__all__ = ["Counts", "counts_of"]


def counts_of(*parts: object) -> dict[str, int]:
    """What those of some parts that count have counted so far.

    Example: ``counts_of(judge, None)`` is ``{"judge/correct": 7, "judge/failed": 0, …}``.
    """
    counting = [part.counts for part in parts if isinstance(part, Counting)]
    return {name: count for counts in counting for name, count in counts.items()}


class Counts:
    """What some parts have counted since they were last asked; threads share it.

    Example::

        counts = Counts(grower, step_scoring)
        ...                                     # a step
        counts.take()                           # {"prm/failed": 2}
    """

    def __init__(self, *parts: object) -> None:
        """Args: any parts of a run; those that do not count add nothing."""
        self._parts = parts
        self._taken = counts_of(*parts)
        self._lock = threading.Lock()

    def take(self) -> dict[str, int]:
        """By the name of the metric, since the last time."""
        with self._lock:
            now = counts_of(*self._parts)
            since = {name: count - self._taken.get(name, 0) for name, count in now.items()}
            self._taken = now
        return since
