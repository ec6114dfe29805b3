"""Log-probabilities and entropies of the trained tokens of a flat row.

Shapes: N tokens of the row, K targets, M trained tokens, d hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.attention import attention, eager_attention
from graphpo_agent.engines.local.experts import rounded_experts
from graphpo_agent.engines.local.flat_attention import FlatLayouts
from graphpo_agent.engines.local.flat_recurrence import recurrence_of
from graphpo_agent.engines.local.head import OutputHead, output_head
from graphpo_agent.engines.local.kernels import KERNELS
from graphpo_agent.engines.local.language_model import language_model
from graphpo_agent.engines.local.model import computable
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.packing import PackedBatch, pack
from graphpo_agent.engines.local.token_scores import token_scores
from graphpo_agent.errors import ModelError, first_line
from graphpo_agent.graph.samples import TrainingSample

__all__ = [
    "TokenScores",
    "check_flat_layout",
    "check_head",
    "check_scores",
    "flat_passes",
    "max_logits",
    "score_tokens",
]


def max_logits(device_type: str) -> int:
    """Logits held at once; a longer row is done in blocks whose logits are computed twice.

    On a CPU larger blocks leave its caches; on a GPU smaller ones leave it idle.
    """
    return 2**26 if device_type == "cpu" else 2**28


_LARGE = 100.0
"""Beyond what models bound their logits to, which hardly shows in small ones."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the policy says of M trained tokens.

    Attributes:
        logprobs: [M] log-probability of each token at the sampling temperature.
        entropies: [M] entropy of the distribution it was drawn from, in nats.
    """

    logprobs: Tensor
    entropies: Tensor


@contextmanager
def flat_passes(model: PreTrainedModel, compute: ComputeOptions) -> Iterator[None]:
    """Prepare a model for ``score_tokens`` and its backward pass inside the ``with`` block.

    Raises:
        ModelError: the model does not use transformers' attention interface, or its layers cannot
            be checkpointed or compiled.
    """
    with (
        attention(model, "graphpo_flat"),
        rounded_experts(model) if compute.autocast else nullcontext(),
        _prepared_layers(model, compute),
        sdpa_kernel(KERNELS),
    ):
        yield


def score_tokens(
    model: PreTrainedModel,
    batch: PackedBatch,
    temperature: float,
    compute: ComputeOptions,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Run the model over a flat row; call inside ``flat_passes(model, compute)``.

    Only hidden states that predict a trained token reach the output head.

    Args:
        model: the policy or the reference.
        batch: the row.
        temperature: divides the logits, as in sampling; > 0.
        compute: how.
        entropy_gradient: whether the entropies carry a gradient.

    Raises:
        ModelError: the model's layers do not tell what its configuration says of them.
    """
    device = model.device
    dtype = torch.bfloat16 if compute.autocast else model.dtype
    layouts = FlatLayouts(model.config.get_text_config(), batch, dtype, device)
    with torch.autocast(device.type, torch.bfloat16, enabled=compute.autocast):
        hidden_N_d = language_model(model)(
            input_ids=to_device(batch.token_ids, device)[None],
            position_ids=to_device(batch.position_ids, device)[None],
            attention_mask=None,
            use_cache=False,
            flat_layouts=layouts,
            recurrence=recurrence_of(model, batch, device),
        ).last_hidden_state[0]
        layouts.check()
        scores = _score_blocks(output_head(model), hidden_N_d, batch, temperature, entropy_gradient)
    target_of = to_device(batch.target_of, device)
    of_trained = (x.index_select(0, target_of) for x in (scores.logprobs, scores.entropies))
    return TokenScores(*of_trained)


