"""Threads for what runs beside the sampling."""

import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["Workers"]

T = TypeVar("T")
_Functions = SimpleQueue[Callable[[], object] | None]


class Workers:
    """Runs functions in threads; a thread that is done takes the next function.

    They are daemons: nobody who leaves waits for a function that hangs.

    Example::

        workers = Workers()
        workers.start(lambda: print("beside"))
        workers.close()
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        """Allow ``most`` threads; a function for which there is none waits for its turn."""
        self._functions: _Functions = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._allowed = threading.Semaphore(most)
        self._close = weakref.finalize(self, self._functions.put, None)

    def start(self, function: Callable[[], object]) -> None:
        """Run ``function``, which raises nothing, at once where there may be a thread for it."""
        self._functions.put(function)
        if not self._idle.acquire(blocking=False) and self._allowed.acquire(blocking=False):
            thread = threading.Thread(target=_work, args=(self._functions, self._idle), daemon=True)
            thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """As ``start``; holds what ``function`` returns or raises, and begins it not if cancelled.

        Example: ``workers.submit(lambda: 6 * 7).result()`` is 42.
        """
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # raised again by who asks for the result
                    future.set_exception(error)

        self.start(run)
        return future

    def close(self) -> None:
        """Let every thread end as soon as it is done; nothing can be started any more.

        It is closed, too, when nobody has it any more.
        """
        self._close()


def _work(functions: _Functions, idle: threading.Semaphore) -> None:
    """What a thread does until it finds None, which it leaves for the others."""
    while (function := functions.get()) is not None:
        function()
        del function  # and what it holds
        idle.release()
    functions.put(None)
