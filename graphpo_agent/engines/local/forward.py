"""Log-probabilities and entropies of the trained tokens of a flat row.

Shapes: N tokens of the row, M trained tokens, d hidden size, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from graphpo_agent.engines.local.attention import FlatLayout, attention
from graphpo_agent.engines.local.model import output_head
from graphpo_agent.engines.local.packing import Bucket, PackedBatch, pack
from graphpo_agent.errors import ModelError
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["TokenScores", "check_flat_layout", "score_tokens"]

_MAX_LOGITS = 2**24
"""Logits held at once; a longer row is done in blocks whose logits are computed twice."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the policy says of M trained tokens.

    Attributes:
        logprobs: [M] log-probability of each token at the sampling temperature.
        entropies: [M] entropy of the distribution it was drawn from, in nats.
    """

    logprobs: Tensor
    entropies: Tensor


def score_tokens(
    model: PreTrainedModel,
    batch: PackedBatch,
    temperature: float,
    entropy_gradient: bool = False,
    max_logits: int = _MAX_LOGITS,
) -> TokenScores:
    """Run the model over a flat row; call inside ``attention(model, "graphpo_flat")``.

    Only hidden states that predict a trained token reach the output head.

    Args:
        model: the policy or the reference.
        batch: the row.
        temperature: divides the logits, as in sampling; > 0.
        entropy_gradient: whether the entropies carry a gradient.
        max_logits: logits of more rows than that are never held together.
    """
    device = model.device
    hidden_N_d = model.base_model(
        input_ids=_tensor(batch.token_ids, device)[None],
        position_ids=_tensor(batch.position_ids, device)[None],
        attention_mask=None,
        use_cache=False,
        flat_layout=_layout(batch, model.dtype, device),
    ).last_hidden_state[0]
    hidden_M_d = hidden_N_d.index_select(0, _tensor(batch.predictors, device))
    targets_M = _tensor(batch.token_ids[batch.targets], device)
    head = output_head(model)
    block = max(1, max_logits // head.weight.shape[0])
    if len(targets_M) <= block:
        return TokenScores(*_score(head, hidden_M_d, targets_M, temperature, entropy_gradient))
    parts = [
        checkpoint(
            _score, head, hidden, targets, temperature, entropy_gradient, use_reentrant=False
        )
        for hidden, targets in zip(hidden_M_d.split(block), targets_M.split(block), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return TokenScores(torch.cat(logprobs), torch.cat(entropies))


def check_flat_layout(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` unless the flat layout gives the model's own log-probabilities.

    It does not where the attention ignores transformers' attention interface or where logits
    are more than the output head of the last hidden state (soft caps, scaled logits).
    """
    parent, offsets = np.array([-1, 0, 0]), np.array([0, 3, 5, 7])
    token_ids = np.arange(7) % output_head(model).weight.shape[0]
    mask = np.arange(7) >= 3
    nothing = np.zeros(7, np.float32)
    sample = TrainingSample("check", parent, offsets, token_ids, mask, nothing, np.zeros((1, 3)))
    with torch.no_grad():
        with attention(model, "graphpo_flat"):
            flat = score_tokens(model, pack([sample], 7)[0], temperature=1.0).logprobs
        rows = torch.from_numpy(token_ids[[[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]]).to(model.device)
        logits = model(input_ids=rows, use_cache=False).logits[:, 2:4]
    expected = logits.to(flat.dtype).log_softmax(-1).gather(2, rows[:, 3:, None]).flatten()
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    if not torch.allclose(flat, expected, rtol=0.0, atol=tolerance):
        raise ModelError(
            f"model {model.name_or_path} ({type(model).__name__}) changes its attention or its "
            "logits in a way that the flat layout cannot express; use another model family"
        )


def _score(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropies


def _layout(batch: PackedBatch, dtype: torch.dtype, device: torch.device) -> FlatLayout:
    return FlatLayout(
        tuple(_tensor(bucket.queries, device) for bucket in batch.buckets),
        tuple(_tensor(bucket.keys, device) for bucket in batch.buckets),
        tuple(_mask(bucket, dtype, device) for bucket in batch.buckets),
        _tensor(batch.order, device),
    )


def _mask(bucket: Bucket, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[E, 1, Q, T] additive: query i of a stretch sees its path up to itself."""
    before = _tensor(bucket.path_lengths - bucket.own_lengths, device)
    last_seen = before[:, None] + torch.arange(bucket.queries.shape[1], device=device)
    columns = torch.arange(bucket.keys.shape[1], device=device)
    hidden = columns > last_seen[:, None, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def _tensor(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
