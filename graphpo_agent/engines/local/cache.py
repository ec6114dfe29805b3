"""Keys and values of every token computed so far.

Shapes: L layers, K key/value heads, D head dimension, S pool slots, M tokens, B paths, T tokens of
a path.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.graph.arrays import IntArray

__all__ = ["PAGE", "KVPool", "KVShape", "pages_fit", "zeros"]

_FIRST_SLOTS = 4096
_CACHE_LINE = 64
"""Bytes; vectors are read fastest from where a line begins."""
PAGE = 4
"""Slots that a row in the pool takes at once: its tokens lie side by side, few are left unused."""


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


def pages_fit(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention can read keys and values where they lie: on a CPU, not in 16 bits."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64)


class KVPool:
    """Keys and values [S, 2 L, K, D] by slot: a slot for each token of any context, never moved.

    Example: a prompt of three tokens and two different continuations of one token each::

        slots of the prompt         = [0, 1, 2]
        slots of the continuations  = [0, 1, 2, 3] and [0, 1, 2, 4]
    """

    def __init__(self, shape: KVShape, by_layer: bool = False) -> None:
        """Set up.

        Args:
            shape: what a token is made of.
            by_layer: all tokens of a layer lie side by side, to be read where they are; else all
                layers of a token, to be copied.
        """
        self._shape = shape
        self._by_layer = by_layer
        self._used = 0
        self._tokens = self._empty(0)

    def clear(self) -> None:
        """Forget everything; on a CPU the memory stays, on a GPU the update needs it."""
        self._used = 0
        if self._shape.device.type != "cpu":
            self._tokens = self._empty(0)

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys and values."""
        return self._shape.dtype

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._shape.device

    @property
    def used(self) -> int:
        """Slots in use; the next fresh one has this number."""
        return self._used

    def allocate(self, num_tokens: int) -> IntArray:
        """[num_tokens] fresh slots."""
        first, self._used = self._used, self._used + num_tokens
        if self._used > len(self._tokens):
            capacity = max(_FIRST_SLOTS, self._used, 2 * len(self._tokens))
            larger = self._empty(capacity)
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
        for tokens, new in zip(self.layer(layer), (keys, values), strict=True):
            tokens.index_copy_(0, slots, new)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, D] of one layer at [B, T] slots."""
        read = (tokens.index_select(0, slots.flatten()) for tokens in self.layer(layer))
        keys, values = (x.view(*slots.shape, *x.shape[1:]).transpose(1, 2) for x in read)
        return keys, values

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, D] of one layer at all slots."""
        return self._tokens[:, 2 * layer], self._tokens[:, 2 * layer + 1]

    def _empty(self, num_slots: int) -> Tensor:
        shape = self._shape
        parts, token = 2 * shape.num_layers, (shape.num_heads, shape.head_dim)
        sizes = (parts, num_slots) if self._by_layer else (num_slots, parts)
        tokens = zeros((*sizes, *token), shape.dtype, shape.device)
        return tokens.transpose(0, 1) if self._by_layer else tokens


def zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they take memory where they are written to, and not before."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    num_bytes = prod(sizes) * dtype.itemsize
    memory = np.zeros(num_bytes + _CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(sizes)
