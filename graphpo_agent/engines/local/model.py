"""Loading a causal language model, and what it is made of."""

import pickle
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils.quantization_config import Mxfp4Config

from graphpo_agent.engines.local.adapter_files import merge_adapters, under_adapters
from graphpo_agent.engines.local.head import output_head
from graphpo_agent.engines.local.language_model import freeze_other_parts
from graphpo_agent.engines.local.out_of_memory import within_memory
from graphpo_agent.engines.local.reach import context_limit
from graphpo_agent.engines.tokenizer import HfTokenizer, check_model_directory
from graphpo_agent.errors import ModelError, first_line, first_sentence
from graphpo_agent.pretrained import quiet_transformers, why_not_loaded

__all__ = [
    "check_vocabulary",
    "computable",
    "dropouts",
    "load_model",
    "model_config",
    "model_without_weights",
    "quantization",
    "stored_config",
    "usable_device",
]


_MXFP4 = "mxfp4"
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

    A directory may hold adapters: they are merged into the model that they belong to. Weights in
    MXFP4, as those of gpt-oss, are loaded in full precision. Of a model that takes images as well
    only the language model is trained, and may be all that is loaded (Qwen3.5).

    The model is in evaluation mode and stays so in training: dropout would make the importance
    ratios of an unchanged policy differ from 1.

    Raises:
        ModelError: nothing there, unreadable, weights missing or quantized in another way, or a
            kind of model that the flat layout cannot express (see ``context_limit``); or the device
            cannot be used, or has too little memory.
        RunError: adapters are missing, damaged or belong to another model.
    """
    where = usable_device(device)
    whole, adapters = under_adapters(name)
    local = check_model_directory(whole, "config.json")
    values = _values(whole)
    quantized = _quantization(values)
    if quantized not in (None, _MXFP4):
        raise ModelError(
            f"model {whole}: its weights are quantized ({quantized}) and cannot be trained; use "
            "the model in full precision"
        )
    in_full = {"quantization_config": Mxfp4Config(dequantize=True)} if quantized else {}
    try:
        with quiet_transformers():
            loaded = _loader(values.get("model_type")).from_pretrained(
                whole,
                dtype=dtype,
                local_files_only=local,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, with their names
                **in_full,
            )
    except Exception as error:  # of no narrower kind, where a value is one no model can have
        reason = _reason(whole, error, "config.json or a weight file")
        raise ModelError(f"model {whole} cannot be loaded: {reason}") from error
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _check_weights(whole, info)
    text = model.config.get_text_config()
    text.name_or_path = whole  # what is said of it names the model
    context_limit(text)
    freeze_other_parts(model)
    model.config.return_dict = text.return_dict = True  # what passes give is read by name
    if quantized:
        model.to(dtype)  # pyright: ignore[reportArgumentType] (transformers types self away)
        cast(Any, model)._weight_conversions = None  # or it is saved under names of what was packed
    _mend_generation(model)
    for directory in adapters:
        model = merge_adapters(model, directory)
    with within_memory("the model", "use one with fewer parameters, or another model.device"):
        model.to(where)  # pyright: ignore[reportArgumentType] (transformers types self away)
    return model.eval()


def quantization(name: str) -> str | None:
    """How a model's weights are quantized, in transformers' words; None: they are not.

    Raises:
        ModelError: there is no such model.
    """
    return _quantization(_values(name))


def _values(name: str) -> dict[str, Any]:
    """What a model's config.json holds."""
    with _described(name) as (whole, local):
        values, _ = PretrainedConfig.get_config_dict(whole, local_files_only=local)
        return values


def _quantization(values: Mapping[str, Any]) -> str | None:
    how = values.get("quantization_config")
    return how.get("quant_method") if isinstance(how, dict) else None


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
        model = _loader(config.model_type).from_config(_of_model(config), dtype=dtype)
        freeze_other_parts(model)
        return model


def model_config(name: str) -> PretrainedConfig:
    """The configuration of a model, of its language model where it takes images as well.

    Raises:
        ModelError: there is none.
    """
    with _reading(name) as config:
        text = config.get_text_config()
        text.name_or_path = str(config.name_or_path)
        return text


def stored_config(name: str) -> PretrainedConfig:
    """A model's configuration as it is stored; see ``model_config``."""
    with _reading(name) as config:
        return config


@contextmanager
def _reading(name: str) -> Iterator[PretrainedConfig]:
    """A model's configuration; what goes wrong in the ``with`` block is its fault."""
    with _described(name) as (whole, local):
        yield AutoConfig.from_pretrained(whole, local_files_only=local)


@contextmanager
def _described(name: str) -> Iterator[tuple[str, bool]]:
    """The whole model behind a name and whether it is here, for reading its config.json.

    What goes wrong in the ``with`` block is that file's fault.
    """
    whole, _ = under_adapters(name)
    local = check_model_directory(whole, "config.json")
    try:
        yield whole, local
    except Exception as error:
        reason = _reason(whole, error, "config.json")
        raise ModelError(f"model {whole} cannot be read: {reason}") from error


def _loader(model_type: str | None) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """What makes models of a type; of some there is none for text alone."""
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    takes_images = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def _of_model(config: PretrainedConfig) -> PretrainedConfig:
    """That of the language model, where a model of texts and images is loaded as that alone."""
    text = config.get_text_config()
    kinds = [MODEL_FOR_CAUSAL_LM_MAPPING.get(type(own), None) for own in (config, text)]
    return text if kinds[0] is not None and kinds[0] is kinds[1] else config


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
        ModelError: the model cannot be computed, or not in the precision of its weights.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        where, mend = "", "use another model family"
        if isinstance(error, RuntimeError) and model.dtype != torch.float32:  # all kernels know it
            dtype = str(model.dtype).removeprefix("torch.")
            where, mend = f" in {dtype}", "set model.dtype to float32"
        raise ModelError(
            f"model {model.name_or_path} ({type(model).__name__}) cannot be computed{where}: "
            f"{first_line(error)}; {mend}"
        ) from error


def _check_weights(name: str, loading_info: Mapping[str, Any]) -> None:
    """Raise ModelError unless the files hold each weight of the model; warn of further ones."""
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ModelError(
            f"model {name}: {len(missing)} weights are missing, first {missing[0]}; "
            "the directory does not hold a complete causal language model"
        )
    others = sorted((key, *map(list, sizes)) for key, *sizes in loading_info["mismatched_keys"])
    if others:
        key, there, wanted = others[0]
        raise ModelError(
            f"model {name}: {len(others)} weights are not of the sizes that config.json gives, "
            f"first {key}, {there} instead of {wanted}; take both from the same model"
        )
    unexpected = sorted(loading_info["unexpected_keys"])
    if unexpected:
        warnings.warn(
            f"model {name}: {len(unexpected)} weights of its files have no place in the model that "
            f"config.json describes and are left out, first {unexpected[0]}",
            stacklevel=3,
        )
