"""A graph as rows for a trainer that sums weighted token losses: one row per trained path.

The clipped objective is positively homogeneous in an advantage, so a token's weight can be folded
into it: the plain sum over the rows' tokens is then the loss of ``engines.local.token_weights``.
Nothing here imports verl.

Shapes: L tokens of a row, n nodes of the sample, A advantage terms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphpo_agent.engines.local.token_weights import LossAggregation, sample_weights
from graphpo_agent.graph.arrays import BoolArray, Float32Array, FloatArray, IntArray
from graphpo_agent.graph.samples import PathRow, TrainingSample, row_paths, to_path_rows

__all__ = ["WeightedRow", "WeightedRows", "moving_rows", "weighted_rows"]


@dataclass(frozen=True, slots=True)
class WeightedRow:
    """One path; an edge that another row owns is context without loss.

    Attributes:
        token_ids: [L], the prompt first.
        prompt_tokens: how many of them are the prompt.
        loss_mask: [L] bool, the trained tokens that this row owns.
        logprobs: [L] of the sampler; NaN where the policy did not sample.
        weights: [L] of a token's loss, before division by the minibatch's total; 0 without loss.
        advantages: [A, L] times the weights.
    """

    token_ids: IntArray
    prompt_tokens: int
    loss_mask: BoolArray
    logprobs: Float32Array
    weights: FloatArray
    advantages: FloatArray


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """The rows of one graph.

    A minibatch's loss is the sum over its rows' tokens, divided by the sum of its graphs'
    ``total``, but at least 1.

    Attributes:
        rows: those with a trained token.
        total: what the graph adds to the divisor (see ``SampleWeights``).
    """

    rows: list[WeightedRow]
    total: float


def weighted_rows(
    sample: TrainingSample, aggregation: LossAggregation, horizon: int
) -> WeightedRows:
    """Rows whose token losses only have to be summed.

    Example: a prompt of two tokens, edges of one and of two trained tokens behind it, both with
    advantage 1, ``edge_mean``: two rows with weights ``[0, 0, 1/2]`` and ``[0, 0, 1/4, 1/4]``.

    Args:
        sample: one graph.
        aggregation: how token losses become one number.
        horizon: what ``sequence_sum`` divides by.
    """
    whole = sample_weights(sample, aggregation, horizon)
    paths = to_path_rows(sample)
    if sample.rows is not None and aggregation == "sequence_mean":
        weights = [row.loss_mask / max(int(row.loss_mask.sum()), 1) for row in paths]
    else:
        # The same rows with the weight in the advantage's place say where each node's weight goes.
        copies = 1 if sample.rows is None else row_paths(sample.parent, sample.rows).sum(axis=0)
        per_row = whole.weights / np.maximum(copies, 1)
        weighing = replace(sample, advantages=per_row[None], row_advantages=None)
        weights = [row.advantages[0] for row in to_path_rows(weighing)]
    prompt = int(sample.offsets[1])
    return WeightedRows(
        [
            _weighted(row, prompt, weight)
            for row, weight in zip(paths, weights, strict=True)
            if row.loss_mask.any()
        ],
        whole.total,
    )


def moving_rows(rows: Sequence[WeightedRow]) -> list[WeightedRow]:
    """The rows up to their last token with an advantage; without those that have none.

    Tokens without an advantage between others are context without loss. What is left out has
    neither loss nor gradient, unless the objective has terms of its own (a divergence, entropy).
    """
    moving = [(row, (row.advantages != 0.0).any(axis=0)) for row in rows]
    return [_moving(row, moves) for row, moves in moving if moves.any()]


def _moving(row: WeightedRow, moves: BoolArray) -> WeightedRow:
    """A row whose tokens with loss are those that ``moves`` [L] says; it ends with the last one."""
    count = int(np.flatnonzero(moves)[-1]) + 1
    return WeightedRow(
        token_ids=row.token_ids[:count],
        prompt_tokens=row.prompt_tokens,
        loss_mask=moves[:count],
        logprobs=row.logprobs[:count],
        weights=np.where(moves, row.weights, 0.0)[:count],
        advantages=row.advantages[:, :count],
    )


def _weighted(row: PathRow, prompt_tokens: int, weights: FloatArray) -> WeightedRow:
    return WeightedRow(
        token_ids=row.token_ids,
        prompt_tokens=prompt_tokens,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        weights=weights,
        advantages=row.advantages * weights,
    )
