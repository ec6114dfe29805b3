"""Ctrl-C ends a command quietly, whatever it met."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["interruptible"]

_AGAIN = 0.01  # seconds


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """SIGINT raises KeyboardInterrupt; gives whether it has.

    What an import or a library makes of it may be any other error. Objects that it left half built
    and coroutines that never began are not told of, and where it is lost, in code whose errors
    Python ignores, it is sent again.
    """
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        sys.unraisablehook = _send_again
        warnings.simplefilter("ignore")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _send_again(ignored: Any) -> None:
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT)).start()
