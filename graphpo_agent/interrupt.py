"""A signal ends a command quietly, whatever it met."""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["held_back", "interruptible", "raise_quietly"]

_AGAIN = 0.01  # seconds


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """SIGINT raises KeyboardInterrupt quietly; gives whether it has.

    What an import or a library makes of it may be any other error.
    """
    interrupted = False

    def interrupt(number: int, frame: object) -> NoReturn:
        nonlocal interrupted
        interrupted = True
        raise_quietly(number, KeyboardInterrupt())

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT comes to this process behind the ``with`` block, and never to one started inside.

    Call in the main thread. Blocking it there is not enough: another thread may receive it.
    """
    came = False

    def hold(number: int, frame: object) -> None:
        nonlocal came
        came = True

    before = signal.signal(signal.SIGINT, hold)
    allowed = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def raise_quietly(number: int, error: BaseException) -> NoReturn:
    """What a handler of signal ``number`` does to end its process: raise ``error``.

    Objects that it leaves half built and coroutines that never began are not told of, and where it
    is lost, in code whose errors Python ignores, the signal is sent again.
    """

    def send_again(ignored: Any) -> None:
        if isinstance(ignored.exc_value, type(error)):
            threading.Timer(_AGAIN, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = send_again
    warnings.simplefilter("ignore")
    raise error
