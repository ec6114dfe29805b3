"""Gated delta nets over a flat row: linear attention layers of Qwen3-Next and Qwen3.5.

Shapes: N tokens of a row, d hidden size, C channels of the convolution, H value heads, J key heads
(H = G J), K key dimension, V value dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from graphpo_agent.engines.local.handed_on import handed_on
from graphpo_agent.engines.local.recurrence import Recurrence, RecurrentSizes

__all__ = ["layers", "over_row", "sizes"]

_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_NORM_EPSILON = 1e-6
"""Of the lengths that queries and keys are divided by; no config names it."""


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The gated delta nets of a model that has some, in their order."""
    names = ("in_proj_qkv", "in_proj_qkvz")
    return [module for module in model.modules() if any(hasattr(module, name) for name in names)]


def sizes(config: PretrainedConfig) -> RecurrentSizes | None:
    """Of the gated delta nets of a model; None where it is of no family that has them."""
    if config.model_type not in _FAMILIES:
        return None
    keys, values = config.linear_key_head_dim, config.linear_value_head_dim
    heads = config.linear_num_value_heads
    channels = 2 * config.linear_num_key_heads * keys + heads * values
    return RecurrentSizes(config.linear_conv_kernel_dim, channels, heads, keys, values)


@torch.compiler.disable
def over_row(
    layer: Any, hidden_states: Tensor, recurrence: Recurrence | None = None, **_: Any
) -> Tensor:
    """[1, N, d] of [1, N, d]."""
    before = handed_on(recurrence)
    mixed, gate, beta, step = (x[0] for x in _projected(layer, hidden_states))
    mixed = ACT2FN[layer.activation](before.convolve(mixed, layer.conv1d.weight[:, 0]))
    precise = torch.promote_types(mixed.dtype, torch.float32)
    with torch.autocast(mixed.device.type, enabled=False):
        widths = [layer.key_dim, layer.key_dim, layer.value_dim]
        query, key, value = mixed.to(precise).split(widths, dim=1)
        query, key = (_unit_heads(x, layer) for x in (query, key))
        step = F.softplus(step.to(precise) + layer.dt_bias)
        read = before.recall(
            query / layer.head_k_dim**0.5,
            key,
            value.unflatten(1, (layer.num_v_heads, layer.head_v_dim)),
            -layer.A_log.to(precise).exp() * step,
            beta.to(precise).sigmoid(),
        )
    normed = layer.norm(read.flatten(0, 1).to(mixed.dtype), gate.reshape(-1, layer.head_v_dim))
    return layer.out_proj(normed.view(1, -1, layer.value_dim))


def _projected(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[1, N, C] of the convolution, the gate, [1, N, H] that give beta, and the decay's steps."""
    if hasattr(layer, "in_proj_qkv"):
        parts = (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
        mixed, gate, beta, step = (part(hidden_states) for part in parts)
        return mixed, gate, beta, step
    together = layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
    *mixed, gate, beta, step = layer.fix_query_key_value_ordering(*together)
    return torch.cat([x.flatten(2) for x in mixed], dim=2), gate, beta, step


def _unit_heads(vectors: Tensor, layer: Any) -> Tensor:
    """[N, H, K] of length 1 of [N, J K]: G value heads share a key head."""
    heads = vectors.unflatten(1, (layer.num_k_heads, layer.head_k_dim))
    heads = heads * (heads.square().sum(2, keepdim=True) + _NORM_EPSILON).rsqrt()
    return heads.repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=1)
