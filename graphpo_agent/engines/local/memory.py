"""How much memory a run needs, from the model's sizes and the options; no tensor is made.

There are two phases: sampling (keys and values) and the update (gradients, activations, logits).
What is saved for the backward pass is counted layer by layer as transformers' plain decoder layers
(Llama, Qwen) save it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from graphpo_agent.engines.local.forward import max_logits
from graphpo_agent.engines.local.model import head_dim
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.engines.local.pieces import Stretches, cut_into_buckets

__all__ = [
    "MemoryEstimate",
    "ModelSizes",
    "UpdateSizes",
    "estimate_memory",
    "free_memory",
    "model_sizes",
    "token_bytes",
]

_MASTER_BYTES = 4
_HEAP = 0.25
"""Of what an update makes and frees on a CPU, what the C library holds beside it: 0.2 to 0.4 as
measured, for models of 0.2 to 50 M parameters."""
_ROW_TOKENS = (
    "update.max_tokens_per_batch (or mode.max_response_tokens: a row holds a whole path and more)"
)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The numbers of a decoder; see ``model_sizes``.

    Attributes:
        weight_bytes: of all weights, tied ones once.
        trained_bytes: of those that are trained; all of them, or the adapters.
        layers: decoder layers.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward part that one token goes through.
        experts: how many experts one token goes through; 0 without any.
        query_width: query heads times their dimension.
        key_width: key/value heads times their dimension.
        norm_width: of what the norms of a layer take, summed; those of queries and keys included.
        vocabulary: rows of the output head.
        itemsize: bytes of one weight.
        cast_bytes: of the inputs of all adapters of one token, where they are converted to a
            precision higher than the weights'.
    """

    weight_bytes: int
    trained_bytes: int
    layers: int
    hidden: int
    intermediate: int
    experts: int
    query_width: int
    key_width: int
    norm_width: int
    vocabulary: int
    itemsize: int
    cast_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UpdateSizes:
    """The numbers of an update and of the graphs that it learns from.

    Example: ``UpdateSizes(max_tokens=4096, row=pack([sample], 4096)[0])``.

    Attributes:
        max_tokens: tokens of one flat row.
        row: one with graphs of that shape; it need not be full.
        reference: whether a copy of the weights is kept for a KL term.
        entropy_bonus: whether the entropies carry a gradient.
        offload: whether the optimiser's state leaves the device for the sampling.
        model_samples: whether the trained model itself samples, and no other program.
        sampler_bytes: what the sampler may hold beside ``sampled_tokens``.
        sampled_tokens: tokens whose keys and values the sampler keeps until the end of a step.
        sampler_stays: whether the sampler keeps its memory during the update.
        device_type: where it is computed, as torch names it.
    """

    max_tokens: int
    row: PackedBatch
    reference: bool = False
    entropy_bonus: bool = False
    offload: bool = False
    model_samples: bool = True
    sampler_bytes: int = 0
    sampled_tokens: int = 0
    sampler_stays: bool = False
    device_type: str = "cpu"


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
        heap: what a CPU's C library holds beside these two.
        sampler: keys and values, and the weights of a sampler that has its own.
        total: the larger of the two phases, or where the sampler stays what they hold together.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    heap: int
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
            "activations": f"lower {_ROW_TOKENS} or set update.gradient_checkpointing",
            "logits": f"lower {_ROW_TOKENS}",
            "sampler": "lower train.prompts_per_step or what engine lets the sampler hold",
            "reference": "set update.kl_coefficient to 0 or model.lora",
            "optimizer": "set model.lora, or use a smaller model",
            "gradients": "set model.lora, or use a smaller model",
            "weights": "set model.lora with model.dtype bfloat16, or use a smaller model",
        }
        return advice[max(advice, key=lambda name: getattr(self, name))]


def estimate_memory(
    model: ModelSizes, update: UpdateSizes, compute: ComputeOptions
) -> MemoryEstimate:
    """What a run needs at its peak.

    Weights, gradients and optimiser state are exact; activations are an estimate: a graph's shape
    decides how often its prefixes are gathered. So are the sampler's keys and values: paths end
    early, and the memory that they are kept in grows by doubling.
    """
    weights = model.weight_bytes
    reference = weights if update.reference else 0
    gradients = model.trained_bytes
    optimizer = 2 * gradients
    activations = _activations(model, update, compute)
    logits = _logits(model, update, compute)
    sampler = update.sampler_bytes + update.sampled_tokens * token_bytes(model, compute)
    heap = int(_HEAP * (activations + logits)) if update.device_type == "cpu" else 0
    updating = gradients + optimizer + activations + logits + heap
    updating += sampler if update.sampler_stays else 0
    copies = _weights_to_sample_with(model, update, compute)
    sampling = sampler + copies + (0 if update.offload else optimizer)
    return MemoryEstimate(
        weights,
        reference,
        gradients,
        optimizer,
        activations,
        logits,
        heap,
        sampler,
        weights + reference + max(updating, sampling),
    )


def _weights_to_sample_with(model: ModelSizes, update: UpdateSizes, compute: ComputeOptions) -> int:
    """Copies that the model samples with: rounded ones, or on a CPU transposed ones."""
    if not update.model_samples or model.itemsize < _MASTER_BYTES:
        return 0
    if compute.autocast:
        return model.weight_bytes // 2
    return model.weight_bytes if update.device_type == "cpu" else 0


