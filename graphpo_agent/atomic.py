"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing", "write_atomically"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write a file, which becomes ``path`` if the ``with`` block succeeds.

    Each process has a place of its own: of two that write the same file one comes last, whole.

    Raises:
        OSError: it cannot be put there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        if os.path.exists(partial):  # false, too, for a name that no file can have
            partial.unlink()


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written; names the file.
    """
    try:
        with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(path)
        raise
