"""Logits from last hidden states.

Shapes: M hidden states, d hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from graphpo_agent.errors import ModelError

__all__ = ["OutputHead", "aligned_logits", "output_head", "sampling_logits"]

_FORM = ("logit_scale", "lm_head_multiplier", "logits_scaling", "final_logit_softcapping")
"""As configurations have it: those of Cohere, Falcon-H1, Granite, and of Gemma and nanochat."""
_ALIGNED = 16
"""Numbers, 64 bytes of float32: a product whose rows start elsewhere takes up to twice as long."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """The layer that turns last hidden states into numbers, and what makes logits of these.

    Example: those of Gemma 2 are ``30 * tanh(numbers / 30)``: its ``cap`` is 30.

    Attributes:
        layer: the model's.
        scale: factor on the numbers.
        cap: what no logit goes beyond, either way; None: there is no such bound.
    """

    layer: nn.Linear
    scale: float = 1.0
    cap: float | None = None

    @property
    def weight(self) -> Tensor:
        """[V, d]."""
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        """[V] where there is one."""
        return self.layer.bias

    def logits(self, numbers: Tensor, out: Tensor | None = None) -> Tensor:
        """[M, V] of what the layer gives; where ``out`` is that again, in its place."""
        logits = numbers
        if self.scale != 1.0:
            logits = torch.mul(logits, self.scale, out=out)
        if self.cap is not None:
            logits = torch.tanh(torch.div(logits, self.cap, out=out), out=out)
            logits = torch.mul(logits, self.cap, out=out)
        return logits


def output_head(model: PreTrainedModel) -> OutputHead:
    """A model's head, with the factor and the bound that its configuration names.

    Raises:
        ModelError: the model has none.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise ModelError(f"model {model.name_or_path}: no output head; it is not a causal LM")
    config = model.config.get_text_config()
    factor, other, divisor, cap = (getattr(config, name, None) for name in _FORM)
    return OutputHead(layer, (factor or other or 1.0) / (divisor or 1.0), cap)


def sampling_logits(head: OutputHead, hidden: Tensor) -> Tensor:
    """[M, V] logits of [M, d] hidden states, without a gradient."""
    device_type = hidden.device.type
    if device_type != "cpu" or torch.is_autocast_enabled(device_type):
        return head.logits(head.layer(hidden))
    numbers = aligned_logits(hidden, head.weight, head.bias)
    return head.logits(numbers, out=numbers)


def aligned_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[M, V] products in float32 or more, in rows that start where a CPU's products are fast.

    No gradient passes.

    Args:
        hidden: [M, d], of any floating type.
        weight: [V, d], of the same.
        bias: [V], of the same.
    """
    num_rows, vocabulary = len(hidden), len(weight)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    stride = -(-vocabulary // _ALIGNED) * _ALIGNED
    out = torch.empty((num_rows, stride), dtype=dtype, device=hidden.device)[:, :vocabulary]
    if dtype != hidden.dtype:
        return out.copy_(linear(hidden, weight, bias))
    if bias is None:
        return torch.mm(hidden, weight.T, out=out)
    return torch.addmm(bias, hidden, weight.T, out=out)
