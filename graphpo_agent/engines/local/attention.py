"""Two attention functions that any stock transformers causal LM can run with.

Both are registered under transformers' ``AttentionInterface``; ``attention`` switches a model to
one of them for the length of a ``with`` block.

Shapes: B sequences, H query heads, K key/value heads (H = G K), Q queries, T keys, D head
dimension, N tokens of a flat row, E stretches of a bucket.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from graphpo_agent.errors import ModelError

__all__ = [
    "FlatLayout",
    "attention",
    "cached_attention",
    "flat_attention",
    "folded_attention",
    "grouped_attention",
]

AttentionName = Literal["graphpo_cached", "graphpo_flat"]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Who attends to whom in one flat row of N tokens, each token held once.

    Attributes:
        queries: per bucket [E, Q] positions in the row; padding repeats a valid position.
        keys: per bucket [E, T] positions in the row of the whole path; padding likewise.
        masks: per bucket [E, 1, Q, T] additive, 0 where query may see key, -inf elsewhere.
        order: [N] for every token of the row its place among all buckets' queries, flattened.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    order: Tensor


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention of a few new tokens to a cache.

    Args:
        module: the attention layer (unused; the interface passes it).
        query: [B, H, Q, D].
        key: [B, K, T, D].
        value: [B, K, T, D].
        attention_mask: [B, 1, Q, T] additive.
        scaling: factor on the dot products.
        **extras: other arguments of the interface.

    Returns:
        [B, Q, H, D] and None (no attention weights).

    Raises:
        ModelError: the layer is more than softmax attention.
    """
    _check_plain(extras)
    return grouped_attention(query, key, value, attention_mask, scaling).transpose(1, 2), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """[B, H, Q, D] attention of grouped heads by the kernel that fits the device.

    One query per row, or a GPU: keys are shared by folding a group's heads into queries (the
    memory-efficient GPU kernel takes a mask but no groups). Otherwise the CPU kernel groups.
    """
    if query.shape[2] == 1 or query.device.type != "cpu":
        return folded_attention(query, key, value, mask, scaling)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )


def folded_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """[B, H, Q, D]; the G query heads that share a key head become G times as many queries."""
    num_rows, num_heads, num_queries, dim = query.shape
    groups = num_heads // key.shape[1]
    folded = query.reshape(num_rows, key.shape[1], groups * num_queries, dim)
    folded_mask = mask if num_queries == 1 else mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=folded_mask, scale=scaling)
    return out.reshape(query.shape)


def flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    flat_layout: FlatLayout,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attention of every stretch of a flat row to the gathered tokens of its own path.

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
        ModelError: the layer is more than softmax attention.
    """
    _check_plain(extras)
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for q_index, k_index, mask in zip(
        flat_layout.queries, flat_layout.keys, flat_layout.masks, strict=True
    ):
        out = grouped_attention(
            _gather(queries, q_index),
            _gather(keys, k_index),
            _gather(values, k_index),
            mask,
            scaling,
        )
        outputs.append(out.transpose(1, 2).reshape(-1, *queries.shape[1:]))
    return torch.cat(outputs).index_select(0, flat_layout.order)[None], None


@contextmanager
def attention(model: PreTrainedModel, name: AttentionName) -> Iterator[None]:
    """Run ``model`` with one of this module's attention functions inside the ``with`` block.

    Raises:
        ModelError: the model does not use transformers' attention interface.
    """
    before = model.config._attn_implementation
    assert before is not None, "transformers sets one when it makes a model"
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ModelError(
            f"model {model.name_or_path} ({type(model).__name__}) does not use transformers' "
            "attention interface; use another model family"
        )
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check_plain(extras: Mapping[str, Any]) -> None:
    """Refuse what transformers hands to layers with capped scores or attention sinks."""
    for name in ("softcap", "s_aux"):
        if extras.get(name) is not None:
            raise ModelError(
                f"attention with {name} is not supported; use a model with plain attention"
            )


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """[N, H, D] rows at [E, L] positions, as [E, H, L, D]."""
    num_stretches, length = index.shape
    picked = rows.index_select(0, index.reshape(-1))
    return picked.view(num_stretches, length, *rows.shape[1:]).transpose(1, 2)


def _no_mask(*_: Any, **__: Any) -> None:
    """A mask factory: the functions here bring their own masks."""
    return None


AttentionInterface.register("graphpo_cached", cached_attention)
AttentionInterface.register("graphpo_flat", flat_attention)
AttentionMaskInterface.register("graphpo_cached", _no_mask)
AttentionMaskInterface.register("graphpo_flat", _no_mask)
