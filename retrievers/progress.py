"""Signs of life of long work, on stderr."""

import sys
from typing import Any

from tqdm import tqdm

__all__ = ["progress", "say"]

_QUIET_S = 2.0
"""Work that ends sooner shows nothing."""


def progress(description: str, total: int, unit: str, initial: int = 0) -> "tqdm[Any]":
    """A bar to be used in ``with``; a terminal sees it move, a log file a line now and then."""
    return tqdm(
        desc=description,
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=True,
        delay=_QUIET_S,
        mininterval=0.2 if sys.stderr.isatty() else 15.0,
    )


def say(message: str) -> None:
    """One line on stderr that does not tear a bar."""
    tqdm.write(message, file=sys.stderr)
