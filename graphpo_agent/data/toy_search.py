"""What the toy worlds share whose agent searches: names of entities, and how turns are written."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from graphpo_agent.types import Document, Piece

__all__ = ["MOST_NAMES", "SearchWriting", "another_name", "draw_names"]

_FIRST_NAME = "Ka Li Do Me Su Ta Ri No Be Ha Jo Ge Pa Wi Lu Fe", "ro mi na vi sa lo de ku"
_LAST_NAME = (
    "Ven Bos Har Gul Pim Zed Fas Wor Mol Tur Kep Rin Sab Dov Lan Cor",
    "ner dal kin ton ley mer vik ros",
)
"""What names begin with and how they end; few names take the first ones of each only."""
_STARTS = range(8, 17, 2)
"""So many beginnings may be in use, and half as many ends."""


def _count_names(starts: int) -> int:
    """How many pairs of a first and a last name there are."""
    return (starts * starts // 2) ** 2


MOST_NAMES = _count_names(_STARTS[-1])
"""So many names there are."""


@dataclass(frozen=True, slots=True)
class SearchWriting:
    """How demonstrations are written in one dialect.

    Attributes:
        write_search: from a query to the action that asks for it.
        write_observation: from a query and what it found to the reply.
        phrases: strings of this dialect that a toy tokenizer makes one token each.

    Example: ``write_search("Karo Venner mentor") == "<search> Karo Venner mentor</search>"``
    """

    write_search: Callable[[str], str]
    write_observation: Callable[[str, Sequence[Document]], Piece]
    phrases: tuple[str, ...]


def draw_names(rng: random.Random, num_entities: int) -> tuple[list[str], list[str]]:
    """Training names and held-out names, a sixth; the latter's pieces are pieces of the former.

    Example: ``(["Karo Venner", "Lita Bosdal", "Lita Venner", ...], ["Karo Bosdal", ...])``
    """
    starts = next(starts for starts in _STARTS if _count_names(starts) >= num_entities)
    first, last = (
        [start + end for start, end in product(some.split()[:starts], ends.split()[: starts // 2])]
        for some, ends in (_FIRST_NAME, _LAST_NAME)
    )
    names = [" ".join(parts) for parts in product(first, last)]
    rng.shuffle(names)
    drawn = names[:num_entities]
    known: set[str] = set()
    train: list[str] = []
    heldout: list[str] = []
    for name in drawn:
        enough = len(heldout) >= num_entities // 6
        (train if enough or not known.issuperset(name.split()) else heldout).append(name)
        known.update(name.split())
    return train, heldout


def another_name(rng: random.Random, names: Sequence[str], *known: str) -> str:
    """A name that is none of ``known``."""
    while (name := rng.choice(names)) in known:
        pass
    return name
