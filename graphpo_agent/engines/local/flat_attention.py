"""Attention over one flat row that holds each token once: who attends to whom, computed two ways.

Keys and values are gathered for every piece of the row (see ``pieces``). On a GPU that multiplies
in 16 bits the pieces are the row's stretches, all of them in one FlashAttention kernel; elsewhere
pieces of similar length are computed together.

Shapes: H query heads, K key/value heads (H = G K), D head dimension, N tokens of a flat row,
E pieces of a bucket, Q queries, T keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.attention import (
    check_plain,
    grouped_attention,
    no_mask,
)
from graphpo_agent.engines.local.handed_on import handed_on
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.engines.local.pieces import cut_into_buckets
from graphpo_agent.engines.local.stretch_attention import (
    StretchLayout,
    over_stretches,
    stretch_layout,
)
from graphpo_agent.graph.arrays import BoolArray, IntArray

__all__ = ["BucketLayout", "flash_fits", "flat_layout"]


@dataclass(frozen=True, slots=True)
class BucketLayout:
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


def flat_layout(
    batch: PackedBatch, head_dim: int, dtype: torch.dtype, device: torch.device
) -> StretchLayout | BucketLayout:
    """The layout of a row; ``head_dim`` and ``dtype`` are those of queries and keys."""
    if flash_fits(head_dim, dtype, device):
        return stretch_layout(batch, device)
    buckets, order = cut_into_buckets(batch)
    return BucketLayout(
        _flat([bucket.queries for bucket in buckets], device),
        _flat([bucket.keys for bucket in buckets], device),
        tuple((*bucket.queries.shape, bucket.keys.shape[1]) for bucket in buckets),
        tuple(
            None if bucket.causal else _additive(bucket.seen(batch.exits), dtype, device)
            for bucket in buckets
        ),
        to_device(order, device),
    )


def flash_fits(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether FlashAttention is made for such heads, numbers and GPUs (from Ampere on).

    Larger heads have a backward pass on some of these GPUs only.
    """
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 192
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@torch.compiler.disable
def gathered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    flat_layout: StretchLayout | BucketLayout | None = None,
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
    layout = handed_on(flat_layout)
    # Under autocast rotary embeddings give float32; the kernel would cast after the gathering.
    queries, keys, values = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    if isinstance(layout, StretchLayout):
        out = over_stretches(queries, keys, values, layout, scaling)
    else:
        out = _over_buckets(queries, keys, values, layout, scaling)
    return out[None], None


def _over_buckets(
    queries: Tensor, keys: Tensor, values: Tensor, layout: BucketLayout, scaling: float
) -> Tensor:
    """[N, H, D]."""
    shapes = layout.shapes
    outputs = [
        grouped_attention(q, k, v, mask, scaling).transpose(1, 2).flatten(0, 1)
        for q, k, v, mask in zip(
            _gather(queries, layout.queries, [(e, q) for e, q, _ in shapes]),
            _gather(keys, layout.keys, [(e, t) for e, _, t in shapes]),
            _gather(values, layout.keys, [(e, t) for e, _, t in shapes]),
            layout.masks,
            strict=True,
        )
    ]
    return torch.cat(outputs).index_select(0, layout.order)


def _gather(rows: Tensor, index: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """[N, H, D] rows at flattened positions, as [E, H, L, D] for every (E, L)."""
    parts = rows.index_select(0, index).split([count * length for count, length in shapes])
    return [
        part.view(count, length, *rows.shape[1:]).transpose(1, 2)
        for part, (count, length) in zip(parts, shapes, strict=True)
    ]


def _flat(arrays: Sequence[IntArray], device: torch.device) -> Tensor:
    return to_device(np.concatenate([array.ravel() for array in arrays]), device)


def _additive(seen: BoolArray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[E, 1, Q, T] 0 where ``seen`` [E, Q, T], else -inf."""
    mask = torch.where(torch.from_numpy(seen), 0.0, -torch.inf)
    return mask[:, None].to(device, dtype)


AttentionInterface.register("graphpo_flat", gathered_attention)
AttentionMaskInterface.register("graphpo_flat", no_mask)
