"""Which row stands where, so that verl's minibatches hold the graphs that the local engine's do.

verl counts rows: it gives every rank an equal, contiguous share and cuts each share into equal
pieces. The graphs of a minibatch have ever other numbers of rows, so the pieces are filled up with
empty rows. Nothing here imports verl.
"""

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
    added: Sequence[int],
    graph: Sequence[int],
    minibatches: Sequence[Sequence[int]],
    ranks: int,
) -> Layout:
    """Place every row in its graph's minibatch, the tokens of each spread over the ranks.

    The rows of a graph stay together as far as that goes, so that a rank computes once what they
    begin with.

    Example: rows of 9, 5 and 4 tokens of one graph, of which the second adds 2 to the first and the
    third 4, two ranks: ``[0, None, 1, 2]``.

    Args:
        lengths: tokens of each row.
        added: how many of them its rank computes if the row before in its graph is there too.
        graph: which graph each row belongs to.
        minibatches: each graph once.
        ranks: processes that share the update.
    """
    rows_of: dict[int, list[int]] = {}
    for row, one in enumerate(graph):
        rows_of.setdefault(one, []).append(row)
    divided = [
        _divided([row for one in graphs for row in rows_of[one]], lengths, added, ranks)
        for graphs in minibatches
    ]
    size = max(len(share) for shares in divided for share in shares)
    order: list[int | None] = []
    for rank in range(ranks):
        for shares in divided:
            order += shares[rank]
            order += [None] * (size - len(shares[rank]))
    return Layout(order, size * ranks)


def _divided(
    rows: Sequence[int], lengths: Sequence[int], added: Sequence[int], ranks: int
) -> list[list[int]]:
    """Rows in their order, cut into shares of which the largest has as few tokens as can be."""
    low, high = max(lengths[row] for row in rows), sum(lengths[row] for row in rows)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(rows, lengths, added, middle)) > ranks:
            low = middle + 1
        else:
            high = middle
    shares = _filled(rows, lengths, added, low)
    return shares + [[] for _ in range(ranks - len(shares))]


def _filled(
    rows: Sequence[int], lengths: Sequence[int], added: Sequence[int], capacity: int
) -> list[list[int]]:
    """Shares of at most so many tokens, each as full as can be."""
    shares: list[list[int]] = []
    tokens = capacity
    for row in rows:
        if tokens + added[row] > capacity:
            shares.append([])
            tokens = 0
        tokens += added[row] if shares[-1] else lengths[row]
        shares[-1].append(row)
    return shares