def _activations(model: ModelSizes, update: UpdateSizes, compute: ComputeOptions) -> int:
    """Bytes saved for the backward pass of one row, and masks or what is gathered for a layer.

    A layer saves, per token: of each norm the input and the normed input (in the weights'
    precision); what attention and feed-forward part begin with; queries, keys and values as the
    kernel takes them; the attention's output before and after it is put in order; four times the
    feed-forward width; and what each expert takes and gives. Keys and values are saved as often as
    they are gathered; on a GPU in 16 bits once, as they are gathered again in the backward pass.
    """
    normed = 2 * model.norm_width * model.itemsize
    itemsize = _product_bytes(model, compute)
    in_kernel = update.device_type == "cuda" and itemsize == 2
    queries, keys, masks = _gathered(update.row, in_kernel)
    gathered = model.key_width * keys
    products = 2 * (1 + model.experts) * model.hidden + 4 * model.intermediate
    products += (1 + 2 * queries) * model.query_width
    products += 2 * (model.key_width if in_kernel else gathered)
    layer = normed + int(products * itemsize) + model.cast_bytes // model.layers
    inputs = model.hidden * model.itemsize
    kept = (
        model.layers * inputs + layer if compute.checkpoint_layers else model.layers * layer
    ) + 3 * inputs
    if in_kernel:  # of one layer at a time: gathered, their gradients, and these in float32
        kept += int(gathered * (4 * itemsize + _MASTER_BYTES))
    else:
        kept += masks * itemsize
    copies = model.weight_bytes // 2 if compute.autocast else 0
    return int(update.max_tokens * kept) + copies


def _gathered(row: PackedBatch, in_kernel: bool) -> tuple[float, float, float]:
    """Queries, keys and numbers of masks for each token of a row; see ``flat_attention``."""
    num_tokens = len(row.token_ids)
    if in_kernel:
        stretches = Stretches.of(row)
        return 1.0, float((stretches.before + stretches.lengths).sum()) / num_tokens, 0.0
    buckets, _ = cut_into_buckets(row)
    queries = sum(bucket.queries.size for bucket in buckets)
    keys = sum(bucket.keys.size for bucket in buckets)
    masks = sum(b.queries.size * b.keys.shape[1] for b in buckets if not b.causal)
    return queries / num_tokens, keys / num_tokens, masks / num_tokens


def _logits(model: ModelSizes, update: UpdateSizes, compute: ComputeOptions) -> int:
    """Probabilities in float32 or more, beside them what the product gives in 16 bits.

    With a bonus on the entropy the logits as well. On a GPU it is the logits and their gradient.
    """
    rows = min(update.max_tokens, max(1, max_logits(update.device_type) // model.vocabulary))
    product = _product_bytes(model, compute)
    if update.device_type != "cpu":
        return rows * model.vocabulary * 2 * product
    kept = max(product, _MASTER_BYTES)
    rounded = product if product < _MASTER_BYTES else 0
    return rows * model.vocabulary * (kept * (2 if update.entropy_bonus else 1) + rounded)


def token_bytes(model: ModelSizes, compute: ComputeOptions) -> int:
    """Keys and values of one token, in all layers."""
    return 2 * model.layers * model.key_width * _product_bytes(model, compute)


def _product_bytes(model: ModelSizes, compute: ComputeOptions) -> int:
    """Of one number that a matrix product gives."""
    return 2 if compute.autocast else model.itemsize


def model_sizes(model: PreTrainedModel) -> ModelSizes:
    """The sizes of a model; one on the ``meta`` device will do."""
    config = model.config
    parameters = list(model.parameters())
    itemsize = parameters[0].element_size()
    heads = config.num_attention_heads
    size = head_dim(config)
    experts: int = getattr(config, "num_experts_per_tok", None) or 0
    query_width = heads * size
    key_width = (config.to_dict().get("num_key_value_heads") or heads) * size
    return ModelSizes(
        weight_bytes=sum(p.nbytes for p in parameters),
        trained_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=_intermediate_size(config, experts),
        experts=experts,
        query_width=query_width,
        key_width=key_width,
        norm_width=_norm_width(model, query_width, key_width),
        vocabulary=config.vocab_size,
        itemsize=itemsize,
        cast_bytes=sum(
            p.shape[1] * p.element_size()
            for name, p in model.named_parameters()
            if ".lora_A." in name and p.element_size() > itemsize
        ),
    )


def _norm_width(model: PreTrainedModel, query_width: int, key_width: int) -> int:
    """Of all norms of a layer; one of queries or keys is named so and takes all heads'."""
    hidden = cast(int, model.config.hidden_size)
    widths, total = {"q": query_width, "k": key_width}, 0
    for name, module in model.named_modules():
        *path, own = name.split(".")
        in_layer = any(part.isdecimal() for part in path)
        if in_layer and "norm" in type(module).__name__.lower():
            total += widths.get(own.partition("_")[0], hidden)
    return total // model.config.num_hidden_layers


def _intermediate_size(config: PretrainedConfig, experts: int) -> int:
    """Width of the inner products of a token's layer; most families call it so, GPT-2 and OPT not.

    Of a layer of experts that of all ``experts`` that a token goes through.
    """
    names = ("intermediate_size", "n_inner", "ffn_dim")
    given = [size for name in names if (size := getattr(config, name, None))]
    width = given[0] if given else 4 * config.hidden_size
    if not experts:
        return width
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return experts * (getattr(config, "moe_intermediate_size", None) or width) + shared


def free_memory(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that are free on a GPU or, for a CPU, in the machine.

    A container's limit (cgroup v2) is respected; its cached files count as used.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    limit = cgroup / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return free
    used = int((cgroup / "memory.current").read_text())
    return min(free, max(0, int(limit.read_text()) - used))


def _readable(num_bytes: int) -> str:
    """``1536 * 2**20`` as ``1.5 GiB``."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"
