"""Threads for what runs beside the sampling."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Workers"]


class Workers:
    """Runs functions in threads; a thread that is done takes the next function.

    They are daemons: nobody who leaves waits for a function that hangs.

    Example::

        workers = Workers()
        workers.start(lambda: print("beside"))
        workers.close()
    """

    def __init__(self) -> None:
        self._functions: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def start(self, function: Callable[[], object]) -> None:
        """Run ``function``, which raises nothing, at once: none waits until another is done."""
        self._functions.put(function)
        if not self._idle.acquire(blocking=False):
            self._count += 1
            threading.Thread(target=self._work, daemon=True).start()

    def close(self) -> None:
        """Let every thread end as soon as it is done; nothing can be started any more."""
        for _ in range(self._count):
            self._functions.put(None)

    def _work(self) -> None:
        while (function := self._functions.get()) is not None:
            function()
            self._idle.release()
