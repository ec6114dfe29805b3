"""The clipped objective (Algorithm 1, stage 4; equation of section 3.5).

Shapes: M trained tokens of a flat row, A advantage terms.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Objective", "TokenLoss", "clipped_objective", "mismatch_weights", "reverse_kl"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The settings of the objective; the defaults are the paper's.

    Attributes:
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: and from above at 1 + clip_high.
        dual_clip: where an advantage is negative, a ratio counts up to this, above 1; None: however
            large it is (Ye et al., 2020).
        kl: weight β of the divergence from the reference model.
        entropy: weight c_H of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: float = 0.0
    entropy: float = 0.0

    @property
    def moves_all(self) -> bool:
        """Whether a token without an advantage has a gradient, too."""
        return self.kl != 0.0 or self.entropy != 0.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of M tokens before weighting, and what is reported of them.

    Attributes:
        loss: [M] what a token adds to the loss, times its weight.
        clipped: [A, M] whether the clipped branch was taken, so that no gradient flows.
    """

    loss: Tensor
    clipped: Tensor


def clipped_objective(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    entropies: Tensor,
    reference_logprobs: Tensor | None,
    objective: Objective,
) -> TokenLoss:
    """The PPO-clip loss of M tokens, summed over the advantage terms.

    With one term this clips A_cor + λ A_eff together (equation of section 3.5); with two terms
    each is clipped apart (Algorithm 1, stage 4).

    Args:
        logprobs: [M] under the policy; carries the gradient.
        old_logprobs: [M] under the policy that sampled.
        advantages: [A, M].
        entropies: [M] of the policy's distributions; carries the gradient.
        reference_logprobs: [M] under the reference; None where ``objective.kl`` is 0.
        objective: the settings.
    """
    ratio = _ratio(logprobs - old_logprobs)
    limited = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    gains = torch.minimum(ratio * advantages, limited * advantages)
    clipped = limited * advantages < ratio * advantages
    if objective.dual_clip is not None:
        least = objective.dual_clip * advantages
        far = (advantages < 0) & (gains < least)
        gains, clipped = torch.where(far, least, gains), clipped | far
    loss = -gains.sum(0)
    if objective.entropy:
        loss = loss - objective.entropy * entropies
    if reference_logprobs is not None:
        loss = loss + objective.kl * reverse_kl(logprobs, reference_logprobs)
    return TokenLoss(loss, clipped)


def _ratio(log_ratio: Tensor) -> Tensor:
    """[M] finite ratios, at most 1/e of the largest number (log-ratios up to 87.7 in float32).

    Of an infinite one whose gain is clipped, the gradient would be 0 times infinity. Each ratio is
    its own derivative, so that the gradient of one that is not clipped stays as large.
    """
    most = math.log(torch.finfo(log_ratio.dtype).max) - 1.0
    return (log_ratio - (log_ratio.detach() - most).clamp(min=0.0)).exp()


def mismatch_weights(old_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """[M] weights min(π_old / π_sampler, ``cap``): truncated importance sampling (Ionides, 2008).

    A gain times its weight counts as if π_old, which the trainer computes, had drawn the token and
    not the engine that sampled, whose arithmetic is another; up to the cap, which bounds what few
    tokens add to the variance.

    Args:
        old_logprobs: [M] under π_old.
        sampler_logprobs: [M] those that were recorded.
        cap: > 0.
    """
    return (old_logprobs - sampler_logprobs).exp().clamp(max=cap)


def reverse_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[M] unbiased, never negative estimate of KL(π ‖ π_ref) from samples of π (k3).

    ``r - 1 - log r`` with ``r = π_ref / π``.
    """
    log_ratio = reference_logprobs - logprobs
    return log_ratio.exp() - 1.0 - log_ratio
