"""What the objective needs to know of the tokens of a minibatch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphpo_agent.engines.local.options import UpdateOptions
from graphpo_agent.engines.local.token_weights import TokenWeights, moving_tokens, token_weights
from graphpo_agent.errors import GraphError
from graphpo_agent.graph.arrays import FloatArray, IntArray
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["TokenData", "moving_sample", "recorded_logprobs", "token_data"]


@dataclass(frozen=True, slots=True)
class TokenData:
    """What the objective needs of the N tokens of some samples, in their order.

    Attributes:
        loss: their weights and advantages.
        old_logprobs: [N]; None where the policy that learns is still the one that sampled.
        reference_logprobs: [N]; None without a reference model.
        sampler_logprobs: [N] as recorded; None where a sampler's mismatch does not count.
    """

    loss: TokenWeights
    old_logprobs: FloatArray | None
    reference_logprobs: FloatArray | None
    sampler_logprobs: FloatArray | None


def token_data(
    members: IntArray,
    samples: Sequence[TrainingSample],
    old: Sequence[FloatArray] | None,
    reference: Sequence[FloatArray] | None,
    options: UpdateOptions,
) -> TokenData:
    """What the objective needs of one minibatch.

    Args:
        members: which of the samples are in it.
        samples: of the whole update.
        old: per sample [tokens] log-probabilities; None as in ``TokenData``.
        reference: likewise.
        options: how token losses become one number.

    Raises:
        GraphError: as ``recorded_logprobs``, where a sampler's mismatch counts.
    """
    counted = [samples[i] for i in members]
    return TokenData(
        token_weights(counted, options.loss_aggregation, options.horizon),
        None if old is None else np.concatenate([old[i] for i in members]),
        None if reference is None else np.concatenate([reference[i] for i in members]),
        None if options.mismatch_cap is None else np.concatenate(recorded_logprobs(counted)),
    )


def recorded_logprobs(samples: Sequence[TrainingSample]) -> list[FloatArray]:
    """Per sample [tokens] what the sampler recorded.

    Raises:
        GraphError: it recorded none.
    """
    for sample in samples:
        if np.isnan(sample.logprobs[sample.loss_mask]).any():
            raise GraphError(
                f"graph {sample.graph_id}: trained tokens without recorded logprobs; "
                "set old_logprobs to recompute, and no mismatch_cap"
            )
    return [sample.logprobs.astype(np.float64) for sample in samples]


def moving_sample(sample: TrainingSample) -> TrainingSample:
    """A sample whose tokens without an advantage are context."""
    return replace(sample, loss_mask=moving_tokens(sample))
