"""Low-rank adapters (LoRA) through peft, inside the same model object.

Only the adapters are trained; sampling uses the adapted weights because it uses the same model.
"""

import copy
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils.peft_utils import check_peft_version

from graphpo_agent.engines.local.head import output_head
from graphpo_agent.engines.local.language_model import parts_beside
from graphpo_agent.engines.local.mamba import unadapted
from graphpo_agent.engines.local.model import computable
from graphpo_agent.errors import ConfigError, first_line

__all__ = [
    "LoraOptions",
    "adapters_off",
    "add_adapters",
    "has_adapters",
    "merged_model",
    "merged_weights",
    "plain_model",
]


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Which adapters are added.

    Example: ``LoraOptions(rank=16, alpha=32.0, target_modules=("q_proj", "v_proj"))``.

    Attributes:
        rank: of each adapter's two factors.
        alpha: the adapters' product is scaled by alpha / rank.
        target_modules: names of the linear layers that are adapted; None for all of them but the
            output head.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | None = None


def add_adapters(model: PreTrainedModel, options: LoraOptions) -> PreTrainedModel:
    """Freeze the weights and add adapters that change nothing yet; the model itself is changed.

    The adapters are in float32 or more, whatever the weights are: smaller updates would round away.

    Raises:
        ConfigError: peft is not installed or too old for transformers, or the model has no layers
            of such a name, or they are its output head or share its weights.
    """
    try:
        from peft import LoraConfig
    except ImportError:
        raise ConfigError("model.lora needs peft; run pip install 'graphpo-agent[lora]'") from None
    _check_versions()
    names = options.target_modules
    _check_targets(model, names or ())
    left_out = parts_beside(model)
    if names is None:
        left_out = [*left_out, *unadapted(model.config)]
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # pyright: ignore[reportArgumentType] (floats work as well)
        target_modules="all-linear" if names is None else list(names),
        exclude_modules=left_out or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    plain = set(model.state_dict())
    try:
        model.add_adapter(config)
        _try_out(model, plain)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.lora does not fit {model.name_or_path}: {first_line(error)}; "
            "name other layers in model.lora.target_modules"
        ) from error
    name = str(model.name_or_path)
    if os.path.isdir(name):  # a checkpoint finds its base from anywhere
        (made,) = cast(Any, model).peft_config.values()
        made.base_model_name_or_path = os.path.abspath(name)
    for parameter in model.parameters():
        if parameter.requires_grad:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def _check_versions() -> None:
    """Raise ConfigError where this transformers takes adapters from newer releases of peft only."""
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError:
        raise ConfigError(
            f"model.lora: transformers {version('transformers')} needs peft {MIN_PEFT_VERSION} or "
            f"newer, and {version('peft')} is installed; run pip install --upgrade peft, or take "
            "an older transformers"
        ) from None


def _check_targets(model: PreTrainedModel, names: Collection[str]) -> None:
    """Refuse names of no layer, and of the output head or embeddings tied to it.

    Merged, an adapted head and its embeddings would differ.
    """
    head = output_head(model).layer
    layers = {f".{path}": module for path, module in model.named_modules()}
    named = {name: [m for path, m in layers.items() if path.endswith(f".{name}")] for name in names}
    unknown = [name for name, modules in named.items() if not modules]
    if unknown:
        linear = {path for path, module in layers.items() if isinstance(module, nn.Linear)}
        there = sorted({path.rpartition(".")[2] for path in linear if layers[path] is not head})
        raise ConfigError(
            f"model.lora.target_modules: {model.name_or_path} has no layer "
            f"{' and no '.join(unknown)}; it has {', '.join(there)}"
        )
    for name, modules in named.items():
        if any(m is head or getattr(m, "weight", None) is head.weight for m in modules):
            raise ConfigError(
                f"model.lora.target_modules: {name} of {model.name_or_path} is the output head or "
                "tied to it and cannot be adapted; leave it out"
            )


def _try_out(model: PreTrainedModel, plain: Collection[str]) -> None:
    """Compute one token with the adapters, and see that they can be merged.

    peft puts adapters around parts of models whose callers then miss something of theirs.

    Args:
        model: has adapters.
        plain: the names of its weights before it had any.

    Raises:
        ValueError: the merged weights would not be those of the model.
    """
    from peft.tuners.lora import Embedding, Linear, LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if set(_weights_beneath(model)) != set(plain) or not all(
        isinstance(layer, (Linear, Embedding, ParamWrapper)) for layer in layers
    ):
        raise ValueError("adapters of these layers cannot be merged into the model")
    if model.device.type != "meta":
        with torch.no_grad(), computable(model):
            model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether ``add_adapters`` was called."""
    return model._hf_peft_config_loaded


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before adapters were added, inside the ``with`` block."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The state dict of a plain model with the adapters added, one by one: each sum is a new copy.

    Other weights share memory with the model.
    """
    from peft.tuners.lora import Embedding, Linear
    from peft.tuners.lora.layer import ParamWrapper  # around experts and routers

    adapters: dict[str, list[Linear | Embedding | ParamWrapper]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (Linear, Embedding, ParamWrapper)):
            own = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            adapters.setdefault(f"{_plain(name)}.{own}", []).append(module)
    for name, weight in _weights_beneath(model).items():
        for module in adapters.get(name, ()):
            weight = (weight + module.get_delta_weight("default").detach()).to(weight.dtype)
        yield name, weight


def _weights_beneath(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights that have adapters upon them or none, by their names without any."""
    values = model.state_dict().items()
    return {_plain(name): value for name, value in values if ".lora_" not in name}


def _plain(name: str) -> str:
    """The name without adapters of something in a model with adapters, which may be nested."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def merged_model(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model with ``merged_weights``, to be saved; it cannot be run."""
    return plain_model(type(model), model, dict(merged_weights(model)))


def plain_model(
    kind: type[PreTrainedModel], like: PreTrainedModel, weights: dict[str, Tensor]
) -> PreTrainedModel:
    """A model of a class with the configuration of another and these weights, to be saved."""
    with torch.device("meta"):
        plain = kind(copy.deepcopy(like.config))
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.generation_config = like.generation_config
    return plain
