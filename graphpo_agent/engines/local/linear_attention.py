"""Linear attention layers over a flat row: those of Qwen3-Next and Qwen3.5, gated delta nets.

Such a layer has no keys and values to be attended to. It mixes a token with the few before it in a
short convolution, and reads from a state that its path has written (``delta_rule.py``). Neither
goes through transformers' attention interface, and the functions behind it differ from version to
version; so the layer's arithmetic stands here, on its own weights, which keep their names. What
comes before a token on its path is the ``Recurrence``'s affair.

Shapes: N tokens of a row, d hidden size, C channels of the convolution, W tokens that it spans,
H value heads, J key heads (H = G J), K key dimension, V value dimension.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from graphpo_agent.engines.local.handed_on import handed_on

__all__ = [
    "Recurrence",
    "conv_width",
    "num_linear_layers",
    "over_recurrence",
    "state_bytes",
]

_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_NORM_EPSILON = 1e-6
"""Of the lengths that queries and keys are divided by; no config names it."""


class Recurrence(Protocol):
    """Knows what comes before the tokens of a pass in every linear layer; layers come in turn."""

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Each token's inputs and those of the W - 1 before it on its path, weighted and added.

        Args:
            inputs: [N, C].
            weight: [C, W], the token's own last.

        Returns:
            [N, C].
        """
        ...

    def recall(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
    ) -> Tensor:
        """[N, H, V] what the tokens read from the states that their paths have written.

        Args:
            query: [N, H, K].
            key: [N, H, K].
            value: [N, H, V].
            log_decay: [N, H].
            beta: [N, H].
        """
        ...


def _linear_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's linear attention layers, in their order; none of a model without."""
    names = ("in_proj_qkv", "in_proj_qkvz")
    return [module for module in model.modules() if any(hasattr(module, name) for name in names)]


def conv_width(config: PretrainedConfig) -> int:
    """W of the gated delta nets of a model; 0 where it is of no family that has them."""
    return config.linear_conv_kernel_dim if config.model_type in _FAMILIES else 0


def num_linear_layers(config: PretrainedConfig) -> int:
    """Linear attention layers of a model."""
    kinds = config.to_dict().get("layer_types") or ()
    return sum(kind == "linear_attention" for kind in kinds)


def state_bytes(config: PretrainedConfig, itemsize: int) -> int:
    """What the linear layers keep of one path, whose products have ``itemsize`` bytes."""
    if not num_linear_layers(config):
        return 0
    keys, heads = config.linear_key_head_dim, config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    inputs = 2 * config.linear_num_key_heads * keys + values
    precise = max(itemsize, torch.float32.itemsize)
    layer = (conv_width(config) - 1) * inputs * itemsize + keys * values * precise
    return num_linear_layers(config) * layer


@contextmanager
def over_recurrence(model: PreTrainedModel) -> Iterator[None]:
    """Inside the ``with`` block linear layers compute a flat row behind its ``Recurrence``.

    It reaches them as the keyword argument ``recurrence`` of the model's call.
    """
    layers = _linear_layers(model)
    for layer in layers:
        layer.forward = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@torch.compiler.disable
def _forward(
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
