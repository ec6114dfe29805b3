"""Mamba-2 layers over a flat row: those of Granite 4, Nemotron-H, Bamba and Falcon-H1.

A head's state S decays, is written to and read (Mamba-2, Dao and Gu 2024, eq. 2 with a scalar A)::

    S_t = exp(A dt_t) S_{t-1} + B_t (dt_t x_t)^T        y_t = S_t^T C_t + D x_t

C are the queries, B the keys and dt x the values of a ``Recurrence``.

dt is bounded by ``time_step_limit``, as fused kernels and vLLM do it; transformers' plain layers of
Nemotron-H let it be no shorter than ``time_step_min``.

Shapes: N tokens of a row, d hidden size, C channels of the convolution, H heads, J groups
(H = G J) that share queries and keys, K state dimension, V head dimension.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from graphpo_agent.engines.local.recurrence import Recurrence, RecurrentSizes

__all__ = ["is_mixer", "over_row", "sizes", "unadapted"]


def is_mixer(module: nn.Module) -> bool:
    """Whether a part of such a model is a Mamba-2 layer."""
    return hasattr(module, "A_log")


def sizes(config: PretrainedConfig) -> RecurrentSizes | None:
    """Of the Mamba-2 layers of a model; None where it is of no family that has them."""
    c: Any = config
    if c.model_type in ("granitemoehybrid", "bamba", "falcon_h1"):
        found = c.mamba_d_conv, c.mamba_n_groups, c.mamba_n_heads, c.mamba_d_state, c.mamba_d_head
    elif c.model_type == "nemotron_h":
        found = c.conv_kernel, c.n_groups, c.mamba_num_heads, c.ssm_state_size, c.mamba_head_dim
    else:
        return None
    width, groups, heads, key_dim, value_dim = found
    channels = heads * value_dim + 2 * groups * key_dim
    return RecurrentSizes(width, channels, heads, key_dim, value_dim)


def unadapted(config: PretrainedConfig) -> list[str]:
    """Names of linear layers whose adapters fused kernels of transformers' pass over."""
    return [] if sizes(config) is None else ["out_proj"]


@torch.compiler.disable
def over_row(layer: Any, before: Recurrence, hidden_states: Tensor, **_: Any) -> Tensor:
    """[1, N, d] of [1, N, d]."""
    widths = [layer.intermediate_size, layer.conv_dim, layer.num_heads]
    gate, mixed, step = _projected(layer, hidden_states)[0].split(widths, dim=1)
    mixed = before.convolve(mixed, layer.conv1d.weight[:, 0])
    if layer.conv1d.bias is not None:
        mixed = mixed + layer.conv1d.bias
    mixed = ACT2FN[layer.activation](mixed)
    precise = torch.promote_types(mixed.dtype, torch.float32)
    with torch.autocast(mixed.device.type, enabled=False):
        keys = layer.n_groups * layer.ssm_state_size
        value, key, query = mixed.to(precise).split([layer.intermediate_size, keys, keys], dim=1)
        key, query = (_of_heads(x, layer) for x in (key, query))
        value = value.unflatten(1, (layer.num_heads, layer.head_dim))
        step = F.softplus(step.to(precise) + layer.dt_bias).clamp(*layer.time_step_limit)
        decay = -layer.A_log.to(precise).exp() * step
        read = before.recall(query, key, step[..., None] * value, decay, None)
        read = (read + layer.D.to(precise)[:, None] * value).flatten(1)
    if getattr(layer, "mamba_rms_norm", True):  # Falcon-H1 may do without
        gated = layer.norm(read[None], gate[None]).view(1, -1, layer.intermediate_size)
    else:
        gated = (read * F.silu(gate.to(precise)))[None]
    return layer.out_proj(gated.to(mixed.dtype))


def _projected(layer: Any, hidden_states: Tensor) -> Tensor:
    """[1, N, gate, convolution and steps] of [1, N, d]; Falcon-H1 has factors on both sides."""
    if not hasattr(layer, "mup_vector"):
        return layer.in_proj(hidden_states)
    projected = layer.in_proj(hidden_states * layer.ssm_in_multiplier)
    return projected * layer.mup_vector.to(projected.dtype)


def _of_heads(vectors: Tensor, layer: Any) -> Tensor:
    """[N, H, K] of [N, J K]."""
    groups = vectors.unflatten(1, (layer.n_groups, layer.ssm_state_size))
    return groups.repeat_interleave(layer.num_heads // layer.n_groups, dim=1)
