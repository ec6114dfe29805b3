"""The weights of autocast's products, rounded once for a rollout instead of in every pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["RoundedWeights"]


class RoundedWeights:
    """bfloat16 copies of the float32 weights of all linear layers.

    Autocast rounds them in every forward pass, which reads and writes more memory than a pass
    over few tokens itself; the products are the same.

    Example::

        rounded = RoundedWeights(model)
        with torch.autocast("cuda", torch.bfloat16), rounded.in_place():
            model(ids)
    """

    def __init__(self, model: nn.Module) -> None:
        """Copy them as they are now."""
        self._places = [
            (module, name, own, nn.Parameter(own.detach().to(torch.bfloat16), requires_grad=False))
            for module in model.modules()
            if isinstance(module, nn.Linear)
            for name, own in module.named_parameters(recurse=False)
            if own.dtype == torch.float32
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The layers hold the copies inside the ``with`` block."""
        for module, name, _, rounded in self._places:
            setattr(module, name, rounded)
        try:
            yield
        finally:
            for module, name, own, _ in self._places:
                setattr(module, name, own)
