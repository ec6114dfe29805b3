"""Keys and values: of every token computed so far, and of the continuations being drawn.

Shapes: L layers, K key/value heads, D head dimension, H query heads, S pool slots, M tokens,
R rows of a shelf, C columns of a shelf, T columns in use, N tokens of a forward pass.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.attention import folded_attention
from graphpo_agent.graph.arrays import IntArray

__all__ = ["KVPool", "KVShape", "Shelf", "shelf_capacity"]

_FIRST_SLOTS = 4096
_FIRST_ROWS = 16
_FIRST_CAPACITY = 64
"""Columns of the shortest shelf; every further one is twice as long."""
_COPIED_AT_ONCE = 2**11
"""Tokens copied between pool and shelf in one go; what is between them stays in the caches."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values are made of.

    Example: ``KVShape(num_layers=2, num_heads=4, head_dim=16, dtype=torch.float32, device=cpu)``.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Of all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Keys and values [S, 2 L, K, D] by slot: one slot per token of any context, never moved.

    Example: a prompt of three tokens and two different continuations of one token each::

        slots of the prompt         = [0, 1, 2]
        slots of the continuations  = [0, 1, 2, 3] and [0, 1, 2, 4]
    """

    def __init__(self, shape: KVShape) -> None:
        self._shape = shape
        self._used = 0
        self._tokens = torch.zeros(
            (0, 2 * shape.num_layers, shape.num_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )

    def clear(self) -> None:
        """Forget everything; the memory stays."""
        self._used = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values."""
        return self._shape.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._shape.device

    def allocate(self, num_tokens: int) -> IntArray:
        """[num_tokens] fresh slots."""
        first, self._used = self._used, self._used + num_tokens
        if self._used > len(self._tokens):
            capacity = max(_FIRST_SLOTS, self._used, 2 * len(self._tokens))
            larger = self._tokens.new_zeros((capacity, *self._tokens.shape[1:]))
            larger[:first] = self._tokens[:first]
            self._tokens = larger
        return np.arange(first, self._used)

    def load(self, slots: Tensor) -> Tensor:
        """[M, 2 L, K, D] at [M] slots."""
        return self._tokens.index_select(0, slots)

    def store(self, slots: Tensor, tokens: Tensor) -> None:
        """Write [M, 2 L, K, D] to [M] slots."""
        self._tokens.index_copy_(0, slots, tokens)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [M, K, D] of one layer to [M] slots."""
        self._tokens[slots, 2 * layer] = keys
        self._tokens[slots, 2 * layer + 1] = values

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, D] of one layer at [B, T] slots."""
        blocks = self._tokens.view(-1, *self._tokens.shape[2:])  # a token's layers one by one
        keys = 2 * (slots.flatten() * self._shape.num_layers + layer)
        read = (blocks.index_select(0, index) for index in (keys, keys + 1))
        keys, values = (x.view(*slots.shape, *x.shape[1:]).transpose(1, 2) for x in read)
        return keys, values


def shelf_capacity(num_tokens: int) -> int:
    """Columns of the shortest shelf for so many tokens."""
    capacity = _FIRST_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


