"""What the parts of a run have counted (``Counting``): failures of services, verdicts of judges."""

import threading
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from graphpo_agent.errors import ConfigError
from graphpo_agent.protocols import Counting

__all__ = ["Counts", "counts_of"]


def counts_of(*parts: object) -> dict[str, int]:
    """What those of some parts that count have counted so far.

    Example: ``counts_of(judge, None)`` is ``{"judge/correct": 7, "judge/failed": 0, …}``.

    Raises:
        ConfigError: a part's ``counts`` is no mapping from names to numbers.
    """
    return dict(each for part in parts if isinstance(part, Counting) for each in _counts(part))


def _counts(part: Counting) -> Iterator[tuple[str, Any]]:
    """The names and numbers of one part, numpy's as Python's, which can be written."""
    counts, owner = part.counts, f"{type(part).__name__}.counts"
    if not isinstance(counts, Mapping):
        raise ConfigError(f"{owner} is {counts!r:.60}, want a mapping from names to numbers")
    for name, count in counts.items():
        if not (isinstance(name, str) and isinstance(count, Real)):
            raise ConfigError(f"{owner} holds {name!r:.40}: {count!r:.40}, want a name: a number")
        yield name, int(count) if isinstance(count, Integral) else float(count)


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
