"""Rows of keys and values that are contiguous, so that attention reads them without gathering.

Shapes: H query heads, K key/value heads, D dimensions of a key, Dv of a value, P keys or values of
a slab (``cache.py``), M tokens, R rows of a shelf, C columns of a shelf, T columns in use.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.local.arrays import ranges, to_device
from graphpo_agent.engines.local.cache import KVPool, KVShape
from graphpo_agent.engines.local.kernels import single_attention
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.graph.arrays import BoolArray, IntArray

__all__ = ["Shelf", "Shelves", "shelf_capacity"]

_FIRST_ROWS = 16
_FIRST_CAPACITY = 64
"""Columns of the shortest shelf; every further one is twice as long."""
_COPIED_AT_ONCE = 2**11
"""Tokens copied between pool and shelf in one go; what is between them stays in the caches."""


def shelf_capacity(num_tokens: int) -> int:
    """Columns of the shortest shelf for so many tokens."""
    capacity = _FIRST_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


class Shelves:
    """Rows on shelves of all lengths (``RunningRows``).

    Shelves that stand empty give their memory to those that grow.
    """

    def __init__(self, shape: KVShape, pool: KVPool, max_columns: int) -> None:
        """Set up.

        Args:
            shape: what a token is made of.
            pool: where prefixes come from, and where what has been drawn goes.
            max_columns: tokens for which all shelves together hold memory, as long as one shelf
                does not need more by itself.
        """
        self._shape = shape
        self._pool = pool
        self._max_columns = max_columns
        self._shelves: dict[int, Shelf] = {}

    @property
    def in_use(self) -> list["Shelf"]:
        """Those that hold rows, in the order of a pass."""
        return [shelf for shelf in self._shelves.values() if len(shelf.members)]

    @property
    def members(self) -> IntArray:
        """[R] which continuation each row belongs to."""
        return np.concatenate([np.empty(0, np.int64), *(s.members for s in self.in_use)])

    @property
    def lengths(self) -> IntArray:
        """[R] tokens of each row."""
        return np.concatenate([np.empty(0, np.int64), *(s.lengths for s in self.in_use)])

    @property
    def num_looking(self) -> int:
        """R."""
        return sum(shelf.num_looking for shelf in self.in_use)

    def columns(self, num_tokens: int, max_new_tokens: int) -> int:
        """Those of the shortest shelf that fits; the last token needs none."""
        return shelf_capacity(num_tokens + max_new_tokens - 1)

    def add(self, members: IntArray, prefixes: Sequence[IntArray], columns: IntArray) -> None:
        """One row more for each member, on the shelf of its columns."""
        for capacity in np.unique(columns).tolist():
            chosen = np.flatnonzero(columns == capacity)
            shelf = self._with_room(capacity, len(chosen))
            shelf.add(members[chosen], [prefixes[i] for i in chosen], self._pool)

    def begin(self) -> None:
        """One token more in every row."""
        for shelf in self.in_use:
            shelf.lengths += 1

    def look(self) -> None:
        """Prepare for the attention layers of a pass over all rows."""
        for shelf in self.in_use:
            shelf.look(to_device(shelf.lengths - 1, shelf.device), int(shelf.lengths.max()))

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
    ) -> Tensor:
        """[R, H, Dv] attention of every row's new token to its row."""
        shelves = self.in_use
        if len(shelves) == 1:
            return shelves[0].attend(layer, queries, keys, values, scoring)
        sizes = [shelf.num_looking for shelf in shelves]
        parts = (x.split(sizes) for x in (queries, keys, values))
        return torch.cat(
            [
                shelf.attend(layer, own_queries, own_keys, own_values, scoring)
                for shelf, own_queries, own_keys, own_values in zip(shelves, *parts, strict=True)
            ]
        )

    def end(self, ended: BoolArray) -> list[IntArray]:
        """Move what the rows have computed behind their prefixes to the pool, and give them up."""
        own: list[IntArray] = []
        start = 0
        for shelf in self.in_use:
            part = ended[start : start + len(shelf.members)]
            start += len(part)
            if part.any():
                own += shelf.save(np.flatnonzero(part), self._pool)
                shelf.drop(part)
        return own

    def clear(self) -> None:
        """Give up all rows and their memory: the update needs it, and it may hold no numbers."""
        self._shelves = {}

    def _with_room(self, capacity: int, num_rows: int) -> "Shelf":
        """A shelf to add rows to; where memory is short, the others give back what is unused."""
        if capacity not in self._shelves:
            self._shelves[capacity] = Shelf(self._shape, capacity)
        shelf = self._shelves[capacity]
        if not shelf.has_room(num_rows):
            others = [other for other in self._shelves.values() if other is not shelf]
            needed = (len(shelf.members) + num_rows) * capacity
            if needed + sum(other.num_columns for other in others) > self._max_columns:
                for other in others:
                    other.trim()
            left = self._max_columns - sum(other.num_columns for other in others)
            shelf.make_room(num_rows, left // capacity)
        return shelf


class Shelf:
    """Continuations of similar length, each a row [K, C, D] per key or value, filled in place.

    The rows in use are the first ones, without holes, so that all of them are one batch.

    Attributes:
        capacity: C.
        members: [rows in use] which continuation each row belongs to.
        lengths: [rows in use] tokens whose keys and values each row holds.
    """

    def __init__(self, shape: KVShape, capacity: int) -> None:
        """Args: what a token is made of, and C."""
        self.capacity = capacity
        self.members: IntArray = np.empty(0, np.int64)
        self.lengths: IntArray = np.empty(0, np.int64)
        self._starts: IntArray = np.empty(0, np.int64)
        self._layers = shape.places
        sizes = [(parts, 0, heads, capacity, dim) for parts, heads, dim in shape.slabs]
        like = torch.empty(0, dtype=shape.dtype, device=shape.device)
        self._slabs = [like.new_zeros(size) for size in sizes]
        self._seen, self._unseen = like.new_zeros(()), like.new_full((), -torch.inf)
        self._places = (torch.empty(0), torch.empty(0))
        self._num_columns = 0
        self._masks: dict[int | None, Tensor] = {}

    def add(self, members: IntArray, prefixes: Sequence[IntArray], pool: KVPool) -> None:
        """One row more for each member, holding the tokens at its prefix's pool slots.

        There must be room for them.
        """
        first, lengths = len(self.members), np.array([len(prefix) for prefix in prefixes])
        self.members = np.concatenate([self.members, members])
        self.lengths = np.concatenate([self.lengths, lengths])
        self._starts = np.concatenate([self._starts, lengths])
        longest = int(lengths.max())
        slots = np.zeros((len(prefixes), longest), np.int64)
        for row, prefix in zip(slots, prefixes, strict=True):
            row[: len(prefix)] = prefix
        count = max(1, _COPIED_AT_ONCE // longest)
        for start in range(0, len(slots), count):
            part = to_device(slots[start : start + count], self.device)
            rows = slice(first + start, first + start + len(part))
            for slab, tokens in zip(self._slabs, pool.load(part.flatten()), strict=True):
                by_row = tokens.unflatten(0, part.shape)
                slab[:, rows, :, :longest] = by_row.permute(2, 0, 3, 1, 4)

    def save(self, rows: IntArray, pool: KVPool) -> list[IntArray]:
        """Write the tokens behind the prefixes of some rows to the pool; their slots, by row."""
        starts = self._starts[rows]
        counts = self.lengths[rows] - starts
        slots = pool.allocate(int(counts.sum()))
        columns = np.repeat(starts, counts) + ranges(counts)
        self._copy(np.repeat(rows, counts), columns, slots, pool)
        return np.split(slots, np.cumsum(counts)[:-1])

    def _copy(self, rows: IntArray, columns: IntArray, slots: IntArray, pool: KVPool) -> None:
        """Write the tokens at [M] (row, column) to [M] pool slots."""
        for start in range(0, len(rows), _COPIED_AT_ONCE):
            part = slice(start, start + _COPIED_AT_ONCE)
            tokens = [_at(slab, rows[part], columns[part]) for slab in self._slabs]
            pool.store(to_device(slots[part], self.device), tokens)

    def drop(self, ended: BoolArray) -> None:
        """Give up rows; the last ones move into their places. ``ended`` is [rows in use]."""
        num_kept = int((~ended).sum())
        holes = np.flatnonzero(ended[:num_kept])
        movers = num_kept + np.flatnonzero(~ended[num_kept:])
        for target, source in zip(holes.tolist(), movers.tolist(), strict=True):
            used = slice(int(self.lengths[source]))
            for slab in self._slabs:
                slab[:, target, :, used] = slab[:, source, :, used]
        self.members[holes], self.lengths[holes] = self.members[movers], self.lengths[movers]
        self._starts[holes] = self._starts[movers]
        self.members, self.lengths = self.members[:num_kept], self.lengths[:num_kept]
        self._starts = self._starts[:num_kept]

    @property
    def num_held(self) -> int:
        """Rows for which memory is held, in use or not."""
        return self._slabs[0].shape[1]

    @property
    def num_columns(self) -> int:
        """Tokens for which memory is held, in use or not."""
        return self.num_held * self.capacity

    @property
    def address(self) -> tuple[int, ...]:
        """Where in memory the rows are; they move when more are held, or fewer."""
        return tuple(slab.data_ptr() for slab in self._slabs)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._slabs[0].device

    def has_room(self, num_rows: int) -> bool:
        """Whether so many rows more take no memory."""
        return len(self.members) + num_rows <= self.num_held

    def make_room(self, num_rows: int, most_rows: int) -> None:
        """Hold memory for ``num_rows`` rows more.

        As long as no more than ``most_rows`` are held, it is at least twice as much as before.
        """
        held = self.num_held
        ahead = min(most_rows, max(_FIRST_ROWS, 2 * held))
        number = max(len(self.members) + num_rows, ahead)
        for i, slab in enumerate(self._slabs):  # one after another: less memory at a time
            self._slabs[i] = slab.new_zeros(slab.shape[0], number, *slab.shape[2:])
            self._slabs[i][:, :held] = slab

    def trim(self) -> None:
        """Give back the memory of rows that are not in use."""
        used = len(self.members)
        if used < self.num_held:
            self._slabs = [slab[:, :used].clone() for slab in self._slabs]

    def look(self, last: Tensor, num_columns: int) -> None:
        """Where the new tokens of a pass go, and what they see.

        Args:
            last: [R] the column of each row's new token, for the first rows that are held.
            num_columns: T, beyond all of them.
        """
        self._places = (torch.arange(len(last), device=last.device), last)
        self._num_columns, self._masks = num_columns, {}

    @property
    def num_looking(self) -> int:
        """R: rows of the pass, those not in use included."""
        return len(self._places[1])

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
    ) -> Tensor:
        """[R, H, Dv] attention of every row's new token to its row."""
        (rows, last), num_columns = self._places, self._num_columns
        if scoring.window not in self._masks:
            self._masks[scoring.window] = self._mask(scoring.window)
        all_keys, all_values = (self._slabs[slab][part] for slab, part in self._layers[layer])
        all_keys[rows, :, last] = keys
        all_values[rows, :, last] = values
        return single_attention(
            queries,
            all_keys[: len(rows), :, :num_columns],
            all_values[: len(rows), :, :num_columns],
            self._masks[scoring.window],
            scoring,
        )

    def _mask(self, window: int | None) -> Tensor:
        """[R, 1, 1, T] 0 where a new token sees a column, else -inf."""
        last = self._places[1][:, None]
        columns = torch.arange(self._num_columns, device=last.device)
        unseen = columns > last
        if window is not None:
            unseen |= columns <= last - window
        return torch.where(unseen, self._unseen, self._seen)[:, None, None]


def _at(slab: Tensor, rows: IntArray, columns: IntArray) -> Tensor:
    """[M, P, K, D] at [M] (row, column) of a slab [P, R, K, C, D]."""
    num_parts, held, num_heads, capacity, dim = slab.shape
    heads = np.arange(num_parts)[:, None] * held * num_heads + np.arange(num_heads)
    starts = ((rows * num_heads)[:, None, None] + heads) * capacity  # of rows [C, D]
    index = to_device(starts + columns[:, None, None], slab.device)
    return slab.view(-1, dim).index_select(0, index.flatten()).view(*index.shape, dim)
