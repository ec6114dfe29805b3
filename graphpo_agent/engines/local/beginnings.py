"""What prompts begin with alike: the instructions and the tools that every task of a run is given.

Within a graph the same token behind the same text is found by its hash (``shared_tokens.py``); this
is for the roots of different graphs.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from graphpo_agent.engines.local.parts import Part
from graphpo_agent.graph.arrays import IntArray

__all__ = ["SHORTEST", "beginning", "common_length", "num_shared", "share_beginnings"]

SHORTEST = 16
"""Tokens; computing fewer of them again costs less than to keep them apart."""


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike.

    >>> common_length((5, 6, 7), (5, 6, 8, 9))
    2
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def beginning(part: Part, token_ids: IntArray) -> list[int]:
    """What other parts may begin with, too: the tokens of its root before the first trained one.

    Args:
        part: of one graph.
        token_ids: of all samples, joined.
    """
    start = int(part.first[0])
    own = part.targets[part.owner == 0]
    return token_ids[start : min([start + int(part.kept[0]), *own[:1]])].tolist()


def num_shared(text: Sequence[int], first: Sequence[int]) -> int:
    """Tokens, at the least, of ``text`` that are computed already in a row with ``first``."""
    return max(0, common_length(text, first) - SHORTEST + 1)


def share_beginnings(part: Part, texts: Sequence[list[int]]) -> Part:
    """The part with what its roots begin with alike as stretches of their own, once each.

    Those of a few tokens are left out.

    Args:
        part: a forest.
        texts: the ``beginning`` of each root, in their order.
    """
    if len(texts) == 1:
        return part
    roots = np.flatnonzero(part.parent < 0).tolist()
    text_of = dict(zip(roots, texts, strict=True))
    parent: list[int] = []
    spans: list[tuple[int, int]] = []
    above, begun = np.full(len(part.parent), -1), np.zeros_like(part.kept)

    def split(members: list[int], depth: int, stretch: int, start: int) -> None:
        """Hang roots that are alike up to ``depth`` under a stretch that ends after ``start``."""
        above[members], begun[members] = stretch, start
        for token, group in groupby(members, lambda root: text_of[root][depth : depth + 1]):
            alike = list(group)
            if not token or len(alike) == 1:
                continue
            end = common_length(text_of[alike[0]], text_of[alike[-1]])
            if end - start < SHORTEST:
                split(alike, end, stretch, start)
            else:
                parent.append(stretch)
                spans.append((int(part.first[alike[0]]) + start, end - start))
                split(alike, end, len(parent) - 1, end)

    split(sorted(roots, key=text_of.__getitem__), 0, -1, 0)
    if not parent:
        return part
    first, lengths = np.array(spans).T
    below = np.where(part.parent < 0, above, part.parent + len(parent))
    return replace(
        part,
        parent=np.concatenate([parent, below]),
        first=np.concatenate([first, part.first + begun]),
        lengths=np.concatenate([lengths, part.lengths - begun]),
        kept=np.concatenate([lengths, part.kept - begun]),
        owner=part.owner + len(parent),
    )
