"""Files and directories that are written whole or not at all."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replace_directory", "replacing", "write_atomically"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write a file, which becomes ``path`` if the ``with`` block succeeds.

    A link stays one: the file that it points to is replaced, and made where it is not there. Each
    process has a place of its own: of two that write the same file one comes last, whole.

    Raises:
        OSError: it cannot be put there.
    """
    file = Path(os.path.realpath(path))
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        if os.path.exists(partial):  # false, too, for a name that no file can have
            partial.unlink()


def replace_directory(directory: Path, new: Path) -> None:
    """Rename ``new`` to ``directory``; an older one makes room first, and stays if it fails.

    Raises:
        OSError: it cannot be put there.
    """
    old = directory.with_name(f".{directory.name}.old")  # hidden: no name of the user's own
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(directory, old)
    try:
        os.rename(new, directory)
    finally:
        if old.exists() and not directory.exists():
            os.rename(old, directory)
    shutil.rmtree(old, ignore_errors=True)


def write_atomically(path: Path, content: str | Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all.

    Args:
        path: the file.
        content: a text, written as UTF-8, or the parts of the file in order.

    Raises:
        OSError: it cannot be written; names the file.
    """
    parts = [content.encode()] if isinstance(content, str) else content
    try:
        with replacing(path) as partial, partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
