"""Log-probabilities and entropies from logits, with one buffer kept for the gradient.

Shapes: M trained tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["token_scores"]


def token_scores(
    logits: Tensor, targets: Tensor, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Score one target per row of logits.

    Of the logits' size only the probabilities are kept for the backward pass, which turns them
    into the gradient in place; a second backward pass through the same graph raises.

    Args:
        logits: [M, V], in float32 or more.
        targets: [M] token ids.
        entropy_gradient: whether the entropies carry a gradient; the logits are kept as well.

    Returns:
        [M] log-probabilities of the targets and [M] entropies in nats.
    """
    return _TokenScores.apply(logits, targets, entropy_gradient)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        probs = logits.softmax(-1)
        log_total = logits.amax(-1) - probs.amax(-1).log()
        entropies = log_total - torch.bmm(probs[:, None], logits[:, :, None])[:, 0, 0]
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
