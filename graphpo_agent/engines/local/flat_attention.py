"""Attention over one flat row that holds each token once: who attends to whom, computed two ways.

``gathered``: keys and values are gathered for every piece of the row (see ``packing``), and pieces
of similar length are computed together. ``flex``: one FlexAttention kernel over the whole row,
whose block mask skips the blocks in which no query sees a key; compiled on a GPU. On a CPU, where
FlexAttention has no gradient, the same mask is laid out densely.

Shapes: H query heads, K key/value heads (H = G K), D head dimension, N tokens of a flat row,
E pieces of a bucket, Q queries, T keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.attention import (
    AttentionName,
    check_plain,
    grouped_attention,
    handed_on,
    no_mask,
)
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.graph.arrays import IntArray

__all__ = ["FlatKind", "FlexLayout", "GatheredLayout", "flat_layout", "interface_name"]

FlatKind = Literal["gathered", "flex"]
"""How attention over a flat row is computed."""

_BLOCK = 128
"""Queries and keys of one block of the block mask."""


@dataclass(frozen=True, slots=True)
class GatheredLayout:
    """Who attends to whom in one flat row of N tokens, bucket by bucket.

    Attributes:
        queries: positions in the row of the queries of all buckets, [E, Q] each, flattened.
        keys: positions of the keys of all buckets, [E, T] each, flattened.
        shapes: per bucket E, Q and T.
        masks: per bucket of blocks [E, 1, Q, T] additive, 0 where a query may see a key, -inf
            elsewhere; None of runs.
        order: [N] for every token of the row its place among ``queries``.
    """

    queries: Tensor
    keys: Tensor
    shapes: tuple[tuple[int, int, int], ...]
    masks: tuple[Tensor | None, ...]
    order: Tensor


@dataclass(frozen=True, slots=True)
class FlexLayout:
    """The same for the whole row at once.

    Attributes:
        blocks: FlexAttention's block mask.
    """

    blocks: BlockMask

    def dense(self, device: torch.device) -> Tensor:
        """[N, N] whether a query (row) sees a key (column)."""
        queries = torch.arange(self.blocks.seq_lengths[0], device=device)
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        return self.blocks.mask_mod(nothing, nothing, queries[:, None], queries[None])


def interface_name(kind: FlatKind) -> AttentionName:
    """Under which name transformers knows the attention function."""
    return "graphpo_flat" if kind == "gathered" else "graphpo_flex"


def flat_layout(
    batch: PackedBatch, kind: FlatKind, dtype: torch.dtype, device: torch.device
) -> GatheredLayout | FlexLayout:
    """The layout of a row; ``dtype`` is that of queries and keys."""
    if kind == "flex":
        return FlexLayout(_block_mask(batch.exits, device))
    return GatheredLayout(
        _flat([bucket.queries for bucket in batch.buckets], device),
        _flat([bucket.keys for bucket in batch.buckets], device),
        tuple((*bucket.queries.shape, bucket.keys.shape[1]) for bucket in batch.buckets),
        tuple(
            None if bucket.causal else _additive(bucket.seen(batch.exits), dtype, device)
            for bucket in batch.buckets
        ),
        to_device(batch.order, device),
    )


@torch.compiler.disable
def gathered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    flat_layout: GatheredLayout | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention of every piece of a flat row to the gathered tokens of its path and to itself.

    Args:
        module: the attention layer (unused; the interface passes it).
        query: [1, H, N, D].
        key: [1, K, N, D].
        value: [1, K, N, D].
        attention_mask: unused; ``flat_layout`` holds the masks.
        scaling: factor on the dot products.
        flat_layout: reaches this function as a keyword argument of the model's call.
        **extras: other arguments of the interface.

    Returns:
        [1, N, H, D] and None (no attention weights).

    Raises:
        ModelError: the layer is more than softmax attention, or no layout reaches it.
    """
    check_plain(extras)
    flat_layout = handed_on(flat_layout)
    # Under autocast rotary embeddings give float32; the kernel would cast after the gathering.
    queries, keys, values = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    shapes = flat_layout.shapes
    outputs = [
        grouped_attention(q, k, v, mask, scaling).transpose(1, 2).flatten(0, 1)
        for q, k, v, mask in zip(
            _gather(queries, flat_layout.queries, [(e, q) for e, q, _ in shapes]),
            _gather(keys, flat_layout.keys, [(e, t) for e, _, t in shapes]),
            _gather(values, flat_layout.keys, [(e, t) for e, _, t in shapes]),
            flat_layout.masks,
            strict=True,
        )
    ]
    return torch.cat(outputs).index_select(0, flat_layout.order)[None], None


@torch.compiler.disable
def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    flat_layout: FlexLayout | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention of a whole flat row through its block mask; arguments as above."""
    check_plain(extras)
    flat_layout = handed_on(flat_layout)
    query, key = query.to(value.dtype), key.to(value.dtype)
    # The kernel is made for heads of at least 16 and has no float64.
    if query.device.type == "cuda" and query.shape[3] >= 16 and query.dtype != torch.float64:
        out = _compiled_flex_attention()(
            query, key, value, block_mask=flat_layout.blocks, scale=scaling, enable_gqa=True
        )
    else:
        seen = flat_layout.dense(query.device)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2), None


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _gather(rows: Tensor, index: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """[N, H, D] rows at flattened positions, as [E, H, L, D] for every (E, L)."""
    parts = rows.index_select(0, index).split([count * length for count, length in shapes])
    return [
        part.view(count, length, *rows.shape[1:]).transpose(1, 2)
        for part, (count, length) in zip(parts, shapes, strict=True)
    ]


def _flat(arrays: Sequence[IntArray], device: torch.device) -> Tensor:
    return to_device(np.concatenate([array.ravel() for array in arrays]), device)


def _additive(seen: NDArray[np.bool_], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[E, 1, Q, T] 0 where ``seen`` [E, Q, T], else -inf."""
    mask = torch.zeros(seen.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(~seen), -torch.inf)[:, None].to(device)


def _block_mask(exits: IntArray, device: torch.device) -> BlockMask:
    """FlexAttention's mask from the interval in which each token is seen, [j, exits[j])."""
    num_tokens = len(exits)
    starts = np.arange(0, num_tokens, _BLOCK)
    ends = np.minimum(starts + _BLOCK, num_tokens)
    seen_until = np.maximum.reduceat(exits, starts)
    seen_by_all_until = np.minimum.reduceat(exits, starts)
    earlier = np.tri(len(starts), k=-1, dtype=np.bool_)
    full = earlier & (seen_by_all_until[None] >= ends[:, None])
    full &= (ends - starts == _BLOCK)[:, None]
    partial = (earlier & (seen_until[None] > starts[:, None]) & ~full) | np.eye(
        len(starts), dtype=np.bool_
    )
    limits = to_device(exits, device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < limits[key])

    return BlockMask.from_kv_blocks(
        *_block_lists(partial, device),
        *_block_lists(full, device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )


def _block_lists(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1, 1, rows] how many key blocks each block of queries has, and [1, 1, rows, …] which."""
    counts = to_device(chosen.sum(1).astype(np.int32), device)
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return counts[None, None], to_device(order, device)[None, None]


AttentionInterface.register("graphpo_flat", gathered_attention)
AttentionInterface.register("graphpo_flex", block_attention)
AttentionMaskInterface.register("graphpo_flat", no_mask)
AttentionMaskInterface.register("graphpo_flex", no_mask)
