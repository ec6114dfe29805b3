"""Keys and values of every token computed so far, and of the batch being computed.

Shapes: B rows of a batch, K key/value heads, P prefix columns, T columns in all, D head
dimension, M tokens.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, PreTrainedModel

__all__ = ["BatchCache", "KVPool", "kv_bytes_per_token"]

_FIRST_CAPACITY = 4096


class KVPool:
    """Keys and values by slot: one slot per token of any context, never moved.

    Example: a prompt of three tokens and two different continuations of one token each::

        slots of the prompt         = [0, 1, 2]
        slots of the continuations  = [0, 1, 2, 3] and [0, 1, 2, 4]
    """

    def __init__(self) -> None:
        self._used = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    def allocate(self, num_tokens: int) -> NDArray[np.int64]:
        """[num_tokens] fresh slots."""
        first = self._used
        self._used += num_tokens
        return np.arange(first, self._used)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [M, K, D] of one layer at [M] slots."""
        if layer == len(self._layers):
            shape = (_FIRST_CAPACITY, *keys.shape[1:])
            self._layers.append((keys.new_zeros(shape), values.new_zeros(shape)))
        pool_keys, pool_values = (_grown(x, self._used) for x in self._layers[layer])
        self._layers[layer] = (pool_keys, pool_values)
        pool_keys[slots] = keys
        pool_values[slots] = values

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, P, D] of one layer at [B, P] slots."""
        keys, values = self._layers[layer]
        return keys[slots].transpose(1, 2), values[slots].transpose(1, 2)

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self._used = 0
        self._layers = []


class BatchCache(Cache):
    """The transformers cache of one batch: preallocated columns, written in place.

    Every row's prefix ends at column P (shorter ones are padded on the left), so that all rows
    write their next token to the same column.
    """

    def __init__(self, pool: KVPool, prefix_slots: Tensor, num_columns: int) -> None:
        """Args: the pool, [B, P] slots of the prefixes (padding: any used slot), and T."""
        super().__init__(layers=[])
        self._pool = pool
        self._prefix_slots = prefix_slots
        self._num_columns = num_columns
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._lengths: list[int] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Write [B, K, Q, D] after the last column; return all columns so far."""
        if layer_idx == len(self._buffers):
            self._open_layer(key_states, value_states)
        start = self._lengths[layer_idx]
        end = start + key_states.shape[2]
        keys, values = self._buffers[layer_idx]
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self._lengths[layer_idx] = end
        return keys[:, :, :end], values[:, :, :end]

    @property
    def num_bytes(self) -> int:
        """Size of the buffers."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._buffers)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop all rows but the given ones, before or after the first tokens were written."""
        self._prefix_slots = self._prefix_slots[rows]
        self._buffers = [(keys[rows], values[rows]) for keys, values in self._buffers]

    def store(self, rows: Tensor, columns: Tensor, slots: Tensor) -> None:
        """Copy the tokens at [M] (row, column) into the pool at [M] slots."""
        for layer, (keys, values) in enumerate(self._buffers):
            self._pool.write(layer, slots, keys[rows, :, columns], values[rows, :, columns])

    def _open_layer(self, key_states: Tensor, value_states: Tensor) -> None:
        num_prefix = self._prefix_slots.shape[1]
        buffers = tuple(
            x.new_empty((x.shape[0], x.shape[1], self._num_columns, x.shape[3]))
            for x in (key_states, value_states)
        )
        if num_prefix:
            for buffer, prefix in zip(
                buffers, self._pool.read(len(self._buffers), self._prefix_slots), strict=True
            ):
                buffer[:, :, :num_prefix] = prefix
        self._buffers.append((buffers[0], buffers[1]))
        self._lengths.append(num_prefix)


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes that one token's keys and values take over all layers, found by computing one."""
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    cache = BatchCache(KVPool(), token[:, :0], num_columns=1)
    with torch.inference_mode():
        model.base_model(
            input_ids=token,
            position_ids=token,
            attention_mask=torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=model.device),
            past_key_values=cache,
            use_cache=True,
        )
    return cache.num_bytes


def _grown(pool: Tensor, needed: int) -> Tensor:
    """``pool`` with room for at least ``needed`` slots."""
    if needed <= pool.shape[0]:
        return pool
    larger = pool.new_zeros((max(needed, 2 * pool.shape[0]), *pool.shape[1:]))
    larger[: pool.shape[0]] = pool
    return larger
