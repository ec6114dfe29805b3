"""Keys and values of every token computed so far.

Shapes: L layers, K key/value heads, D head dimension, S pool slots, M tokens, B paths, T tokens of
a path.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.graph.arrays import IntArray

__all__ = ["KVPool", "KVShape"]

_FIRST_SLOTS = 4096


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
        """On a CPU a layer's tokens lie side by side, elsewhere a token's layers: they move."""
        shape = self._shape
        parts, token = 2 * shape.num_layers, (shape.num_heads, shape.head_dim)
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        if shape.device.type == "cpu":
            return torch.zeros((parts, num_slots, *token), **options).transpose(0, 1)
        return torch.zeros((num_slots, parts, *token), **options)
