"""Keys and values of every token computed so far.

Keys and values of one size, of whatever layers, lie in one slab. Most models have a single slab.

Shapes: K key/value heads, D dimensions of a key or value, P keys or values of that size in a token,
S pool slots, M tokens, B paths, T tokens of a path.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.local.kv_layers import KVLayer
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

    Example: two layers alike have one slab of four parts::

        shape = KVShape((KVLayer(4, 16, 16),) * 2, (0, 1), torch.float32, torch.device("cpu"))
        shape.slabs  == [(4, 4, 16)]
        shape.places == [((0, 0), (0, 1)), ((0, 2), (0, 3))]

    Attributes:
        layers: those that have keys and values of their own.
        source: for each attention layer of the model, which of them it attends to.
        dtype: of the numbers.
        device: where they are.
    """

    layers: tuple[KVLayer, ...]
    source: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Of all layers."""
        return sum(layer.numbers for layer in self.layers) * self.dtype.itemsize

    @property
    def slabs(self) -> list[tuple[int, int, int]]:
        """(P, K, D) of each slab."""
        counts = Counter(part for layer in self.layers for part in layer.parts)
        return [(count, *part) for part, count in counts.items()]

    @property
    def places(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """For each attention layer the slab of its keys and which part of it, and of its values."""
        sizes = [tuple(size) for _, *size in self.slabs]
        used = [0] * len(sizes)
        places: list[tuple[int, int]] = []
        for layer in self.layers:
            for slab in map(sizes.index, layer.parts):
                places.append((slab, used[slab]))
                used[slab] += 1
        return [(places[2 * layer], places[2 * layer + 1]) for layer in self.source]


def pages_fit(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention can read keys and values where they lie: on a CPU, not in 16 bits."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64)


class KVPool:
    """Keys and values by slot: a slot for each token of any context, never moved.

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
        self._places = shape.places
        self._slabs = self._empty(0)

    def clear(self) -> None:
        """Forget everything; on a CPU the memory stays, on a GPU the update needs it."""
        self._used = 0
        if self._shape.device.type != "cpu":
            self._slabs = self._empty(0)

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
        held = len(self._slabs[0])
        if self._used > held:
            larger = self._empty(max(_FIRST_SLOTS, self._used, 2 * held))
            for new, old in zip(larger, self._slabs, strict=True):
                new[:first] = old[:first]
            self._slabs = larger
        return np.arange(first, self._used)

    def load(self, slots: Tensor) -> list[Tensor]:
        """[M, P, K, D] of each slab at [M] slots."""
        return [slab.index_select(0, slots) for slab in self._slabs]

    def store(self, slots: Tensor, tokens: Sequence[Tensor]) -> None:
        """Write [M, P, K, D] of each slab to [M] slots."""
        for slab, new in zip(self._slabs, tokens, strict=True):
            slab.index_copy_(0, slots, new)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write [M, K, D] keys and values of one layer to [M] slots."""
        for tokens, new in zip(self.layer(layer), (keys, values), strict=True):
            tokens.index_copy_(0, slots, new)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K, T, D] keys and values of one layer at [B, T] slots."""
        read = (tokens.index_select(0, slots.flatten()) for tokens in self.layer(layer))
        keys, values = (x.view(*slots.shape, *x.shape[1:]).transpose(1, 2) for x in read)
        return keys, values

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """[S, K, D] keys and values of one layer at all slots."""
        (of_keys, key), (of_values, value) = self._places[layer]
        return self._slabs[of_keys][:, key], self._slabs[of_values][:, value]

    def _empty(self, num_slots: int) -> list[Tensor]:
        """[S, P, K, D] of each slab."""
        dtype, device = self._shape.dtype, self._shape.device
        if not self._by_layer:
            return [zeros((num_slots, *slab), dtype, device) for slab in self._shape.slabs]
        slabs = [(parts, num_slots, *token) for parts, *token in self._shape.slabs]
        return [zeros(slab, dtype, device).transpose(0, 1) for slab in slabs]


def zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they take memory where they are written to, and not before."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    num_bytes = prod(sizes) * dtype.itemsize
    memory = np.zeros(num_bytes + _CACHE_LINE, np.uint8)
    first = -memory.ctypes.data % _CACHE_LINE
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(sizes)
