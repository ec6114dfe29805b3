"""One forward pass of the sampler: a new token of every row, and the next tokens of some runs.

All of them are one flat row for the model; only attention tells them apart.

Shapes: N tokens of the pass, M of them of runs, B pieces of a group, Q queries and T keys of a
piece, H query heads, K key/value heads, D dimensions of a key, Dv of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.cache import KVPool
from graphpo_agent.engines.local.contexts import Run
from graphpo_agent.engines.local.kernels import grouped_attention
from graphpo_agent.engines.local.running_rows import AttendingRows
from graphpo_agent.engines.local.scoring import Scoring

__all__ = ["CachedPass", "Piece", "next_pieces"]

_LONGEST_PIECE = 1024
"""Queries of one piece; bounds the attention mask."""
_MAX_GROUP = 2**14
"""Pieces times keys of one group; bounds its gathered keys and its mask."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens ``start`` up to ``end`` of a run."""

    run: Run
    start: int
    end: int

    @property
    def num_queries(self) -> int:
        """Tokens to compute."""
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        """Tokens of the path up to the piece's end."""
        return self.run.num_before + self.end


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces of similar length: [B, Q] queries, [B, T] pool slots, mask, which outputs count."""

    queries: Tensor
    slots: Tensor
    mask: Tensor
    picked: Tensor


def next_pieces(runs: Sequence[Run], max_tokens: int) -> list[Piece]:
    """The next tokens of the runs, at most ``max_tokens`` in all, shortest pieces first."""
    pieces: list[Piece] = []
    for run in runs:
        end = min(len(run.token_ids), run.done + max_tokens)
        max_tokens -= end - run.done
        cuts = range(run.done, end, _LONGEST_PIECE)
        pieces += [Piece(run, cut, min(cut + _LONGEST_PIECE, end)) for cut in cuts]
    return sorted(pieces, key=lambda piece: piece.num_queries)


class CachedPass:
    """What the attention layers need to know of one forward pass.

    Example: three running rows and a prompt of five tokens: N is 8, tokens 0 to 2 attend to their
    rows, tokens 3 to 7 to one another.
    """

    def __init__(self, pool: KVPool, rows: AttendingRows, pieces: Sequence[Piece]) -> None:
        """Args: the pool, the rows, which have looked, and the pieces in the order of N."""
        self._pool = pool
        self._rows = rows
        self._pieces = _groups(pieces)
        self._groups: dict[int | None, list[_Group]] = {}
        own = [piece.run.slots[-len(piece.run.token_ids) :] for piece in pieces]
        slots = [slot[piece.start : piece.end] for slot, piece in zip(own, pieces, strict=True)]
        self._new_slots = to_device(np.concatenate(slots), pool.device) if slots else None
        self._layer = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """The next layer's attention; keys and values of the new tokens are written first.

        Args:
            query: [1, H, N, D].
            key: [1, K, N, D].
            value: [1, K, N, Dv].
            scoring: the layer's.

        Returns:
            [1, N, H, Dv].
        """
        layer, self._layer = self._layer, self._layer + 1
        queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
        outputs, count = [], self._rows.num_looking
        if count:
            own = (queries[:count], keys[:count], values[:count])
            outputs.append(self._rows.attend(layer, *own, scoring))
        if self._new_slots is not None:
            self._pool.write(layer, self._new_slots, keys[count:], values[count:])
            outputs += [
                _attend(self._pool, layer, queries[count:], group, scoring)
                for group in self._groups_within(scoring.window)
            ]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]

    def _groups_within(self, window: int | None) -> list[_Group]:
        """As layers with such a window see them."""
        if window not in self._groups:
            self._groups[window] = [
                _group(group, start, self._pool, window) for start, group in self._pieces
            ]
        return self._groups[window]


def _attend(pool: KVPool, layer: int, queries: Tensor, group: _Group, scoring: Scoring) -> Tensor:
    """[tokens of the group, H, Dv]."""
    keys, values = pool.read(layer, group.slots)
    own = queries[group.queries].transpose(1, 2)
    out = grouped_attention(own, keys, values, group.mask, scoring)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, group.picked)


def _groups(pieces: Sequence[Piece]) -> list[tuple[int, list[Piece]]]:
    """Pieces whose lengths differ by a factor of at most about two, and where each group starts."""
    groups: list[tuple[int, list[Piece]]] = []
    start = longest = 0
    for piece in pieces:
        group = groups[-1][1] if groups else []
        longest = max(longest, piece.num_keys)
        size = (len(group) + 1) * longest
        if group and piece.num_queries <= 2 * group[0].num_queries + 16 and size <= _MAX_GROUP:
            group.append(piece)
        else:
            groups.append((start, [piece]))
            longest = piece.num_keys
        start += piece.num_queries
    return groups


def _group(pieces: Sequence[Piece], start: int, pool: KVPool, window: int | None) -> _Group:
    """Pieces that are computed together, with the keys that they see."""
    lengths = np.array([piece.num_queries for piece in pieces])
    paths = np.array([piece.num_keys for piece in pieces])
    if window is not None:  # what no query sees is not gathered
        paths = np.minimum(paths, lengths + window - 1)
    columns = np.arange(lengths.max())
    first = start + np.cumsum(lengths) - lengths
    queries = first[:, None] + np.minimum(columns, lengths[:, None] - 1)
    slots = np.zeros((len(pieces), paths.max()), np.int64)
    for row, piece, count in zip(slots, pieces, paths.tolist(), strict=True):
        row[:count] = piece.run.slots[piece.num_keys - count : piece.num_keys]
    last_seen = (paths - lengths)[:, None] + np.minimum(columns, lengths[:, None] - 1)
    columns_T = torch.arange(int(paths.max()), device=pool.device)
    last = to_device(last_seen, pool.device)[:, None, :, None]
    hidden = columns_T > last
    if window is not None:
        hidden |= columns_T <= last - window
    mask = torch.zeros(hidden.shape, dtype=pool.dtype, device=hidden.device)
    return _Group(
        to_device(queries, pool.device),
        to_device(slots, pool.device),
        mask.masked_fill_(hidden, -torch.inf),
        to_device(np.flatnonzero(columns < lengths[:, None]), pool.device),
    )
