"""Looking at many things before any is used, to say at once which cannot be."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

from graphpo_agent.errors import DataError

__all__ = ["refused"]

T = TypeVar("T")

_SILENT_S = 2.0
"""How long no bar is shown."""


def refused(
    items: Sequence[T], use: Callable[[T], object], name: str, unit: str = "it"
) -> dict[int, str]:
    """What is wrong with each that cannot be used, by its place.

    Args:
        items: all of them.
        use: raises DataError for one that cannot be.
        name: of them all, before the bar.
        unit: of one, in it.
    """
    reasons: dict[int, str] = {}
    shown = tqdm(items, name, unit=unit, delay=_SILENT_S, leave=False, disable=None)
    for i, item in enumerate(shown):
        try:
            use(item)
        except DataError as error:
            reasons[i] = str(error)
    return reasons
