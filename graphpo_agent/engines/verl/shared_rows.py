"""Rows that begin alike: in which order, how many at once, and as a flat row of their own tokens.

Nothing here imports verl. Shapes: B rows, L tokens of a row, T tokens of all rows, joined.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from graphpo_agent.engines.local.beginnings import common_length
from graphpo_agent.engines.local.packing import PackedBatch, pack
from graphpo_agent.graph.arrays import BoolArray, IntArray
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["divided", "flat_row", "micro_batches", "text_order"]


def text_order(rows: Sequence[IntArray]) -> tuple[list[int], list[int]]:
    """Rows sorted by their tokens: no order has more in common from row to row.

    Example: ``[5, 6, 7]``, ``[5, 6]``, ``[5, 2, 7, 7]`` → ``[2, 1, 0]`` and ``[4, 1, 1]``.

    Args:
        rows: [L] token ids of each.

    Returns:
        The rows' numbers in that order, and how many tokens each adds to the one before.
    """
    keys = [row.astype(">i4").tobytes() for row in rows]  # big endian: sorted as the numbers are
    order = sorted(range(len(rows)), key=keys.__getitem__)
    added = [len(rows[i]) for i in order[:1]]
    added += [len(rows[i]) - common_length(keys[b], keys[i]) // 4 for b, i in pairwise(order)]
    return order, added


def micro_batches(rows: Sequence[IntArray], max_tokens: int) -> list[list[int]]:
    """Rows that begin alike together, in batches of at most ``max_tokens`` different tokens.

    Args:
        rows: [L] token ids of each.
        max_tokens: of a batch; a longer row is one of its own.
    """
    order, added = text_order(rows)
    batches: list[list[int]] = []
    tokens = max_tokens
    for i, more in zip(order, added, strict=True):
        if tokens + more > max_tokens:
            batches.append([])
            tokens, more = 0, len(rows[i])
        batches[-1].append(i)
        tokens += more
    return batches


def divided(batches: Sequence[list[int]], count: int) -> list[list[int]]:
    """The batches, those of most rows halved until there are ``count``, if there are fewer."""
    made = list(batches)
    while len(made) < count:
        place = max(range(len(made)), key=lambda b: len(made[b]))
        own = made[place]
        made[place : place + 1] = [own[: len(own) // 2], own[len(own) // 2 :]]
    return made


def flat_row(token_ids: IntArray, offsets: IntArray, trained: BoolArray) -> PackedBatch:
    """Rows as one flat row, in which what they begin with alike is computed once.

    Args:
        token_ids: [T].
        offsets: [B + 1] where each row begins.
        trained: [T] the tokens whose log-probabilities are wanted; not a row's first. One at least.
    """
    parent = np.zeros(len(offsets), np.int64)  # behind a root without tokens
    parent[0] = -1
    sample = TrainingSample(
        graph_id="rows",
        parent=parent,
        offsets=np.concatenate([[0], offsets]),
        token_ids=token_ids,
        loss_mask=trained,
        logprobs=np.zeros(len(token_ids), np.float32),
        advantages=np.zeros((1, len(parent))),
    )
    (packed,) = pack([sample], max_tokens=len(token_ids))
    return packed