def _score_blocks(
    head: OutputHead,
    hidden_N_d: Tensor,
    batch: PackedBatch,
    temperature: float,
    entropy_gradient: bool,
) -> TokenScores:
    """Scores [K] of the targets."""
    device = hidden_N_d.device
    hidden_K_d = hidden_N_d.index_select(0, to_device(batch.predictors, device))
    targets_K = to_device(batch.target_ids, device)
    block = max(1, max_logits(device.type) // head.weight.shape[0])
    score = partial(token_scores, head, temperature=temperature, entropy_gradient=entropy_gradient)
    if len(targets_K) <= block:
        return TokenScores(*score(hidden_K_d, targets_K))
    parts = [
        checkpoint(score, hidden, targets, use_reentrant=False)
        for hidden, targets in zip(hidden_K_d.split(block), targets_K.split(block), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return TokenScores(torch.cat(logprobs), torch.cat(entropies))


@contextmanager
def _prepared_layers(model: PreTrainedModel, compute: ComputeOptions) -> Iterator[None]:
    """The decoder layers are compiled or computed again inside the ``with`` block.

    All layers of a model share what is compiled once, and so does every later block. A layer is
    wrapped here and not by transformers, which computes again only in training mode, where layers
    drop numbers.
    """
    if not (compute.compile_layers or compute.checkpoint_layers):
        yield
        return
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"model {model.name_or_path} ({type(model).__name__}) does not tell its layers; set "
            "update.gradient_checkpointing and update.compile_layers to false"
        )
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        if compute.compile_layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if compute.checkpoint_layers:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
    try:
        yield
    except TorchDynamoException as error:
        raise ModelError(
            f"update.compile_layers cannot be used here ({first_line(error)}); set it to false"
        ) from None
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own


def check_flat_layout(model: PreTrainedModel, compute: ComputeOptions) -> None:
    """Raise ``ModelError`` unless the flat layout gives the model's own log-probabilities.

    It does not where the attention ignores transformers' attention interface, or where logits
    are not what ``OutputHead`` says. Nor does it where the model cannot be computed in the
    precision of its weights at all.
    """
    parent, offsets = np.array([-1, 0, 0]), np.array([0, 3, 5, 7])
    token_ids = np.arange(7) % output_head(model).weight.shape[0]
    mask = np.arange(7) >= 3
    nothing = np.zeros(7, np.float32)
    sample = TrainingSample("check", parent, offsets, token_ids, mask, nothing, np.zeros((1, 3)))
    with torch.no_grad(), computable(model):
        with flat_passes(model, compute):
            flat = score_tokens(model, pack([sample], 7)[0], 1.0, compute).logprobs
        rows = to_device(token_ids[[[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]], model.device)
        with (
            eager_attention(model),
            torch.autocast(model.device.type, torch.bfloat16, enabled=compute.autocast),
        ):
            logits = model(input_ids=rows, use_cache=False).logits
            dtype = check_head(model, lambda: model(input_ids=rows, use_cache=False).logits)
    check_scores(model, flat, rows, logits, dtype)


def check_scores(
    model: PreTrainedModel, flat: Tensor, rows: Tensor, logits: Tensor, dtype: torch.dtype
) -> None:
    """Raise ``ModelError`` where a flat row does not give what the model itself gives.

    Args:
        model: named in the message.
        flat: [B * 2] log-probabilities of the last two tokens of each row.
        rows: [B, L] token ids.
        logits: [B, L, V] of the model for these rows.
        dtype: in which its head computes them; some models cast them up.
    """
    before = logits[:, -3:-1]
    expected = before.to(flat.dtype).log_softmax(-1).gather(2, rows[:, -2:, None]).flatten()
    rounding = _rounding(dtype, float(before.abs().max()))
    if not torch.allclose(flat, expected, rtol=0.0, atol=rounding):
        raise _changed(model, "its attention or its logits")


def check_head(model: PreTrainedModel, compute: Callable[[], Tensor]) -> torch.dtype:
    """Raise ``ModelError`` unless the model makes its logits, of numbers, as its ``OutputHead``.

    Args:
        model: named in the message.
        compute: a pass of the model, which returns its logits.

    Returns:
        The type of what the head's layer gives.
    """
    head = output_head(model)
    numbers: list[Tensor] = []

    def enlarge(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        numbers.append(output * (_LARGE / output.abs().max().clamp_min(1e-6)))
        return numbers[-1]

    hook = head.layer.register_forward_hook(enlarge)
    try:
        logits = compute()
    finally:
        hook.remove()
    if not numbers:
        raise _changed(model, "its logits")
    if numbers[0].isnan().any():
        raise ModelError(
            f"model {model.name_or_path}: its logits are no numbers; give sound weights"
        )
    expected, dtype = head.logits(numbers[0]).to(logits.dtype), numbers[0].dtype
    rounding = _rounding(dtype, _LARGE * head.scale)
    if not torch.allclose(logits, expected, rtol=0.0, atol=rounding):
        raise _changed(model, "its logits")
    return dtype


def _rounding(dtype: torch.dtype, largest: float) -> float:
    """It grows with the logits: a few units in their last place."""
    unit = max(1e-4, torch.finfo(dtype).eps) * largest
    return max(1e-3, 4 * unit)


def _changed(model: PreTrainedModel, what: str) -> ModelError:
    return ModelError(
        f"model {model.name_or_path} ({type(model).__name__}) changes {what} in a way that the "
        "flat layout cannot express; use another model family"
    )
