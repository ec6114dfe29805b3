"""A rate limit: so many starts per second."""

import threading
import time

__all__ = ["Pace"]


class Pace:
    """Spaces starts evenly; threads share it.

    Example: ``time.sleep(Pace(per_second=5).wait_s())`` before each request.
    """

    def __init__(self, per_second: float | None) -> None:
        """So many starts per second at most; None: any number."""
        self._interval = 0.0 if per_second is None else 1.0 / per_second
        self._next = 0.0
        self._lock = threading.Lock()

    def wait_s(self) -> float:
        """Seconds until the turn that is taken by asking."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._interval
            return turn - now
