"""Loading a causal language model and asking what it can hold."""

import pickle
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from graphpo_agent.engines.local.adapter_files import merge_adapters, under_adapters
from graphpo_agent.engines.local.linear_attention import conv_width
from graphpo_agent.engines.tokenizer import HfTokenizer, check_model_directory
from graphpo_agent.errors import ConfigError, ModelError, first_line, first_sentence
from graphpo_agent.pretrained import quiet_transformers, why_not_loaded

__all__ = [
    "check_context",
    "check_vocabulary",
    "computable",
    "context_limit",
    "dropouts",
    "head_dim",
    "key_width",
    "layer_windows",
    "load_model",
    "longest_context",
    "model_config",
    "model_without_weights",
    "output_head",
    "position_limit",
    "stored_config",
    "told_reach",
    "usable_device",
]


_SHORTER = "the original context of its LongRoPE goes no further"
_DAMAGED_FILE = (
    AttributeError,
    EOFError,
    IndexError,
    SafetensorError,
    TypeError,
    pickle.UnpicklingError,
    struct.error,
)
"""What transformers makes of files whose values are of another kind, or that end too early."""


def load_model(
    name: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> PreTrainedModel:
    """Load a causal LM from a directory (never the network) or from the Hugging Face hub.

    A directory may hold adapters: they are merged into the model that they belong to.

    The model is in evaluation mode and stays so in training: dropout would make the importance
    ratios of an unchanged policy differ from 1.

    Raises:
        ModelError: nothing there, unreadable, weights missing, or a kind of model that the
            flat layout cannot express (see ``context_limit``); or the device cannot be used.
        RunError: adapters are missing, damaged or belong to another model.
    """
    where = usable_device(device)
    whole, adapters = under_adapters(name)
    local = check_model_directory(whole, "config.json")
    try:
        with quiet_transformers():
            loaded = AutoModelForCausalLM.from_pretrained(
                whole, dtype=dtype, local_files_only=local, output_loading_info=True
            )
    except Exception as error:  # of no narrower kind, where a value is one no model can have
        reason = _reason(whole, error, "config.json or a weight file")
        raise ModelError(f"model {whole} cannot be loaded: {reason}") from error
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _check_weights(whole, info)
    context_limit(model.config)
    model.config.return_dict = True  # what passes give is read by name
    _mend_generation(model)
    for directory in adapters:
        model = merge_adapters(model, directory)
    model.to(where)  # pyright: ignore[reportArgumentType] (transformers types self away)
    return model.eval()


def _mend_generation(model: PreTrainedModel) -> None:
    """Make generation_config.json one that can be saved with the model again.

    Some models name a temperature and not that it is to be sampled.

    Raises:
        ModelError: it contradicts itself in another way.
    """
    config = model.generation_config
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise ModelError(
            f"model {model.name_or_path}: generation_config.json contradicts itself: "
            f"{' '.join(str(error).split())}; correct it"
        ) from error


def usable_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ModelError: torch knows none, or cannot use it here.
    """
    try:
        device = torch.empty(0, device=name).device
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error)
        raise ModelError(f"device {name!r} cannot be used: {reason}") from error
    if device.type == "meta":
        raise ModelError(f"device {name!r} cannot be used: it holds no numbers")
    return device


def model_without_weights(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model's layers on the ``meta`` device: sizes without memory.

    Raises:
        ModelError: nothing there, or no causal language model.
    """
    with _reading(name) as config, quiet_transformers(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(_of_text(config), dtype=dtype)


def model_config(name: str) -> PretrainedConfig:
    """The configuration of a model, of its language model where it takes images as well.

    Raises:
        ModelError: there is none.
    """
    with _reading(name) as config:
        return _of_text(config)


def stored_config(name: str) -> PretrainedConfig:
    """A model's configuration as it is stored; see ``model_config``."""
    with _reading(name) as config:
        return config


@contextmanager
def _reading(name: str) -> Iterator[PretrainedConfig]:
    """A model's configuration; what goes wrong in the ``with`` block is its fault."""
    whole, _ = under_adapters(name)
    local = check_model_directory(whole, "config.json")
    try:
        yield AutoConfig.from_pretrained(whole, local_files_only=local)
    except Exception as error:
        reason = _reason(whole, error, "config.json")
        raise ModelError(f"model {whole} cannot be read: {reason}") from error


def _of_text(config: PretrainedConfig) -> PretrainedConfig:
    """That of the language model, where a model of texts and images is loaded as that alone."""
    text = config.get_text_config()
    kinds = (MODEL_FOR_CAUSAL_LM_MAPPING.get(type(own), None) for own in (config, text))
    if len(set(kinds)) > 1:
        return config
    text.name_or_path = str(config.name_or_path)
    return text


def dropouts(config: PretrainedConfig) -> list[str]:
    """The fields of a model's configuration by which something is dropped in training mode.

    Examples: GPT-2's are ``attn_pdrop``, ``embd_pdrop``, ``resid_pdrop``, …; that of a language
    model of Qwen3.5 beside its part for images is ``text_config.attention_dropout``.
    """
    text = config.get_text_config()
    own = (f"{name}." for name in config.sub_configs if getattr(config, name, None) is text)
    place, values = next(own, ""), text.to_dict().items()
    drops = [
        name for name, value in values if "drop" in name and isinstance(value, float) and value
    ]
    return [place + name for name in drops]


def _reason(name: str, error: Exception, files: str) -> str:
    """Its first line, and all of what is wrong with a value of config.json.

    Args:
        name: of the model.
        error: what was raised.
        files: what was being read, for an error that does not say it.
    """
    if isinstance(error, StrictDataclassError):
        return f"config.json: {' '.join(str(error).split())}"
    if isinstance(error, _DAMAGED_FILE):
        return f"{files} is damaged ({first_sentence(error)}); copy it from the model again"
    return why_not_loaded(name, error)


def check_vocabulary(model: PreTrainedModel, tokenizer: HfTokenizer) -> None:
    """Raise ``ModelError`` if the tokenizer knows ids for which the model has no embedding."""
    num_embeddings = output_head(model).weight.shape[0]
    if tokenizer.vocab_size > num_embeddings:
        raise ModelError(
            f"tokenizer {tokenizer.hf.name_or_path} has {tokenizer.vocab_size} tokens but the "
            f"model knows {num_embeddings}; use the model's own tokenizer or resize its embeddings"
        )


@contextmanager
def computable(model: PreTrainedModel) -> Iterator[None]:
    """Around a model's first pass: some kernels, of experts for one, know few precisions.

    Raises:
        ModelError: the model cannot be computed in the precision of its weights.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if model.dtype == torch.float32:  # which every kernel knows: it is something else
            raise
        dtype = str(model.dtype).removeprefix("torch.")
        raise ModelError(
            f"model {model.name_or_path} ({type(model).__name__}) cannot be computed in {dtype}: "
            f"{first_line(error)}; set model.dtype to float32"
        ) from error


def output_head(model: PreTrainedModel) -> nn.Linear:
    """The layer that turns last hidden states into logits.

    Raises:
        ModelError: the model has none.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"model {model.name_or_path}: no output head; it is not a causal LM")
    return head


def head_dim(config: PretrainedConfig) -> int:
    """Numbers of one attention head's queries and keys."""
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads


def key_width(config: PretrainedConfig) -> int:
    """Key/value heads times ``head_dim``."""
    heads = config.to_dict().get("num_key_value_heads") or config.num_attention_heads
    return heads * head_dim(config)


def context_limit(config: PretrainedConfig) -> int:
    """The longest context, in tokens, that a model is made for and the flat layout can express.

    Raises:
        ModelError: the config states no maximum, or has layers that the flat layout cannot express.
    """
    limit = position_limit(config)
    if not hasattr(config, "max_position_embeddings"):
        raise ModelError(
            f"model {config.name_or_path}: config.json has no max_position_embeddings; add it"
        )
    most = int(config.max_position_embeddings)
    return most if limit is None else min(most, limit)


def told_reach(config: PretrainedConfig, reach: int) -> list[str]:
    """A line where contexts end at ``reach`` tokens, unlike model and user say; else none."""
    stated = int(config.max_position_embeddings)
    if reach == stated or reach < context_limit(config):
        return []
    return [
        f"contexts end at {reach:,} tokens, not at the {stated:,} that the model states: {_SHORTER}"
    ]


def check_context(wanted: int, limit: int, config: PretrainedConfig) -> None:
    """Raise ConfigError where ``engine.max_context_tokens`` is more than a model's limit."""
    if wanted <= limit:
        return
    stated = int(config.max_position_embeddings)
    why = f" of the {stated} that it states: {_SHORTER}" if limit < stated else ""
    raise ConfigError(
        f"engine.max_context_tokens is {wanted}, but {config.name_or_path} holds {limit} "
        f"tokens{why}"
    )


def longest_context(config: PretrainedConfig, wanted: int | None) -> int:
    """``engine.max_context_tokens``, where that is wanted, or as long as a model's contexts can be.

    Raises:
        ConfigError: that is more than the model holds.
        ModelError: as ``context_limit``.
    """
    limit = context_limit(config)
    if wanted is None:
        return limit
    check_context(wanted, limit, config)
    return wanted


def layer_windows(config: PretrainedConfig) -> frozenset[int | None]:
    """The sliding windows of a model's attention layers; None is that of a layer without one.

    A layer with a window of w tokens attends to a token and to the w - 1 before it.
    """
    values = config.to_dict()
    window = values.get("sliding_window") or None  # 0, as Qwen2-MoE has it, is none
    kinds = values.get("layer_types") or ["sliding_attention"]
    return frozenset(
        window if kind == "sliding_attention" else None
        for kind in kinds
        if kind != "linear_attention"
    )


def position_limit(config: PretrainedConfig) -> int | None:
    """The longest context, in tokens, whose positions mean the same whatever else is computed.

    LongRoPE turns all positions of a pass another way as soon as one of them is beyond the original
    context: that is its limit. None: there is none.

    Raises:
        ModelError: the config has layers that are neither attention nor gated delta nets (as in
            Qwen3.5), or that pick some of the earlier tokens (``index_topk``, as GLM-5).
    """
    values = config.to_dict()
    named = {str(kind) for kind in values.get("layer_types") or ()}
    kinds = named - {"full_attention", "sliding_attention"}
    if conv_width(config):
        kinds.discard("linear_attention")
    if values.get("index_topk"):  # whatever a version of transformers calls such layers
        kinds.add("indexed_attention")
    if kinds:
        raise ModelError(
            f"model {config.name_or_path}: layers of kind {', '.join(sorted(kinds))} are not "
            "supported; use a model with plain attention or gated delta nets in every layer"
        )
    return min(_long_rope_limits(values), default=None)


def _long_rope_limits(values: Mapping[str, Any]) -> list[int]:
    """The original context of each LongRoPE of a config; there may be one per kind of layer."""
    own = values.get("rope_parameters") or {}
    kinds = [own, *(kind for kind in own.values() if isinstance(kind, dict))]
    return [
        int(kind["original_max_position_embeddings"])
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]


def _check_weights(name: str, loading_info: Mapping[str, Any]) -> None:
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ModelError(
            f"model {name}: {len(missing)} weights are missing, first {missing[0]}; "
            "the directory does not hold a complete causal language model"
        )
