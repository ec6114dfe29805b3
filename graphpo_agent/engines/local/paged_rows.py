"""Rows whose keys and values stay in the pool: nothing is copied, siblings read one prefix.

Shapes: R rows in use, C columns there is room for, H query heads, Dv dimensions of a value.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpo_agent.engines.local.cache import PAGE, KVPool
from graphpo_agent.engines.local.compiled import compiled
from graphpo_agent.engines.local.path_attention import path_attention
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.graph.arrays import BoolArray, IntArray

__all__ = ["PagedRows"]


class PagedRows:
    """Rows of pool slots (``RunningRows``).

    Example: a prefix at slots 0 to 2, two rows, after their first pass::

        slots   = [[0, 1, 2, 3], [0, 1, 2, 7]]
        lengths = [4, 4]

    Attributes:
        members: [R].
        lengths: [R].
    """

    def __init__(self, pool: KVPool) -> None:
        """Args: where the keys and values are."""
        self._pool = pool
        self.clear()

    def clear(self) -> None:
        """Give up all rows."""
        self.members: IntArray = np.empty(0, np.int64)
        self.lengths: IntArray = np.empty(0, np.int64)
        self._starts: IntArray = np.empty(0, np.int64)
        self._slots: NDArray[np.int32] = np.zeros((0, PAGE), np.int32)
        self._new = torch.empty(0, dtype=torch.int64)

    def columns(self, num_tokens: int, max_new_tokens: int) -> int:
        """A page: its tokens stay where they are when the row ends."""
        return PAGE

    def add(self, members: IntArray, prefixes: Sequence[IntArray], columns: IntArray) -> None:
        """One row more for each member."""
        first, lengths = len(self.members), np.array([len(prefix) for prefix in prefixes])
        self.members = np.concatenate([self.members, members])
        self.lengths = np.concatenate([self.lengths, lengths])
        self._starts = np.concatenate([self._starts, lengths])
        self._make_room(len(self.members), int(lengths.max()))
        for row, prefix in zip(self._slots[first:], prefixes, strict=False):
            row[: len(prefix)] = prefix

    def begin(self) -> None:
        """A slot for one token more of every row."""
        new = np.empty(len(self.members), np.int64)
        self._new = torch.from_numpy(new)
        if len(new):
            self._make_room(len(new), int(self.lengths.max()) + PAGE)
            used = self._pool.used
            now = _next_slots(new, self._slots, self.lengths, self._starts, used, PAGE)
            self._pool.allocate(now - used)

    def look(self) -> None:
        """Nothing: the rows are where they were."""

    @property
    def num_looking(self) -> int:
        """R."""
        return len(self.members)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
    ) -> Tensor:
        """[R, H, Dv] attention of every row's new token to its path."""
        self._pool.write(layer, self._new, keys, values)
        all_keys, all_values = self._pool.layer(layer)
        slots = self._slots[: len(self.members)]
        return path_attention(queries, all_keys, all_values, slots, self.lengths, scoring)

    def end(self, ended: BoolArray) -> list[IntArray]:
        """Give up rows; those behind them move up, so that siblings stay side by side."""
        own = [
            self._slots[row, self._starts[row] : self.lengths[row]].astype(np.int64)
            for row in np.flatnonzero(ended).tolist()
        ]
        kept = np.flatnonzero(~ended)
        first, used = int(ended.argmax()), int(self.lengths.max()) + PAGE  # a page may be half full
        self._slots[first : len(kept), :used] = self._slots[kept[first:], :used]
        self.members, self.lengths = self.members[kept], self.lengths[kept]
        self._starts = self._starts[kept]
        return own

    def _make_room(self, num_rows: int, num_columns: int) -> None:
        """Room for so many rows and columns, and for twice as many as before where it is short."""
        held = self._slots.shape
        if num_rows <= held[0] and num_columns <= held[1]:
            return
        shape = [
            size if needed <= size else max(needed, 2 * size)
            for needed, size in zip((num_rows, num_columns), held, strict=True)
        ]
        larger = np.zeros(shape, np.int32)
        larger[: held[0], : held[1]] = self._slots
        self._slots = larger


@compiled()
def _next_slots(
    new: IntArray,
    slots: NDArray[np.int32],
    lengths: IntArray,
    starts: IntArray,
    used: int,
    page: int,
) -> int:
    """Write the [R] slots of the next token of every row, which is then one token longer.

    Rows whose page is full get a fresh one.

    Args:
        new: [R], written.
        slots: [R, C], those of fresh pages are written.
        lengths: [R], raised by one.
        starts: [R] tokens of the rows' prefixes.
        used: slots of the pool that are in use.
        page: slots of one.

    Returns:
        Slots in use now.
    """
    for row in range(len(lengths)):
        length = lengths[row]
        if (length - starts[row]) % page == 0:
            for i in range(page):
                slots[row, length + i] = used + i
            used += page
        new[row] = slots[row, length]
        lengths[row] = length + 1
    return used
