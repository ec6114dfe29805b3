"""A call that failed this time; ``graphpo_agent.errors`` has those that would fail every time."""

from graphpo_agent.types import OUTAGES, FailureKind

__all__ = ["CallFailed"]


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
