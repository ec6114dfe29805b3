"""Training on plain rows: the two layouts that the packed one is measured against.

A fair and good implementation: a stock transformers forward with its fast causal attention, rows
sorted by length and batched by tokens, padded on the right so that no mask is needed, a row's last
token left out because it predicts nothing, and only the trained positions sent to the output head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from graphpo_agent.engines.local.forward import max_logits
from graphpo_agent.engines.local.head import OutputHead
from graphpo_agent.engines.local.loss import Objective, clipped_objective
from graphpo_agent.engines.local.token_scores import token_scores
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["Row", "TokenData", "edge_rows", "path_rows", "train_on_rows"]


@dataclass(frozen=True, slots=True)
class TokenData:
    """Of the N tokens of all samples, joined: ids, [N] loss weights and advantages, old logprobs.

    The advantages have one term, as in the joint objective.
    """

    token_ids: IntArray
    weights: FloatArray
    advantages: FloatArray
    old_logprobs: FloatArray


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to compute.

    Example: prompt ``[5, 6]`` (tokens 0 and 1 of all) and the edge ``[8, 9]`` (tokens 3 and 4)::

        source = [0, 1, 3, 4]
        trained = [False, False, True, True]
        prompt = 2

    Attributes:
        source: [length] its tokens among those of all samples.
        trained: [length] which of them carry loss in this row.
        prompt: tokens of the prompt.
    """

    source: IntArray
    trained: BoolArray
    prompt: int


def path_rows(samples: Sequence[TrainingSample]) -> list[Row]:
    """Every root-to-leaf path; an edge is trained in the first row that runs through it."""
    rows = []
    for sample, start in zip(samples, _starts(samples), strict=True):
        followed = np.bincount(sample.parent[1:], minlength=len(sample.parent)) > 0
        owned = np.zeros(len(sample.parent), np.bool_)
        for leaf in np.flatnonzero(~followed).tolist():
            path = _path(sample, leaf)
            rows.append(_row(sample, start, path, [v for v in path if not owned[v]]))
            owned[path] = True
    return rows


def edge_rows(samples: Sequence[TrainingSample]) -> list[Row]:
    """Every edge behind all its ancestors, which are context only."""
    return [
        _row(sample, start, _path(sample, v), [v])
        for sample, start in zip(samples, _starts(samples), strict=True)
        for v in range(1, len(sample.parent))
    ]


def train_on_rows(
    model: PreTrainedModel,
    rows: Sequence[Row],
    data: TokenData,
    max_tokens: int,
    every_position: bool = False,
) -> None:
    """Add the gradient of the clipped objective over all rows.

    Args:
        model: with its own attention.
        rows: from ``path_rows`` or ``edge_rows``.
        data: of the same samples.
        max_tokens: padded tokens of one forward pass.
        every_position: give the output head every response token of every row, as trainers of
            plain rows do, and mask the loss afterwards.
    """
    for batch in _batches(rows, max_tokens):
        lengths = np.array([len(row.source) - 1 for row in batch])
        token_ids = np.zeros((len(batch), lengths.max()), np.int64)
        for line, row in zip(token_ids, batch, strict=True):
            line[: len(row.source) - 1] = data.token_ids[row.source[:-1]]
        hidden = model.base_model(
            input_ids=torch.from_numpy(token_ids).to(model.device), use_cache=False
        ).last_hidden_state
        loss = _loss(model, hidden, batch, data, every_position)
        loss.backward()


def _loss(
    model: PreTrainedModel,
    hidden: Tensor,
    rows: Sequence[Row],
    data: TokenData,
    every_position: bool,
) -> Tensor:
    picked = [
        np.arange(row.prompt, len(row.source)) if every_position else np.flatnonzero(row.trained)
        for row in rows
    ]
    line = np.repeat(np.arange(len(rows)), [len(p) for p in picked])
    places = line * hidden.shape[1] + np.concatenate(picked) - 1
    predictors = torch.from_numpy(places).to(hidden.device)
    source = np.concatenate([row.source[p] for row, p in zip(rows, picked, strict=True)])
    counted = np.concatenate([row.trained[p] for row, p in zip(rows, picked, strict=True)])
    head = cast(nn.Linear, model.get_output_embeddings())
    targets = torch.from_numpy(data.token_ids[source]).to(hidden.device)
    logprobs = _logprobs(head, hidden.flatten(0, 1).index_select(0, predictors), targets)
    old, advantages, weights = (
        torch.from_numpy(np.ascontiguousarray(values)).to(hidden.device, torch.float32)
        for values in (
            data.old_logprobs[source],
            np.where(counted, data.advantages[source], 0.0),
            data.weights[source] * counted,
        )
    )
    entropies = torch.zeros((), device=hidden.device)
    tokens = clipped_objective(logprobs, old, advantages[None], entropies, None, Objective())
    return (weights * tokens.loss).sum()


def _logprobs(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """On a CPU torch's own log-softmax; on a GPU blocks, as this project does it: the same head."""
    if hidden.device.type == "cpu":
        return head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    rows = max_logits(hidden.device.type) // head.weight.shape[0]

    def score(hidden: Tensor, targets: Tensor) -> Tensor:
        return token_scores(OutputHead(head), hidden, targets)[0]

    parts = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([cast(Tensor, checkpoint(score, *p, use_reentrant=False)) for p in parts])


def _batches(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows of similar length together, longest first."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.source)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].source) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _starts(samples: Sequence[TrainingSample]) -> IntArray:
    return np.cumsum([0, *(len(sample.token_ids) for sample in samples)])[:-1]


def _path(sample: TrainingSample, node: int) -> list[int]:
    path = [node]
    while sample.parent[path[-1]] >= 0:
        path.append(int(sample.parent[path[-1]]))
    return path[::-1]


def _row(sample: TrainingSample, start: int, path: list[int], owned: list[int]) -> Row:
    spans = [np.arange(sample.offsets[v], sample.offsets[v + 1]) for v in path]
    tokens = np.concatenate(spans)
    owner = np.repeat(path, [len(span) for span in spans])
    trained = sample.loss_mask[tokens] & np.isin(owner, owned)
    return Row(tokens + start, trained, prompt=len(spans[0]))
