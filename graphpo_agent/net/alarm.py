"""Something that is done at a moment unless it is called off before; one thread for all."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["alarm"]


@contextmanager
def alarm(seconds: float, ring: Callable[[], object]) -> Iterator[None]:
    """Call ``ring`` after so many seconds, unless the block has ended by then.

    It is called in a thread that all alarms of the process share: it must neither wait nor raise.
    When the block has ended, it is neither running nor called any more.

    Example::

        with alarm(10.0, process.kill):
            answer = process.stdout.read(4)
    """
    clock = _clock
    key = clock.set(time.monotonic() + seconds, ring)
    try:
        yield
    finally:
        clock.call_off(key)


class _Clock:
    """The alarms that are set, and the thread that rings them; it starts with the first."""

    def __init__(self) -> None:
        self._alarms: dict[object, tuple[float, Callable[[], object]]] = {}
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()

    def set(self, at: float, ring: Callable[[], object]) -> object:
        """Ring at a moment of the monotonic clock; what to call it off by."""
        key = object()
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="alarms", daemon=True)
                self._thread.start()
            self._alarms[key] = at, ring
            if at < self._wakes_at:
                self._changed.notify()
        return key

    def call_off(self, key: object) -> None:
        """Waits while it rings."""
        with self._changed:
            self._alarms.pop(key, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for key in [key for key, (at, _) in self._alarms.items() if at <= now]:
                    _, ring = self._alarms.pop(key)
                    ring()
                self._wakes_at = min((at for at, _ in self._alarms.values()), default=math.inf)
                pause = min(self._wakes_at - time.monotonic(), threading.TIMEOUT_MAX)
                self._changed.wait(max(0.0, pause))


_clock = _Clock()


def _forget() -> None:
    """A forked child has neither the thread nor what it was to ring."""
    global _clock
    _clock = _Clock()


os.register_at_fork(after_in_child=_forget)
