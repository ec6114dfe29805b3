"""Log-probabilities and entropies from logits, with one buffer kept for the gradient.

On a CPU that is the probabilities, which the backward pass turns into the gradient in place. On a
GPU it is the logits, in the precision they come in: fused kernels read them once or twice and keep
everything between in registers.

Shapes: M trained tokens, V vocabulary.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from graphpo_agent.errors import first_line

__all__ = ["token_scores"]

_AT_ONCE = 2**18
"""Logits scored in one go on a CPU; they stay in its caches."""


def token_scores(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Score one target per row of logits, in float32 or more.

    A second backward pass through the same graph raises.

    Args:
        logits: [M, V], of any floating type.
        targets: [M] token ids.
        temperature: divides the logits; > 0.
        entropy_gradient: whether the entropies carry a gradient; on a CPU the logits are then kept
            as well.

    Returns:
        [M] log-probabilities of the targets and [M] entropies in nats.
    """
    if logits.device.type != "cpu":
        return _FusedScores.apply(logits, targets, temperature, entropy_gradient)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = logits if temperature == 1.0 else logits / temperature
    return _Scores.apply(scaled, targets, entropy_gradient)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        probs = torch.empty_like(logits)
        num_rows = max(1, _AT_ONCE // logits.shape[1])
        log_totals, means = [], []
        for own, own_probs in zip(logits.split(num_rows), probs.split(num_rows), strict=True):
            torch.softmax(own, -1, out=own_probs)
            log_totals.append(own.amax(-1) - own_probs.amax(-1).log())
            means.append(torch.linalg.vecdot(own_probs, own))
        log_total = torch.cat(log_totals)
        entropies = log_total - torch.cat(means)
        ctx.save_for_backward(
            probs, targets, *((logits, log_total, entropies) if entropy_gradient else ())
        )
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logits.gather(1, targets[:, None])[:, 0] - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        # d log p_t / d x = onehot(t) - p;  d H / d x = -p (log p + H)
        logprob_gradients, entropy_gradients = grad_outputs
        probs, targets, *rest = ctx.saved_tensors
        factors = -logprob_gradients[:, None]
        if rest:
            logits, log_total, entropies = rest
            factors = factors - entropy_gradients[:, None] * (
                logits - (log_total - entropies)[:, None]
            )
        gradients = probs.mul_(factors)
        gradients[torch.arange(len(targets), device=targets.device), targets] += logprob_gradients
        return gradients, None, None


class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, log_totals = _scores(logits, targets, temperature)
        ctx.save_for_backward(logits, targets, log_totals, entropies)
        ctx.temperature = temperature
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        return _gradients(*ctx.saved_tensors, *grad_outputs, ctx.temperature), None, None, None


class _Fused:
    """A function of tensors, compiled at its first call; as it is where nothing can compile it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = function
        self._call = torch.compile(function, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        try:
            return self._call(*args)
        except TorchDynamoException as error:
            warnings.warn(
                "the scores of tokens are computed without fused kernels: " + first_line(error),
                stacklevel=2,
            )
            self._call = self._plain
            return self._plain(*args)


@_Fused
def _scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[M] log-probabilities, entropies and logarithms of the normalising sums."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    largest = x.amax(-1)
    weights = (x - largest[:, None]).exp()
    total = weights.sum(-1)
    log_totals = largest + total.log()
    entropies = log_totals - (weights * x).sum(-1) / total
    return x.gather(1, targets[:, None])[:, 0] - log_totals, entropies, log_totals


@_Fused
def _gradients(
    logits: Tensor,
    targets: Tensor,
    log_totals: Tensor,
    entropies: Tensor,
    logprob_gradients: Tensor,
    entropy_gradients: Tensor,
    temperature: float,
) -> Tensor:
    """[M, V] the gradient of the logits, in their type."""
    x = logits.to(log_totals.dtype) / temperature
    logprobs = x - log_totals[:, None]
    is_target = torch.arange(x.shape[1], device=x.device) == targets[:, None]
    factors = logprob_gradients[:, None] + entropy_gradients[:, None] * (
        logprobs + entropies[:, None]
    )
    gradients = torch.where(is_target, logprob_gradients[:, None], 0.0) - logprobs.exp() * factors
    return (gradients / temperature).to(logits.dtype)
