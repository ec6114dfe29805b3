"""What the toy worlds share whose agent searches: names of entities, and how turns are written."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from graphpo_agent.types import Document, Piece

__all__ = ["MOST_NAMES", "SearchWriting", "draw_names"]

_FIRST_NAMES = [
    a + b
    for a, b in product(["Ka", "Li", "Do", "Me", "Su", "Ta", "Ri", "No"], ["ro", "mi", "na", "vi"])
]
_LAST_NAMES = [
    a + b
    for a, b in product(
        ["Ven", "Bos", "Har", "Gul", "Pim", "Zed", "Fas", "Wor"], ["ner", "dal", "kin", "ton"]
    )
]
MOST_NAMES = len(_FIRST_NAMES) * len(_LAST_NAMES)
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
    names = [f"{first} {last}" for first, last in product(_FIRST_NAMES, _LAST_NAMES)]
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
