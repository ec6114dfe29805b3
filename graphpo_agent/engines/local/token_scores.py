"""Log-probabilities and entropies from last hidden states, with one buffer kept for the gradient.

On a CPU that is the probabilities, which take the place of the logits and which the backward pass
turns into the gradient in place. On a GPU it is what the head's layer gives, in the precision it
comes in: fused kernels read that once or twice and keep everything between in registers.

Shapes: M trained tokens, d hidden size, V vocabulary.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from graphpo_agent.engines.local.head import OutputHead, aligned_logits
from graphpo_agent.errors import first_line

__all__ = ["logit_scores", "token_scores"]

_AT_ONCE = 2**18
"""Logits scored in one go on a CPU; they stay in its caches."""


def token_scores(
    head: OutputHead,
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score one target per hidden state, in float32 or more.

    On a CPU a second backward pass through the same graph raises.

    Args:
        head: turns hidden states into logits; under autocast in the lower precision.
        hidden: [M, d], of any floating type.
        targets: [M] token ids.
        temperature: divides the logits; > 0.
        entropy_gradient: whether the entropies carry a gradient; on a CPU the logits are then kept
            as well, as they are where the head bounds them.

    Returns:
        [M] log-probabilities of the targets and [M] entropies in nats.
    """
    device_type = hidden.device.type
    if device_type != "cpu":
        numbers = head.layer(hidden)
        with torch.autocast(device_type, enabled=False):
            form = head.scale, head.cap, temperature
            return _FusedScores.apply(numbers, targets, form, entropy_gradient)
    weight, bias = head.weight, head.bias
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device_type, enabled=False):
        return _Scores.apply(hidden, weight, bias, targets, head, temperature, entropy_gradient)


def logit_scores(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """As ``token_scores``, of logits that are made already.

    Args:
        logits: [M, V], of any floating type.
        targets: [M] token ids.
        temperature: divides the logits; > 0.
        entropy_gradient: whether the entropies carry a gradient.
    """
    with torch.autocast(logits.device.type, enabled=False):
        if logits.device.type != "cpu":
            return _FusedScores.apply(logits, targets, (1.0, None, temperature), entropy_gradient)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        logprobs = precise.log_softmax(-1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        return logprobs.gather(1, targets[:, None])[:, 0], entropies


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: OutputHead,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        numbers = aligned_logits(hidden, weight, bias)
        logits = head.logits(numbers, out=numbers)
        if temperature != 1.0:
            logits /= temperature
        chosen = logits.gather(1, targets[:, None])[:, 0]
        keeps_logits = entropy_gradient or head.cap is not None
        probs = torch.empty_like(logits) if keeps_logits else logits
        num_rows = max(1, _AT_ONCE // logits.shape[1])
        part = torch.empty_like(logits[:num_rows])
        # Small results that are kept would keep the large ones beside them from being used again.
        log_total, mean = logits.new_empty((2, len(logits)))
        parts = (each.split(num_rows) for each in (logits, probs, log_total, mean))
        for own, own_probs, own_total, own_mean in zip(*parts, strict=True):
            normed = torch.softmax(own, -1, out=part[: len(own)])
            own_total.copy_(own.amax(-1) - normed.amax(-1).log())
            own_mean.copy_(torch.linalg.vecdot(normed, own))
            own_probs.copy_(normed)
        entropies = log_total - mean
        rest = (log_total, entropies) if entropy_gradient else ()
        ctx.save_for_backward(
            hidden, weight, targets, probs, logits if keeps_logits else None, *rest
        )
        ctx.head, ctx.temperature = head, temperature
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return chosen - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # d log p_t / d x = onehot(t) - p;  d H / d x = -p (log p + H)
        # d c tanh(u / c) / d u = 1 - tanh(u / c)^2, by which each of them is multiplied
        logprob_gradients, entropy_gradients = grad_outputs
        hidden, weight, targets, probs, logits, *rest = ctx.saved_tensors
        slope = ctx.head.scale / ctx.temperature
        logprob_gradients = logprob_gradients * slope
        of_targets, factors = logprob_gradients, -logprob_gradients[:, None]
        if ctx.head.cap is not None:
            to_tanh, places = ctx.temperature / ctx.head.cap, targets[:, None]
            num_rows = max(1, _AT_ONCE // logits.shape[1])
            for own, own_probs in zip(logits.split(num_rows), probs.split(num_rows), strict=True):
                own_probs.mul_(1.0 - (own * to_tanh).square_())
            of_targets = of_targets * (1.0 - (logits.gather(1, places)[:, 0] * to_tanh) ** 2)
        if rest:
            log_total, entropies = rest
            surplus = logits.sub_((log_total - entropies)[:, None])  # log p + H, in their place
            factors = surplus.mul_(-(entropy_gradients * slope)[:, None]).add_(factors)
        gradients = probs.mul_(factors)
        gradients[torch.arange(len(targets)), targets] += of_targets
        gradients = gradients.to(hidden.dtype)
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        return (
            gradients @ weight if needs_hidden else None,
            gradients.T @ hidden if needs_weight else None,
            gradients.sum(0) if needs_bias else None,
            *(None, None, None, None),
        )


class _FusedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        numbers: Tensor,
        targets: Tensor,
        form: tuple[float, float | None, float],
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, log_totals = _scores(numbers, targets, *form)
        ctx.save_for_backward(numbers, targets, log_totals, entropies)
        ctx.form = form
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _gradients(*ctx.saved_tensors, *grad_outputs, *ctx.form)
        return gradients, None, None, None


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
def _scores(
    numbers: Tensor, targets: Tensor, scale: float, cap: float | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """[M] log-probabilities, entropies and logarithms of the normalising sums."""
    x = numbers.to(torch.promote_types(numbers.dtype, torch.float32)) * scale
    x = x if cap is None else (x / cap).tanh() * cap
    x = x / temperature
    largest = x.amax(-1)
    weights = (x - largest[:, None]).exp()
    total = weights.sum(-1)
    log_totals = largest + total.log()
    entropies = log_totals - (weights * x).sum(-1) / total
    return x.gather(1, targets[:, None])[:, 0] - log_totals, entropies, log_totals


@_Fused
def _gradients(
    numbers: Tensor,
    targets: Tensor,
    log_totals: Tensor,
    entropies: Tensor,
    logprob_gradients: Tensor,
    entropy_gradients: Tensor,
    scale: float,
    cap: float | None,
    temperature: float,
) -> Tensor:
    """[M, V] the gradient of what the head's layer gives, in its type."""
    x, slope = numbers.to(log_totals.dtype) * scale, scale / temperature
    if cap is not None:
        bounded = (x / cap).tanh()
        x, slope = bounded * cap, slope * (1.0 - bounded * bounded)
    logprobs = x / temperature - log_totals[:, None]
    is_target = torch.arange(x.shape[1], device=x.device) == targets[:, None]
    factors = logprob_gradients[:, None] + entropy_gradients[:, None] * (
        logprobs + entropies[:, None]
    )
    gradients = torch.where(is_target, logprob_gradients[:, None], 0.0) - logprobs.exp() * factors
    return (gradients * slope).to(numbers.dtype)
