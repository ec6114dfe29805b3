"""The clipped objective (Algorithm 1, stage 4; equation of section 3.5).

Shapes: N tokens of all samples of a batch, M trained tokens of a flat row, A advantage terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpo_agent.graph.samples import TrainingSample

__all__ = [
    "LossAggregation",
    "Objective",
    "TokenLoss",
    "clipped_objective",
    "loss_weights",
    "reverse_kl",
    "token_advantages",
]

LossAggregation = Literal["edge_mean", "token_mean"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The settings of the objective; the defaults are the paper's.

    Attributes:
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: and from above at 1 + clip_high.
        kl: weight β of the divergence from the reference model.
        entropy: weight c_H of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    entropy: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss of M tokens before weighting, and what is reported of them.

    Attributes:
        loss: [M] what a token adds to the loss, times its weight.
        clipped: [A, M] whether the clipped branch was taken, so that no gradient flows.
    """

    loss: Tensor
    clipped: Tensor


def loss_weights(
    samples: Sequence[TrainingSample], aggregation: LossAggregation
) -> NDArray[np.float64]:
    """[N] weight of each token; the weights of all trained tokens sum to 1.

    ``edge_mean``: 1 / (graphs · edges of the graph · trained tokens of the edge), the paper's
    mean over edges inside a mean over graphs. An edge counts if it has a trained token, whatever
    its advantage; a graph counts if it has such an edge. ``token_mean``: 1 / trained tokens.

    Example: one graph, a prompt of two tokens, edges of one and of two trained tokens:
    ``[0, 0, 1/2, 1/4, 1/4]``; with ``token_mean`` ``[0, 0, 1/3, 1/3, 1/3]``.
    """
    masks = [sample.loss_mask for sample in samples]
    if aggregation == "token_mean":
        mask = np.concatenate(masks).astype(np.float64)
        return mask / max(mask.sum(), 1.0)
    weights = [_edge_mean(sample) for sample in samples]
    graphs = sum(bool(mask.any()) for mask in masks)
    return np.concatenate(weights) / max(graphs, 1)


def token_advantages(samples: Sequence[TrainingSample]) -> NDArray[np.float64]:
    """[A, N] the advantage of each token's edge; NaN on prompts."""
    return np.concatenate(
        [np.repeat(s.advantages, np.diff(s.offsets), axis=1) for s in samples], axis=1
    )


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
    ratio = (logprobs - old_logprobs).exp()
    limited = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    gains = torch.minimum(ratio * advantages, limited * advantages)
    loss = -gains.sum(0)
    if objective.entropy:
        loss = loss - objective.entropy * entropies
    if reference_logprobs is not None:
        loss = loss + objective.kl * reverse_kl(logprobs, reference_logprobs)
    return TokenLoss(loss, limited * advantages < ratio * advantages)


def reverse_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """[M] unbiased, never negative estimate of KL(π ‖ π_ref) from samples of π (k3).

    ``r - 1 - log r`` with ``r = π_ref / π``.
    """
    log_ratio = reference_logprobs - logprobs
    return log_ratio.exp() - 1.0 - log_ratio


def _edge_mean(sample: TrainingSample) -> NDArray[np.float64]:
    """[tokens] 1 / (edges · trained tokens of the edge) on trained tokens, else 0."""
    node = np.repeat(np.arange(len(sample.parent)), np.diff(sample.offsets))
    trained = np.bincount(node[sample.loss_mask], minlength=len(sample.parent))
    edges = max(int((trained > 0).sum()), 1)
    return np.where(sample.loss_mask, 1.0 / (edges * np.maximum(trained, 1)[node]), 0.0)
