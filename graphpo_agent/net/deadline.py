"""A time limit of a whole call, also of one that cannot be interrupted."""

import os
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.workers import Workers

__all__ = ["Deadline", "within"]

T = TypeVar("T")


class Deadline:
    """A moment by which everything that one call does has to be over.

    Example: ``Deadline(30.0).left()`` is 30 at first and raises after half a minute.
    """

    def __init__(self, seconds: float) -> None:
        """Start the clock."""
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds left, more than 0.

        Raises:
            CallFailed: transient: none.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.missed()
        return left

    def missed(self) -> CallFailed:
        """What to raise when the time is up."""
        return CallFailed("transient", f"no answer within {self._seconds:g} s")


def within(deadline: Deadline, function: Callable[[], T]) -> T:
    """What a function that cannot be interrupted returns, unless it takes too long.

    It runs in a thread that later calls use again: a Java machine knows it already.

    Example: ``within(Deadline(300.0), lambda: retriever.search(["oak"], 3))``

    Raises:
        CallFailed: transient: the time is up; the function goes on in its thread.
        Exception: what the function raised.
    """
    patience = deadline.left()
    result = _workers.submit(function)
    if wait([result], patience).not_done:
        raise deadline.missed()
    return result.result()


_workers = Workers()


def _forget() -> None:
    """A forked child has none of the threads."""
    global _workers
    _workers = Workers()


os.register_at_fork(after_in_child=_forget)
