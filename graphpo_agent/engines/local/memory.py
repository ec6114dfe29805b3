"""How much memory a run needs, from the model's sizes and the options; no tensor is made.

There are two phases: sampling (keys and values) and the update (gradients, activations, logits).
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from graphpo_agent.engines.local.forward import max_logits
from graphpo_agent.engines.local.head import output_head
from graphpo_agent.engines.local.kv_layers import kv_layers
from graphpo_agent.engines.local.options import ComputeOptions

__all__ = [
    "MemoryEstimate",
    "ModelSizes",
    "UpdateSizes",
    "estimate_memory",
    "model_sizes",
    "product_bytes",
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
        token_numbers: of the keys and values of one token in all layers.
        vocabulary: rows of the output head.
        itemsize: bytes of one weight.
        caps: whether the output head bounds its logits, which are then kept beside their
            probabilities.
    """

    weight_bytes: int
    trained_bytes: int
    token_numbers: int
    vocabulary: int
    itemsize: int
    caps: bool = False


@dataclass(frozen=True, slots=True)
class UpdateSizes:
    """The numbers of an update and of the graphs that it learns from.

    Example: ``UpdateSizes(activations=2**30, targets=1000)``.

    Attributes:
        activations: bytes kept for the backward pass of one flat row (``saved_bytes``).
        targets: predicted tokens of the row.
        reference: whether a copy of the weights is kept for a KL term.
        entropy_bonus: whether the entropies carry a gradient.
        offload: whether the optimiser's state leaves the device for the sampling.
        model_samples: whether the trained model itself samples, and no other program.
        sampler_bytes: what the sampler may hold beside ``sampled_tokens``.
        sampled_tokens: tokens whose keys and values the sampler keeps until the end of a step.
        sampler_stays: whether the sampler keeps its memory during the update.
        device_type: where it is computed, as torch names it.
    """

    activations: int
    targets: int
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

    Weights, gradients and optimiser state are exact, and activations those of the row. The
    sampler's keys and values are an estimate: paths end early, and the memory that they are kept in
    grows by doubling.
    """
    weights = model.weight_bytes
    reference = weights if update.reference else 0
    gradients = model.trained_bytes
    optimizer = 2 * gradients
    activations = update.activations
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


def _logits(model: ModelSizes, update: UpdateSizes, compute: ComputeOptions) -> int:
    """Probabilities in float32 or more, beside them what the product gives in 16 bits.

    With a bonus on the entropy, or a bound on the logits, the logits as well. On a GPU it is the
    logits and their gradient.
    """
    rows = min(update.targets, max(1, max_logits(update.device_type) // model.vocabulary))
    product = product_bytes(model, compute)
    if update.device_type != "cpu":
        return rows * model.vocabulary * 2 * product
    kept = max(product, _MASTER_BYTES)
    rounded = product if product < _MASTER_BYTES else 0
    buffers = 2 if update.entropy_bonus or model.caps else 1
    return rows * model.vocabulary * (kept * buffers + rounded)


def token_bytes(model: ModelSizes, compute: ComputeOptions) -> int:
    """Keys and values of one token, in all layers."""
    return model.token_numbers * product_bytes(model, compute)


def product_bytes(model: ModelSizes, compute: ComputeOptions) -> int:
    """Of one number that a matrix product gives."""
    return 2 if compute.autocast else model.itemsize


def model_sizes(model: PreTrainedModel) -> ModelSizes:
    """The sizes of a model; one on the ``meta`` device will do."""
    parameters, config = list(model.parameters()), model.config.get_text_config()
    return ModelSizes(
        weight_bytes=sum(p.nbytes for p in parameters),
        trained_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        token_numbers=sum(layer.numbers for layer in kv_layers(config)),
        vocabulary=config.vocab_size,
        itemsize=parameters[0].element_size(),
        caps=output_head(model).cap is not None,
    )


def _readable(num_bytes: int) -> str:
    """``1536 * 2**20`` as ``1.5 GiB``."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"
