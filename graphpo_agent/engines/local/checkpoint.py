"""Weights, tokenizer and optimiser state on disk, written whole or not at all.

A checkpoint is an ordinary Hugging Face model directory plus ``optimizer.pt``. Where adapters are
trained it is a peft adapter directory instead, which names the model that they belong to.
"""

import io
import os
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.core_model_loading import PrefixChange

from graphpo_agent.atomic import replace_directory
from graphpo_agent.engines.local.adapter_files import read_adapters, under_adapters
from graphpo_agent.engines.local.lora import has_adapters, merged_model
from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import ModelError, RunError, first_line, first_sentence
from graphpo_agent.pretrained import save_pretrained

__all__ = ["read_checkpoint", "write_checkpoint", "write_model"]

_STATE_FILE = "optimizer.pt"


def write_model(directory: Path, model: PreTrainedModel, tokenizer: HfTokenizer) -> None:
    """Write a Hugging Face model directory, adapters merged; an existing one is replaced.

    Raises:
        RunError: it cannot be written; nothing is left behind and an existing one stays.
    """
    plain = merged_model(model) if has_adapters(model) else model
    with _whole(directory) as partial:
        _save_model(partial, plain, tokenizer)


def write_checkpoint(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: HfTokenizer,
    optimizer: Optimizer,
    counters: Mapping[str, int],
) -> None:
    """Write the model, or only its adapters, with the optimiser state.

    An existing directory is replaced.

    Raises:
        RunError: it cannot be written; nothing is left behind and an existing one stays.
    """
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "counters": dict(counters)}, buffer)
    with _whole(directory) as partial:
        _save_model(partial, model, tokenizer)
        (partial / _STATE_FILE).write_bytes(buffer.getbuffer())


def read_checkpoint(
    directory: Path, model: PreTrainedModel, optimizer: Optimizer, counters: Collection[str]
) -> dict[str, int]:
    """Put the stored weights and optimiser state into ``model`` and ``optimizer``, bit for bit.

    A model with adapters receives adapters. The optimiser keeps its own settings (betas, weight
    decay), whatever it was stored with.

    Returns:
        What was stored of the ``counters`` of these names.

    Raises:
        RunError: weights or optimiser state are missing, damaged or belong to another model.
    """
    path = directory / _STATE_FILE
    if not path.is_file():
        raise RunError(
            f"checkpoint {directory}: {_STATE_FILE} is missing; name or keep whole checkpoints only"
        )
    weights = None
    if not has_adapters(model):
        if under_adapters(str(directory))[1]:
            raise RunError(
                f"checkpoint {directory} holds adapters: go on with its run's model.lora"
            )
        try:
            weights = load_model(str(directory), model.dtype).state_dict()
        except ModelError as error:
            raise RunError(f"{error}, or delete that checkpoint") from error
    state, counted = _read_state(path, model.device, counters)
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    try:
        if weights is None:
            read_adapters(directory, model)
        else:
            model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"checkpoint {directory} belongs to another model: {first_line(error)}"
        ) from error
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    return counted


def _read_state(
    path: Path, device: torch.device, counters: Collection[str]
) -> tuple[dict[str, Any], dict[str, int]]:
    """The optimiser's state and the counters of these names.

    Raises:
        RunError: the file holds something else.
    """
    try:
        stored = torch.load(path, map_location=device, weights_only=True)
        state = {name: stored["optimizer"][name] for name in ("state", "param_groups")}
        return state, {name: int(stored["counters"][name]) for name in counters}
    except Exception as error:  # of no narrower kind, where the bytes are any bytes
        raise RunError(
            f"{path} is damaged: {first_sentence(error)}; delete that checkpoint"
        ) from error


def _save_model(directory: Path, model: PreTrainedModel, tokenizer: HfTokenizer) -> None:
    with warnings.catch_warnings(), _named_as_layers(model):
        # Of a model that is made of adapters: peft looks there for the size of a vocabulary.
        warnings.filterwarnings("ignore", message="Could not find a config file")
        save_pretrained(directory, model, tokenizer.hf)


@contextmanager
def _named_as_layers(model: PreTrainedModel) -> Iterator[None]:
    """Weights are saved without the prefix that they had in a larger model, of images as well.

    It is no part of the model that config.json names, and vLLM does not look for it there.
    """
    stored: Any = model
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        kept = [each for each in conversions if not isinstance(each, PrefixChange)]
        stored._weight_conversions = kept
    try:
        yield
    finally:
        if conversions is not None:
            stored._weight_conversions = conversions


@contextmanager
def _whole(directory: Path) -> Iterator[Path]:
    """A new directory that takes the place of ``directory`` if the ``with`` block succeeds.

    Where that is a link, it stays one: what it points to is replaced.
    """
    place = Path(os.path.realpath(directory))
    partial = place.with_name(f".{place.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        replace_directory(place, partial)
    except OSError as error:
        raise RunError(f"{directory} cannot be written: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
