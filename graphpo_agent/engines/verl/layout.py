"""Which row stands where, so that verl's minibatches hold the graphs that the local engine's do.

verl counts rows: it gives every rank an equal, contiguous share and cuts each share into equal
pieces. The graphs of a minibatch have ever other numbers of rows, so the pieces are filled up with
empty rows. Nothing here imports verl.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Layout", "place_rows"]


@dataclass(frozen=True, slots=True)
class Layout:
    """An order of rows.

    Attributes:
        order: row numbers, rank by rank, in each rank minibatch by minibatch; None: an empty row.
        rows_per_minibatch: over all ranks.
    """

    order: list[int | None]
    rows_per_minibatch: int


def place_rows(
    lengths: Sequence[int],
    graph: Sequence[int],
    minibatches: Sequence[Sequence[int]],
    ranks: int,
) -> Layout:
    """Place every row in its graph's minibatch, the tokens of each spread over the ranks.

    Example: rows of 9, 5 and 4 tokens of one graph, two ranks: ``[0, None, 1, 2]``.

    Args:
        lengths: tokens of each row.
        graph: which graph each row belongs to.
        minibatches: each graph once.
        ranks: processes that share the update.
    """
    members = {g: number for number, graphs in enumerate(minibatches) for g in graphs}
    rows: list[list[int]] = [[] for _ in minibatches]
    for row, one in enumerate(graph):
        rows[members[one]].append(row)
    size = max(-(-len(own) // ranks) for own in rows)
    shares: list[list[int | None]] = [[] for _ in range(ranks)]
    for own in rows:
        for share, placed in zip(shares, _spread(own, lengths, ranks, size), strict=True):
            share.extend(placed)
            share.extend([None] * (size - len(placed)))
    return Layout([row for share in shares for row in share], size * ranks)


def _spread(rows: Sequence[int], lengths: Sequence[int], ranks: int, size: int) -> list[list[int]]:
    """At most ``size`` rows for each rank: the longest first, to the rank with fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for row in sorted(rows, key=lambda row: -lengths[row]):
        tokens, rank = heapq.heappop(heap)
        shares[rank].append(row)
        if len(shares[rank]) < size:
            heapq.heappush(heap, (tokens + lengths[row], rank))
    return shares
