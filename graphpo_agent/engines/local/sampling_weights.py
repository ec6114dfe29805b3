"""Weights of layers as a rollout multiplies by them, copied once for all its passes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from graphpo_agent.engines.local.experts import has_experts

__all__ = ["SamplingWeights"]


class SamplingWeights:
    """Copies of the weights of all linear layers, where products with few tokens gain from them.

    Under autocast they are bfloat16, those of experts too: it would round them in every forward
    pass, which reads and writes more memory than a pass over few tokens itself. Else on a CPU they
    are transposed in memory, as its products of few rows read them. The products are the same.

    Example::

        copies = SamplingWeights(model.modules(), rounds=False)
        with copies.in_place():
            model(ids)
    """

    def __init__(self, modules: Iterable[nn.Module], rounds: bool) -> None:
        """Copy them as they are now.

        Args:
            modules: of the policy.
            rounds: whether its passes run under autocast in bfloat16.
        """
        places = [
            (module, name, own)
            for module in modules
            if isinstance(module, nn.Linear) or (rounds and has_experts(module))
            for name, own in module.named_parameters(recurse=False)
        ]
        copies = [_rounded(own) if rounds else _transposed(own) for _, _, own in places]
        self._places = [
            (*place, nn.Parameter(copy, requires_grad=False))
            for place, copy in zip(places, copies, strict=True)
            if copy is not None
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The layers hold the copies inside the ``with`` block."""
        for module, name, _, copy in self._places:
            setattr(module, name, copy)
        try:
            yield
        finally:
            for module, name, own, _ in self._places:
                setattr(module, name, own)


def _rounded(own: Tensor) -> Tensor | None:
    return own.detach().to(torch.bfloat16) if own.dtype == torch.float32 else None


def _transposed(own: Tensor) -> Tensor | None:
    """The same matrix with its columns one after another; lower precisions gain nothing."""
    if own.device.type != "cpu" or own.ndim < 2 or own.itemsize < torch.float32.itemsize:
        return None
    return own.detach().T.contiguous().T
