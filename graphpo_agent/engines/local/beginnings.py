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

__all__ = ["common_length", "share_beginnings"]


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


def share_beginnings(part: Part, token_ids: IntArray) -> Part:
    """The part with what its roots begin with alike as stretches of their own, once each.

    They end where a root's trained tokens begin at the latest.

    Args:
        part: a forest.
        token_ids: of all samples, joined.
    """
    roots = np.flatnonzero(part.parent < 0).tolist()
    if len(roots) == 1:
        return part
    untrained = part.kept.copy()
    np.minimum.at(untrained, part.owner, part.targets - part.first[part.owner])
    ends = part.first + untrained
    texts = {root: token_ids[part.first[root] : ends[root]].tolist() for root in roots}
    parent: list[int] = []
    spans: list[tuple[int, int]] = []
    above, begun = np.full(len(part.parent), -1), np.zeros_like(part.kept)

    def split(members: list[int], start: int, stretch: int) -> None:
        """Hang roots, in the order of their texts, under the ``start`` tokens that they share."""
        above[members], begun[members] = stretch, start
        for token, group in groupby(members, lambda root: [*texts[root][start : start + 1]]):
            alike = list(group)
            if token and len(alike) > 1:
                end = common_length(texts[alike[0]], texts[alike[-1]])
                first = int(part.first[alike[0]])
                parent.append(stretch)
                spans.append((first + start, end - start))
                split(alike, end, len(parent) - 1)

    split(sorted(roots, key=texts.__getitem__), 0, -1)
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
