"""Gated short convolutions over a flat row: those of LFM2, dense and with experts.

What a token reads is gated by the token, and so is what the tokens before it wrote::

    y_t = C_t * sum_j w_j (B_{t-j} * x_{t-j})

(LFM2 technical report, 2025, section 2.) There is no state beside the convolution's last inputs.

Shapes: N tokens of a row, d hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from graphpo_agent.engines.local.recurrence import Recurrence, RecurrentSizes

__all__ = ["is_mixer", "over_row", "sizes"]

_FAMILIES = ("lfm2", "lfm2_moe")


def is_mixer(module: nn.Module) -> bool:
    """Whether a part of such a model is a short convolution."""
    return isinstance(getattr(module, "conv", None), nn.Conv1d)


def sizes(config: PretrainedConfig) -> RecurrentSizes | None:
    """Of the convolutions of a model; None where it is of no family that has them."""
    if config.model_type not in _FAMILIES:
        return None
    return RecurrentSizes(config.conv_L_cache, config.hidden_size, 0, 0, 0)


@torch.compiler.disable
def over_row(layer: Any, before: Recurrence, hidden_states: Tensor, **_: Any) -> Tensor:
    """[1, N, d] of [1, N, d]."""
    written, gate, own = layer.in_proj(hidden_states)[0].chunk(3, dim=1)
    mixed = before.convolve(written * own, layer.conv.weight[:, 0])
    if layer.conv.bias is not None:
        mixed = mixed + layer.conv.bias
    return layer.out_proj((gate * mixed)[None])
