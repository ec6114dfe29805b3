"""Gated delta nets over a flat row: those of Qwen3-Next, Qwen3.5 and Olmo Hybrid.

Shapes: N tokens of a row, d hidden size, C channels of the convolution, H value heads, J key heads
(H = G J), K key dimension, V value dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from graphpo_agent.engines.local.recurrence import Recurrence, RecurrentSizes

__all__ = ["is_mixer", "over_row", "sizes"]

_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
_NORM_EPSILON = 1e-6
"""Of the lengths that queries and keys are divided by; no config names it."""


def is_mixer(module: nn.Module) -> bool:
    """Whether a part of such a model is a gated delta net."""
    return hasattr(module, "A_log")


def sizes(config: PretrainedConfig) -> RecurrentSizes | None:
    """Of the gated delta nets of a model; None where it is of no family that has them."""
    if config.model_type not in _FAMILIES:
        return None
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    heads = config.linear_num_value_heads
    channels = 2 * config.linear_num_key_heads * keys + heads * values
    return RecurrentSizes(config.linear_conv_kernel_dim, channels, heads, keys, values)


@torch.compiler.disable
def over_row(layer: Any, before: Recurrence, hidden_states: Tensor, **_: Any) -> Tensor:
    """[1, N, d] of [1, N, d]."""
    mixed, gate, beta, step = (x[0] for x in _projected(layer, hidden_states))
    activation = ACT2FN[getattr(layer, "activation", "silu")]
    mixed = activation(before.convolve(mixed, _taps(layer)))
    precise = torch.promote_types(mixed.dtype, torch.float32)
    with torch.autocast(mixed.device.type, enabled=False):
        widths = [layer.key_dim, layer.key_dim, layer.value_dim]
        query, key, value = mixed.to(precise).split(widths, dim=1)
        query, key = (_unit_heads(x, layer) for x in (query, key))
        step = F.softplus(step.to(precise) + layer.dt_bias)
        largest_beta = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0
        read = before.recall(
            query / layer.head_k_dim**0.5,
            key,
            value.unflatten(1, (layer.num_v_heads, layer.head_v_dim)),
            -layer.A_log.to(precise).exp() * step,
            largest_beta * beta.to(precise).sigmoid(),
        )
    olmo = hasattr(layer, "o_proj")
    norm, out = (layer.o_norm, layer.o_proj) if olmo else (layer.norm, layer.out_proj)
    normed = norm(read.flatten(0, 1).to(mixed.dtype), gate.reshape(-1, layer.head_v_dim))
    return out(normed.view(1, -1, layer.value_dim))


def _projected(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[1, N, C] of the convolution, the gate, [1, N, H] that give beta, and the decay's steps."""
    if hasattr(layer, "in_proj_qkvz"):
        together = layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
        *mixed, gate, beta, step = layer.fix_query_key_value_ordering(*together)
        return torch.cat([x.flatten(2) for x in mixed], dim=2), gate, beta, step
    if hasattr(layer, "in_proj_qkv"):
        own = (layer.in_proj_qkv,)
        others = (layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
    else:
        own = (layer.q_proj, layer.k_proj, layer.v_proj)
        others = (layer.g_proj, layer.b_proj, layer.a_proj)
    mixed = torch.cat([part(hidden_states) for part in own], dim=2)
    gate, beta, step = (part(hidden_states) for part in others)
    return mixed, gate, beta, step


def _taps(layer: Any) -> Tensor:
    """[C, W] of the convolution; Olmo Hybrid has one each of queries, keys and values."""
    if hasattr(layer, "conv1d"):
        return layer.conv1d.weight[:, 0]
    return torch.cat(
        [conv.weight[:, 0] for conv in (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)]
    )


def _unit_heads(vectors: Tensor, layer: Any) -> Tensor:
    """[N, H, K] of length 1 of [N, J K]: G value heads share a key head."""
    heads = vectors.unflatten(1, (layer.num_k_heads, layer.head_k_dim))
    heads = heads * (heads.square().sum(2, keepdim=True) + _NORM_EPSILON).rsqrt()
    return heads.repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=1)
