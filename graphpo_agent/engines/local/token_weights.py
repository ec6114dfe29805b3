"""What each token weighs in the loss, and with which advantage (Algorithm 1, stage 4).

Shapes: N tokens of all samples of a minibatch, n nodes of one sample, R of its rows, A terms.

Where whole trajectories are trained, a shared token belongs to several rows with advantages of
their own. The clipped objective is linear in an advantage as long as its sign stays, so such a
token has two terms, the mean of the positive and the mean of the negative advantages: the flat
layout computes it once, and loss and gradient are those of one row per trajectory, at any ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from graphpo_agent.graph.arrays import BoolArray, FloatArray
from graphpo_agent.graph.samples import TrainingSample, row_paths

__all__ = [
    "LossAggregation",
    "SampleWeights",
    "TokenWeights",
    "moving_tokens",
    "sample_weights",
    "token_weights",
]

LossAggregation = Literal["edge_mean", "token_mean", "sequence_mean", "sequence_sum"]
"""How token losses become one number. A *sequence* is what is trained as one row: an edge, or a
trajectory where trajectories are trained.

* ``edge_mean``: the mean over graphs of the mean over edges of the mean over tokens, the paper's.
* ``token_mean``: over all tokens (DAPO; verl's ``token-mean``).
* ``sequence_mean``: over sequences of the mean over tokens (DeepSeek's GRPO, TreeRL).
* ``sequence_sum``: over sequences of the sum over tokens, divided by ``horizon`` (Dr. GRPO).
"""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """What the objective needs of the N tokens of a minibatch.

    Attributes:
        weights: [N], 0 where not trained; they sum to 1, but for ``sequence_sum``.
        advantages: [A, N], NaN on prompts.
    """

    weights: FloatArray
    advantages: FloatArray


def token_weights(
    samples: Sequence[TrainingSample], aggregation: LossAggregation, horizon: int = 1
) -> TokenWeights:
    """Weights and advantages of the tokens of a minibatch.

    An edge counts if it has a trained token, whatever its advantage, and so does a graph.

    Example: one graph, a prompt of two tokens, edges of one and of two trained tokens:
    ``edge_mean`` ``[0, 0, 1/2, 1/4, 1/4]``, ``token_mean`` ``[0, 0, 1/3, 1/3, 1/3]``.

    Args:
        samples: of the minibatch.
        aggregation: how token losses become one number.
        horizon: what ``sequence_sum`` divides by.
    """
    parts = [sample_weights(sample, aggregation, horizon) for sample in samples]
    total = sum(part.total for part in parts)
    terms = max((len(part.advantages) for part in parts), default=1)
    weights, advantages = [np.zeros(0)], [np.zeros((terms, 0))]
    for sample, part in zip(samples, parts, strict=True):
        lengths = np.diff(sample.offsets)
        weights.append(np.repeat(part.weights, lengths) * sample.loss_mask)
        missing = np.zeros((terms - len(part.advantages), len(part.weights)))
        filled = np.concatenate([part.advantages, missing])
        advantages.append(np.repeat(filled, lengths, axis=1))
    return TokenWeights(
        np.concatenate(weights) / max(total, 1.0), np.concatenate(advantages, axis=1)
    )


def moving_tokens(sample: TrainingSample) -> BoolArray:
    """[num_tokens] which trained tokens can move the weights: those with an advantage.

    The clipped objective of a token whose advantage is 0 is 0 at every ratio, and so is its
    gradient. Such a token counts in the means and need not be computed, unless the objective has
    terms of its own (a divergence, entropy).
    """
    advantages = sample_weights(sample, "edge_mean", 1).advantages
    moves = (np.nan_to_num(advantages) != 0.0).any(axis=0)
    moving: BoolArray = sample.loss_mask & np.repeat(moves, np.diff(sample.offsets))
    return moving


@dataclass(frozen=True, slots=True)
class SampleWeights:
    """What the objective needs of the nodes of one sample.

    Attributes:
        weights: [n] of a trained token before division by the minibatch's total; where several
            rows run through a node the sum of theirs.
        total: what the sample adds to the divisor: 1 for ``edge_mean``, its trained tokens for
            ``token_mean``, its sequences with a trained token for ``sequence_mean`` and
            ``sequence_sum``; 0 without a trained token.
        advantages: [A, n].
    """

    weights: FloatArray
    total: float
    advantages: FloatArray


def sample_weights(
    sample: TrainingSample, aggregation: LossAggregation, horizon: int
) -> SampleWeights:
    """Weights and advantages of one sample; the arguments are those of ``token_weights``."""
    node = np.repeat(np.arange(len(sample.parent)), np.diff(sample.offsets))
    tokens = np.bincount(node[sample.loss_mask], minlength=len(sample.parent)).astype(np.float64)
    if sample.rows is None:
        trained = (tokens > 0).astype(np.float64)
        per_token = trained / np.maximum(tokens, 1.0)
        count = float(trained.sum())
        weights, total = {
            "edge_mean": (per_token / max(count, 1.0), float(count > 0)),
            "token_mean": (trained, float(tokens.sum())),
            "sequence_mean": (per_token, count),
            "sequence_sum": (trained / horizon, count),
        }[aggregation]
        return SampleWeights(weights, total, sample.advantages)
    through = (row_paths(sample.parent, sample.rows) & (tokens > 0)).astype(np.float64)
    lengths = through @ tokens
    copies = through.sum(axis=0)
    count = float((lengths > 0).sum())
    shares = np.ones(len(through))
    if aggregation == "sequence_mean":
        shares = 1.0 / np.maximum(lengths, 1.0)
    weights, total = {
        "edge_mean": (
            copies / (np.maximum(tokens, 1.0) * max(copies.sum(), 1.0)),
            float(count > 0),
        ),
        "token_mean": (copies, float(lengths.sum())),
        "sequence_mean": (shares @ through, count),
        "sequence_sum": (copies / horizon, count),
    }[aggregation]
    if sample.row_advantages is None:
        return SampleWeights(weights, total, sample.advantages)
    scale = np.maximum(shares @ through, 1e-300)
    signed = np.stack([sample.row_advantages.clip(min=0), sample.row_advantages.clip(max=0)])
    terms = (signed * shares) @ through / scale
    if (copies <= 1).all():  # nothing is shared: one term says it all
        terms = terms.sum(axis=0, keepdims=True)
    terms[:, 0] = np.nan
    return SampleWeights(weights, total, terms)
