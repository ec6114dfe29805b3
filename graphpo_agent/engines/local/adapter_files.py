"""Directories that hold adapters, as peft writes them, and name the model that they belong to."""

import json
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from graphpo_agent.engines.tokenizer import check_model_directory
from graphpo_agent.errors import GraphPOError, ModelError, RunError, first_line

__all__ = ["merge_adapters", "read_adapters", "under_adapters"]

_CONFIG_FILE = "adapter_config.json"
_WEIGHTS_FILE = "adapter_model.safetensors"


def under_adapters(name: str) -> tuple[str, list[str]]:
    """The whole model behind a name, and the directories of adapters upon it, lowest first.

    Example: ``under_adapters("runs/kb/checkpoints/step-000020")`` is ``("worlds/kb/policy",
    ["runs/kb/checkpoints/step-000020"])`` where that run trained adapters.

    Args:
        name: a directory or a hub model; one that holds a whole model is its own.

    Raises:
        ModelError: an ``adapter_config.json`` is damaged or names no model that is there, or peft
            is not installed.
    """
    adapters: list[str] = []
    while (config := Path(name) / _CONFIG_FILE).is_file():
        if name in adapters:
            raise ModelError(f"{config} names itself as its model: correct base_model_name_or_path")
        adapters.insert(0, name)
        name = _model_named(config)
    if adapters and find_spec("peft") is None:
        raise ModelError(
            f"{adapters[-1]} holds adapters, which need peft; run pip install 'graphpo-agent[lora]'"
        )
    if adapters:
        try:
            check_model_directory(name, "config.json")
        except ModelError as error:
            raise ModelError(
                f"{adapters[0]} holds adapters of another model: {error}, or correct "
                f"base_model_name_or_path in {_CONFIG_FILE}"
            ) from None
    return name, adapters


def _model_named(config: Path) -> str:
    try:
        name = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        name = None
    if not isinstance(name, str) or not name:
        raise ModelError(f"{config} is damaged: it names no base_model_name_or_path")
    return name


def merge_adapters(model: PreTrainedModel, directory: str) -> PreTrainedModel:
    """A plain model of that name, all of whose weights can be trained; the given one is used up.

    Raises:
        ModelError: the adapters are of a kind that cannot be merged, or do not fit.
        RunError: they are missing, damaged or belong to another model.
    """
    from peft import PeftConfig, get_peft_model

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Model (has|with) `tie_word")
            adapted = get_peft_model(model, PeftConfig.from_pretrained(directory))
        _check_ties(model, directory)
        read_adapters(Path(directory), adapted)
        merged = cast(PreTrainedModel, adapted.merge_and_unload())
    except GraphPOError:
        raise
    except Exception as error:  # of no narrower kind, where a value is one no adapter can have
        raise ModelError(
            f"adapters {directory} cannot be merged into {model.name_or_path}: {first_line(error)}"
        ) from error
    merged.name_or_path = directory  # which further adapters belong to
    merged.requires_grad_(True)
    return merged


def _check_ties(model: PreTrainedModel, directory: str) -> None:
    """Raise ModelError for adapters of the embeddings or the head where these are one weight.

    Merged, both would be adapted.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    adapted = any(isinstance(layer, BaseTunerLayer) for layer in layers)
    if adapted and layers[0].weight is layers[1].weight:
        raise ModelError(
            f"adapters {directory} are on the embeddings or the output head of "
            f"{model.name_or_path}, which are one weight there, and cannot be merged into it; "
            "train others that leave both out"
        )


def read_adapters(directory: Path, model: nn.Module) -> None:
    """Put the adapters of a checkpoint into a model that has adapters, bit for bit.

    Raises:
        RunError: they are missing, damaged or belong to another model.
    """
    from peft import set_peft_model_state_dict

    path = directory / _WEIGHTS_FILE
    if not path.is_file():
        raise RunError(f"checkpoint {directory}: {_WEIGHTS_FILE} is missing; it has no adapters")
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise RunError(f"{path} is damaged: {first_line(error)}; delete that checkpoint") from error
    try:
        result = set_peft_model_state_dict(model, weights)
    except RuntimeError as error:
        reason = first_line(error)
        raise RunError(f"checkpoint {directory} belongs to another model: {reason}") from error
    missing = [name for name in result.missing_keys if ".lora_" in name]
    if missing or result.unexpected_keys:
        first = (missing + result.unexpected_keys)[0]
        raise RunError(f"checkpoint {directory} belongs to another model: adapter {first}")
