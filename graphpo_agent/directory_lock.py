"""A directory that one process at a time works in."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["directory_lock"]


@contextmanager
def directory_lock(directory: Path, busy: Exception, inherit: bool = False) -> Iterator[None]:
    """Hold a directory, which is made where it is not there; a process's death lets go of it.

    Args:
        directory: what is held.
        busy: raised where another process holds it.
        inherit: programs that this one starts hold it too, until they end.

    Raises:
        OSError: it cannot be made or opened.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY)
    os.set_inheritable(descriptor, inherit)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield
    finally:
        os.close(descriptor)
