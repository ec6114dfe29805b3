"""Softmax attention of grouped heads by torch's kernels, beside attention sinks as well.

Shapes: B sequences, H query heads, K key/value heads (H = G K), Q queries, T keys, D dimensions of
a key, Dv of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from graphpo_agent.engines.local.scoring import Scoring

__all__ = ["KERNELS", "folded_attention", "grouped_attention", "single_attention"]

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which takes long to prepare for every new shape; each pass has its own."""

_ALIGNED = 8
"""Kernels want a multiple of so many dimensions."""
_SCORES_AT_ONCE = 2**22
"""Where no kernel knows them; more are made block by block, and again in the backward pass."""


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """[B, H, Q, Dv] attention of grouped heads by the kernel that fits; causal without a mask.

    With a mask on a GPU, keys are shared by folding a group's heads into queries: the
    memory-efficient kernel takes a mask but no groups. No kernel knows bounded scores.
    """
    if scoring.cap is not None:
        return _by_products(query, key, value, mask, scoring)
    if scoring.sinks is not None:
        return _beside_sinks(query, key, value, mask, scoring.scaling, scoring.sinks)
    return _grouped(query, key, value, mask, scoring.scaling)


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    if mask is not None and query.device.type != "cpu":
        return folded_attention(query, key, value, mask, scaling)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _beside_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    sinks: Tensor,
) -> Tensor:
    """By the same kernels, in which the sink is a key more whose value is 0.

    Heads of a group share their keys and not their sinks. So queries and keys get dimensions more:
    of a query they say which head of its group it is, and the sink's key holds the scores of all of
    them. Causal kernels see the first key everywhere: there the sink is the first, and a query that
    nobody asks for stands before the others.
    """
    num_heads, dim, given = query.shape[1], query.shape[3], value.shape[3]
    num_keys = key.shape[1]
    groups = num_heads // num_keys
    more = -groups % _ALIGNED + groups
    which = torch.eye(groups, more, dtype=query.dtype, device=query.device)
    scores = F.pad(sinks.to(key.dtype).view(num_keys, 1, groups) / scaling, (dim, more - groups))
    sink = scores.expand(len(key), num_keys, 1, dim + more)
    which = which.repeat(num_keys, 1)[:, None].expand(*query.shape[:3], more)
    query = torch.cat([query, which], -1)
    keys, values = F.pad(key, (0, more)), F.pad(value, (0, more))
    nothing = sink.new_zeros(*sink.shape[:3], given + more)
    if mask is None:
        query = F.pad(query, (0, 0, 1, 0))
        keys, values = torch.cat([sink, keys], 2), torch.cat([nothing, values], 2)
        return _grouped(query, keys, values, None, scaling)[:, :, 1:, :given]
    keys, values = torch.cat([keys, sink], 2), torch.cat([values, nothing], 2)
    return _grouped(query, keys, values, F.pad(mask, (0, 1)), scaling)[..., :given]


def single_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring
) -> Tensor:
    """[B, H, Dv] attention of one query each, keys and values read where they are.

    Args:
        query: [B, H, D].
        key: [B, K, T, D].
        value: [B, K, T, Dv].
        mask: [B, 1, 1, T], additive.
        scoring: the layer's.
    """
    query = query[:, :, None]
    if scoring.sinks is None and scoring.cap is None:
        return folded_attention(query, key, value, mask, scoring.scaling)[:, :, 0]
    return _by_products(query, key, value, mask, scoring)[:, :, 0]


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """[B, H, Q, Dv] by matrix products, in blocks of queries. Causal without a mask."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    block = max(1, _SCORES_AT_ONCE // (len(query) * query.shape[1] * num_keys))
    if num_queries <= block:
        return _products(query, key, value, mask, scoring)
    outputs: list[Tensor] = []
    for start in range(0, num_queries, block):
        end = min(start + block, num_queries)
        seen = end if mask is None else num_keys
        block_mask = None if mask is None else mask[:, :, start:end]
        outputs.append(
            checkpoint(
                _products,
                query[:, :, start:end],
                key[:, :, :seen],
                value[:, :, :seen],
                block_mask,
                scoring,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(outputs, 2)


def _products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """[B, H, Q, Dv], all scores held. Without a mask the last query sees all keys, and so on."""
    num_keys, num_queries = key.shape[1], query.shape[2]
    folded = query.reshape(len(query), num_keys, -1, query.shape[3])
    scores = scoring.bounded((folded @ key.transpose(2, 3)) * scoring.scaling)
    scores = scores.unflatten(2, (-1, num_queries))  # [B, K, G, Q, T]
    if mask is None:
        unseen = torch.ones(scores.shape[3:], dtype=torch.bool, device=scores.device)
        unseen = unseen.triu(1 + key.shape[2] - num_queries)
        scores = scores.masked_fill(unseen, -torch.inf)
    else:
        scores = scores + mask[:, :, None]
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(1, num_keys, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:4], 1)], -1)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    weights = weights[..., : key.shape[2]].to(value.dtype).flatten(2, 3)
    return (weights @ value).reshape(*query.shape[:3], -1)


def folded_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """[B, H, Q, Dv]; the G query heads that share a key head become G times as many queries."""
    num_rows, num_heads, num_queries, dim = query.shape
    groups = num_heads // key.shape[1]
    folded = query.reshape(num_rows, key.shape[1], groups * num_queries, dim)
    mask = mask if num_queries == 1 else mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(num_rows, num_heads, num_queries, -1)