class Shelf:
    """Continuations of similar length, each a row [K, C, D] per layer that it fills in place.

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
        self._rows = torch.zeros(
            (2 * shape.num_layers, 0, shape.num_heads, capacity, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )
        self._seen, self._unseen = self._rows.new_zeros(()), self._rows.new_full((), -torch.inf)
        self._places = (torch.empty(0), torch.empty(0))
        self._mask = torch.empty(0)

    def add(self, members: IntArray, prefixes: list[IntArray], pool: KVPool) -> None:
        """One row more for each member, holding the tokens at its prefix's pool slots.

        There must be room for them.
        """
        first, lengths = len(self.members), np.array([len(prefix) for prefix in prefixes])
        self.members = np.concatenate([self.members, members])
        self.lengths = np.concatenate([self.lengths, lengths])
        longest = int(lengths.max())
        slots = np.zeros((len(prefixes), longest), np.int64)
        for row, prefix in zip(slots, prefixes, strict=True):
            row[: len(prefix)] = prefix
        count = max(1, _COPIED_AT_ONCE // longest)
        for start in range(0, len(slots), count):
            part = to_device(slots[start : start + count], self.device)
            tokens = pool.load(part.flatten()).unflatten(0, part.shape)
            rows = slice(first + start, first + start + len(part))
            self._rows[:, rows, :, :longest] = tokens.permute(2, 0, 3, 1, 4)

    def save(self, rows: IntArray, columns: IntArray, slots: IntArray, pool: KVPool) -> None:
        """Write the tokens at [M] (row, column) to [M] pool slots."""
        num_parts, held, num_heads, capacity, dim = self._rows.shape
        heads = np.arange(num_parts)[:, None] * held * num_heads + np.arange(num_heads)
        for start in range(0, len(rows), _COPIED_AT_ONCE):
            part = slice(start, start + _COPIED_AT_ONCE)
            starts = ((rows[part] * num_heads)[:, None, None] + heads) * capacity  # of rows [C, D]
            index = to_device(starts + columns[part, None, None], self.device)
            tokens = self._rows.view(-1, dim).index_select(0, index.flatten())
            pool.store(to_device(slots[part], self.device), tokens.view(*index.shape, dim))

    def drop(self, ended: NDArray[np.bool_]) -> None:
        """Give up rows; the last ones move into their places. ``ended`` is [rows in use]."""
        num_kept = int((~ended).sum())
        holes = np.flatnonzero(ended[:num_kept])
        movers = num_kept + np.flatnonzero(~ended[num_kept:])
        for target, source in zip(holes.tolist(), movers.tolist(), strict=True):
            used = slice(int(self.lengths[source]))
            self._rows[:, target, :, used] = self._rows[:, source, :, used]
        self.members[holes], self.lengths[holes] = self.members[movers], self.lengths[movers]
        self.members, self.lengths = self.members[:num_kept], self.lengths[:num_kept]

    @property
    def num_held(self) -> int:
        """Rows for which memory is held, in use or not."""
        return self._rows.shape[1]

    @property
    def num_columns(self) -> int:
        """Tokens for which memory is held, in use or not."""
        return self.num_held * self.capacity

    @property
    def address(self) -> int:
        """Where in memory the rows are; they move when more are held, or fewer."""
        return self._rows.data_ptr()

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._rows.device

    def has_room(self, num_rows: int) -> bool:
        """Whether so many rows more take no memory."""
        return len(self.members) + num_rows <= self.num_held

    def make_room(self, num_rows: int, most_rows: int) -> None:
        """Hold memory for ``num_rows`` rows more.

        As long as no more than ``most_rows`` are held, it is at least twice as much as before.
        """
        held = self.num_held
        shape = list(self._rows.shape)
        ahead = min(most_rows, max(_FIRST_ROWS, 2 * held))
        shape[1] = max(len(self.members) + num_rows, ahead)
        larger = self._rows.new_zeros(shape)
        larger[:, :held] = self._rows
        self._rows = larger

    def trim(self) -> None:
        """Give back the memory of rows that are not in use."""
        used = len(self.members)
        if used < self.num_held:
            self._rows = self._rows[:, :used].clone()

    def begin(self) -> None:
        """One token more in every row."""
        self.lengths += 1

    def look(self, last: Tensor, num_columns: int) -> None:
        """Where the new tokens of a pass go, and what they see.

        Args:
            last: [R] the column of each row's new token, for the first rows that are held.
            num_columns: T, beyond all of them.
        """
        columns = torch.arange(num_columns, device=last.device)
        mask = torch.where(columns > last[:, None], self._unseen, self._seen)
        self._places = (torch.arange(len(last), device=last.device), last)
        self._mask = mask[:, None, None]

    @property
    def num_looking(self) -> int:
        """R: rows of the pass, those not in use included."""
        return len(self._places[1])

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> Tensor:
        """Attention of every row's new token to its row, its own key and value written first.

        Args:
            layer: whose turn it is.
            queries: [R, H, D] of the new tokens.
            keys: [R, K, D].
            values: [R, K, D].
            scaling: factor on the dot products.

        Returns:
            [R, H, D].
        """
        (rows, last), num_columns = self._places, self._mask.shape[-1]
        all_keys, all_values = self._rows[2 * layer], self._rows[2 * layer + 1]
        all_keys[rows, :, last] = keys
        all_values[rows, :, last] = values
        return folded_attention(
            queries[:, :, None],
            all_keys[: len(rows), :, :num_columns],
            all_values[: len(rows), :, :num_columns],
            self._mask,
            scaling,
        )[:, :, 0]
