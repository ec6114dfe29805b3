"""Logits from last hidden states.

Shapes: M hidden states, d hidden size, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

__all__ = ["aligned_logits", "sampling_logits"]

_ALIGNED = 16
"""Numbers, 64 bytes of float32: a product whose rows start elsewhere takes up to twice as long."""


def sampling_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """[M, V] logits of [M, d] hidden states, without a gradient."""
    device_type = hidden.device.type
    if device_type != "cpu" or torch.is_autocast_enabled(device_type):
        return head(hidden)
    return aligned_logits(hidden, head.weight, head.bias)


def aligned_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[M, V] logits in float32 or more, in rows that start where a CPU's products are fast.

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
