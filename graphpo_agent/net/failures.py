"""A call that failed this time; ``graphpo_agent.errors`` has those that would fail every time."""

import threading

from graphpo_agent.errors import ToolError
from graphpo_agent.types import OUTAGES, FailureKind

__all__ = ["CallFailed", "FailureTally"]


class CallFailed(Exception):
    """One call got no usable answer; what made it turns it into data.

    Example: ``CallFailed("transient", "https://host/retrieve: 502 after 4 tries: bad gateway")``

    Attributes:
        kind: of which kind.
        outage: whether the outside world failed, which marks the trajectory.
    """

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.outage = kind in OUTAGES


class FailureTally:
    """How many calls of a service failed, and whether one was ever answered; threads share it.

    A service that fails now and then costs what it was asked for; one that never answered is
    misconfigured or down, and going on would be for nothing.

    Attributes:
        failed: how many failed so far.
    """

    def __init__(self) -> None:
        self.failed = 0
        self._answered = False
        self._last_reason = ""
        self._lock = threading.Lock()

    def answer(self) -> None:
        """A call was answered."""
        self._answered = True

    def fail(self, reason: str, count: int = 1) -> None:
        """So many failed, and why."""
        with self._lock:
            self.failed += count
            self._last_reason = reason

    def check(self, complaint: str) -> None:
        """Raise ToolError, the last reason behind the complaint, where all failed so far.

        Example: ``check("no response could be scored")``
        """
        if self.failed and not self._answered:
            raise ToolError(f"{complaint}: {self._last_reason}")
