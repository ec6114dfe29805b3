"""Layers of experts in bfloat16: torch's autocast does not know their grouped products."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["has_experts", "rounded_experts"]


def has_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of many experts, multiplied by in one product."""
    return "is_concatenated" in vars(module)  # transformers' use_experts_implementation sets it


class _Rounded:
    """What such a layer's forward pass reads of it, weights in bfloat16."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layer, name)
        is_weight = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.to(torch.bfloat16) if is_weight else value


@contextmanager
def rounded_experts(model: nn.Module) -> Iterator[None]:
    """Inside the ``with`` block float32 weights of experts are rounded to bfloat16 in every pass.

    Those of linear layers are, by autocast. Gradients go to the float32 weights.
    """
    layers = [module for module in model.modules() if has_experts(module)]
    for layer in layers:
        layer.forward = partial(type(layer).forward, _Rounded(layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
