"""States of linear attention layers, one for every node of a policy's contexts.

What such a layer knows of a path is of one size however long the path is, but is not made of
tokens: a node's children start from its state, and nothing can start from inside its tokens.

Shapes: S slots, C channels and W tokens of the convolution, H heads, K key dimension, V value
dimension.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.local.cache import zeros
from graphpo_agent.graph.arrays import IntArray

__all__ = ["StatePool", "StateShape"]

_FIRST_SLOTS = 64


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one path's state is made of, in ``num_layers`` layers.

    Attributes:
        num_layers: linear attention layers.
        inputs: W - 1 and C, of the convolution's last inputs.
        inputs_dtype: of these.
        memory: H, K and V, of what is read and written.
        memory_dtype: of it.
        device: where they are.
    """

    num_layers: int
    inputs: tuple[int, int]
    inputs_dtype: torch.dtype
    memory: tuple[int, int, int]
    memory_dtype: torch.dtype
    device: torch.device


class StatePool:
    """States by slot. Slot 0 is that of nothing: zeros.

    Example: a prompt and two continuations hold slots 1, 2 and 3; the continuations' first tokens
    read slot 1 and write 2 and 3, their later ones read and write these.
    """

    def __init__(self, shape: StateShape | None) -> None:
        """Args: what a state is made of; None: the model has no layers that need one."""
        self._shape = shape
        self.clear()

    def clear(self) -> None:
        """Forget everything and free the memory."""
        self._used, self._capacity = 1, 0
        self._inputs: list[Tensor] = []
        self._memories: list[Tensor] = []

    @property
    def needed(self) -> bool:
        """Whether the model has layers that need states."""
        return self._shape is not None

    @property
    def width(self) -> int:
        """W."""
        assert self._shape is not None
        return self._shape.inputs[0] + 1

    @property
    def device(self) -> torch.device:
        """Where they are."""
        assert self._shape is not None
        return self._shape.device

    def allocate(self, count: int) -> IntArray:
        """[count] fresh slots."""
        first, self._used = self._used, self._used + count
        if self._shape is not None and self._used > self._capacity:
            self._capacity = max(_FIRST_SLOTS, self._used, 2 * self._capacity)
            self._inputs = self._grown(self._inputs, self._shape.inputs, self._shape.inputs_dtype)
            self._memories = self._grown(
                self._memories, self._shape.memory, self._shape.memory_dtype
            )
        return np.arange(first, self._used)

    def inputs(self, layer: int) -> Tensor:
        """[S, W - 1, C] the convolution's last inputs in a layer, the latest last."""
        return self._inputs[layer]

    def memories(self, layer: int) -> Tensor:
        """[S, H, K, V] of a layer."""
        return self._memories[layer]

    def _grown(
        self, held: list[Tensor], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> list[Tensor]:
        assert self._shape is not None
        grown: list[Tensor] = []
        for layer in range(self._shape.num_layers):
            larger = zeros((self._capacity, *sizes), dtype, self._shape.device)
            if held:
                larger[: len(held[layer])] = held[layer]
            grown.append(larger)
        return grown
