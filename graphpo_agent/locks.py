"""A directory or a file that one process at a time works on; a process's death lets go of it.

File systems without locks, as some of clusters are, keep no two processes apart.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR

__all__ = ["directory_lock", "file_lock"]

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def directory_lock(directory: Path, busy: Exception, inherit: bool = False) -> Iterator[None]:
    """Hold a directory, which is made where it is not there.

    Args:
        directory: what is held.
        busy: raised where another process holds it, or has just taken it away.
        inherit: programs that this one starts hold it too, until they end.

    Raises:
        OSError: it cannot be made or opened.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if error.filename != str(directory) or _in_the_way(directory):
            raise
        raise busy from None  # it was there a moment ago
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        raise busy from None  # so it was
    os.set_inheritable(descriptor, inherit)
    with _held(descriptor, busy):
        yield


@contextmanager
def file_lock(path: Path, busy: Exception) -> Iterator[None]:
    """Hold a file that can be written, which is made where it is not there.

    It stays held for as long as it is written in place: replacing it lets others in.

    Args:
        path: what is held.
        busy: raised where another process holds it, or has just taken it away.

    Raises:
        OSError: it cannot be made or opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with _held(descriptor, busy):
        yield


def _in_the_way(directory: Path) -> bool:
    """Whether something else is where a directory is to be: looked at once, as others change it."""
    try:
        return not S_ISDIR(os.lstat(directory).st_mode)
    except FileNotFoundError:
        return False


@contextmanager
def _held(descriptor: int, busy: Exception) -> Iterator[None]:
    """Hold what a descriptor has open, and close it at the end."""
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        if os.fstat(descriptor).st_nlink == 0:
            raise busy
        yield
    finally:
        os.close(descriptor)
