"""How much memory a run needs, from the model's sizes and the options; no tensor is made.

Two phases take turns: sampling (keys and values) and the update (gradients, activations, logits).
What is saved for the backward pass is counted layer by layer as transformers' plain decoder layers
(Llama, Qwen) save it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from graphpo_agent.engines.local.forward import MAX_LOGITS
from graphpo_agent.engines.local.options import ComputeOptions

__all__ = [
    "MemoryEstimate",
    "ModelSizes",
    "UpdateSizes",
    "estimate_memory",
    "free_memory",
    "model_sizes",
]

_MASTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The numbers of a decoder; see ``model_sizes``.

    Attributes:
        weight_bytes: of all weights, tied ones once.
        trained_bytes: of those that are trained; all of them, or the adapters.
        layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward part.
        query_width: query heads times their dimension.
        key_width: key/value heads times their dimension.
        vocabulary: rows of the output head.
        itemsize: bytes of one weight.
    """

    weight_bytes: int
    trained_bytes: int
    layers: int
    hidden: int
    intermediate: int
    query_width: int
    key_width: int
    vocabulary: int
    itemsize: int


@dataclass(frozen=True, slots=True)
class UpdateSizes:
    """The numbers of an update and of the graphs that it learns from.

    Example: ``UpdateSizes(max_tokens=4096, edge_tokens=16, path_tokens=80)``.

    Attributes:
        max_tokens: tokens of one flat row.
        edge_tokens: tokens of a stretch without a branch.
        path_tokens: tokens from the prompt's start to a stretch's end, on average.
        reference: whether a copy of the weights is kept for a KL term.
        offload: whether the optimiser's state leaves the device for the sampling.
        sampler_bytes: keys and values that the sampler may hold.
    """

    max_tokens: int
    edge_tokens: int
    path_tokens: int
    reference: bool = False
    offload: bool = False
    sampler_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes.

    Attributes:
        weights: of the policy.
        reference: of the reference model.
        gradients: of the trained weights.
        optimizer: AdamW's two moments.
        activations: saved for the backward pass of one flat row.
        logits: held at once.
        sampler: keys and values.
        total: the larger of the two phases.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    sampler: int
    total: int

    def lines(self, free: int, device: str) -> list[str]:
        """What a person is told: the parts, and whether they fit."""
        parts = ", ".join(
            f"{name} {_readable(getattr(self, name))}"
            for name in self.__slots__
            if name != "total" and getattr(self, name)
        )
        shown = [
            f"memory: about {_readable(self.total)} of {_readable(free)} free on {device}",
            f"memory: {parts}",
        ]
        if self.total > free:
            shown.append(f"warning: that may not fit; {self._advice()}")
        return shown

    def _advice(self) -> str:
        """The setting that takes most."""
        advice = {
            "activations": "lower update.max_tokens_per_batch or set update.gradient_checkpointing",
            "logits": "lower update.max_tokens_per_batch",
            "sampler": "lower engine.max_batch_gib",
            "reference": "set update.kl_coefficient to 0 or model.lora",
            "optimizer": "set model.lora, or use a smaller model",
            "gradients": "set model.lora, or use a smaller model",
            "weights": "set model.dtype to bfloat16, or use a smaller model",
        }
        return advice[max(advice, key=lambda name: getattr(self, name))]


def estimate_memory(
    model: ModelSizes, update: UpdateSizes, compute: ComputeOptions
) -> MemoryEstimate:
    """What a run needs at its peak.

    Weights, gradients and optimiser state are exact; activations are an estimate: a graph's shape
    decides how often its prefixes are gathered.
    """
    weights = model.weight_bytes
    reference = weights if update.reference else 0
    gradients = model.trained_bytes
    optimizer = 2 * gradients
    activations = _activations(model, update, compute)
    logits = _logits(model, update)
    updating = gradients + optimizer + activations + logits
    sampling = update.sampler_bytes + (0 if update.offload else optimizer)
    return MemoryEstimate(
        weights,
        reference,
        gradients,
        optimizer,
        activations,
        logits,
        update.sampler_bytes,
        weights + reference + max(updating, sampling),
    )


def _activations(model: ModelSizes, update: UpdateSizes, compute: ComputeOptions) -> int:
    """Bytes saved for the backward pass of one row, masks included.

    A layer saves, per token: of each of its two norms the input, the normed input (both in the
    weights' precision) and the output; queries, keys and values as the kernel takes them; the
    attention's output before and after it is put in order; and four times the feed-forward width.
    """
    stream = 4 * model.hidden * model.itemsize
    gathered = compute.attention == "gathered"
    times = update.path_tokens / update.edge_tokens if gathered else 1.0
    products = 2 * model.hidden + 3 * model.query_width + 4 * model.intermediate
    itemsize = 2 if compute.autocast else model.itemsize
    layer = stream + int((products + 2 * model.key_width * times) * itemsize)
    inputs = model.hidden * model.itemsize
    kept = (
        model.layers * inputs + layer if compute.checkpoint_layers else model.layers * layer
    ) + 3 * inputs
    seen = update.path_tokens if gathered else 0
    copies = model.weight_bytes // 2 if compute.autocast else 0
    return update.max_tokens * (kept + seen * itemsize) + copies


def _logits(model: ModelSizes, update: UpdateSizes) -> int:
    """Logits, their log-softmax, its exponential and the gradient, in float32 or more."""
    rows = min(update.max_tokens, max(1, MAX_LOGITS // model.vocabulary))
    return 4 * rows * model.vocabulary * max(model.itemsize, _MASTER_BYTES)


def model_sizes(model: PreTrainedModel) -> ModelSizes:
    """The sizes of a model; one on the ``meta`` device will do."""
    config = model.config
    parameters = list(model.parameters())
    heads = config.num_attention_heads
    values = config.to_dict()
    head_dim = values.get("head_dim") or config.hidden_size // heads
    return ModelSizes(
        weight_bytes=sum(p.nbytes for p in parameters),
        trained_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        query_width=heads * head_dim,
        key_width=(values.get("num_key_value_heads") or heads) * head_dim,
        vocabulary=config.vocab_size,
        itemsize=parameters[0].element_size(),
    )


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU or, for a CPU, in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _readable(num_bytes: int) -> str:
    """``1536 * 2**20`` as ``1.5 GiB``."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"
