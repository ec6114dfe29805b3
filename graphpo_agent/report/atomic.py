"""A file that is written whole or not at all."""

import os
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written; names the file.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
