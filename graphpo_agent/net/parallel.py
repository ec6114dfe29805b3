"""Several blocking calls at once."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["in_threads"]

T = TypeVar("T")
R = TypeVar("R")


def in_threads(function: Callable[[T], R], items: Sequence[T], concurrency: int) -> list[R]:
    """``function`` of every item, in order, at most ``concurrency`` at once.

    The threads are daemons: an interrupted program does not wait for a call that hangs.

    Example: ``in_threads(len, ["a", "bc"], 2)`` is ``[1, 2]``.

    Raises:
        Exception: the first that ``function`` raises; no further item is begun then.
    """
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    remaining = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while not errors:
            with lock:
                index = next(remaining, None)
            if index is None:
                return
            try:
                results[index] = function(items[index])
            except BaseException as error:  # raised again below
                errors.append(error)

    threads = [
        threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]
