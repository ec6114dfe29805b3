"""Reading a frozen model and its tokenizer from a directory or from the hub, and saving others."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from graphpo_agent.errors import ModelError, first_line

__all__ = [
    "Dtype",
    "check_place",
    "control_tokens",
    "load_pretrained",
    "most_tokens",
    "quiet_transformers",
    "render_chat",
    "save_pretrained",
    "why_not_loaded",
]

Dtype = Literal["float32", "bfloat16", "float16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_place(kind: str, name: str) -> None:
    """Let the name of a model on the hub pass, and a directory that exists.

    Example: ``check_place("encoder", "/models/e5")``

    Raises:
        ModelError: ``name`` is a path, and no directory is there.
    """
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise ModelError(f"{kind} {name!r} cannot be loaded: there is no such directory")


def why_not_loaded(name: str, error: Exception) -> str:
    """What transformers says of a model; where it found none, that it is no directory either."""
    if isinstance(error, StrictDataclassError):  # all of what is wrong with a value
        return f"config.json: {' '.join(str(error).split())}"
    reason = first_line(error).removesuffix(".")
    if not isinstance(error, OSError):
        return reason
    if error.filename:
        return f"{error.filename}: {reason}"
    return reason if Path(name).is_dir() else f"{reason}; no such directory is here"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside the ``with`` block transformers says nothing of the models that it makes.

    Which weights a model lacks is ours to tell, and kernels for which it asks are not all used.
    """
    transformers_logging.disable_progress_bar()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def load_pretrained(
    kind: str,
    name: str,
    auto_class: Any,
    *,
    device: str,
    dtype: Dtype = "float32",
    optional: str = "\0",
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """A tokenizer and a complete model for inference; a directory is read without the network.

    Example: ``load_pretrained("encoder", "intfloat/e5-base-v2", AutoModel, device="cpu")``

    Args:
        kind: what messages call it.
        name: a directory in the Hugging Face layout, or a model name.
        auto_class: of transformers, such as ``AutoModel``.
        device: where it is to run.
        dtype: of its weights.
        optional: weights whose names begin so may be missing.

    Raises:
        ModelError: there is no usable model or tokenizer at ``name``, weights are missing, or
            there is no such device or dtype.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"{kind} {name}: dtype {dtype!r} is unknown; use {', '.join(_DTYPES)}")
    check_place(kind, name)
    local = Path(name).is_dir()
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
            model, info = auto_class.from_pretrained(
                name, dtype=_DTYPES[dtype], local_files_only=local, output_loading_info=True
            )
        model = model.to(torch.device(device)).eval()
        model.config.return_dict = True  # what passes give is read by name
    except Exception as error:  # of no narrower kind, where a file is damaged
        reason = why_not_loaded(name, error)
        raise ModelError(
            f"{kind} {name!r} cannot be loaded: {reason}; give a directory with config.json, "
            "weights and tokenizer, or the name of a model on the hub, and a device of this machine"
        ) from error
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(optional))
    if missing:
        raise ModelError(
            f"{kind} {name!r} cannot be loaded: {len(missing)} weights are missing, first "
            f"{missing[0]}; the directory does not hold a complete {kind}"
        )
    return tokenizer, model


def most_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int:
    """The longest text that both take; a tokenizer may not say what its model has positions for.

    Example: 512 for ``intfloat/e5-base-v2``
    """
    positions = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    tables = (each for name, each in model.named_modules() if name.endswith("position_embeddings"))
    padding = getattr(next(tables, None), "padding_idx", None)
    if padding is not None:  # RoBERTa's positions begin behind it
        positions -= padding + 1
    return min(positions, tokenizer.model_max_length)


def save_pretrained(directory: Path, *parts: Any) -> None:
    """Write a model, a tokenizer, … of transformers into a directory.

    Raises:
        OSError: a file cannot be written, whichever library writes it.
    """
    transformers_logging.disable_progress_bar()
    try:
        for part in parts:
            part.save_pretrained(directory)
    except Exception as error:  # safetensors' own; tokenizers' are of no narrower kind
        said = re.search(r"\(os error (\d+)\)", str(error))
        if said is None:
            raise
        number = int(said[1])
        raise OSError(number, os.strerror(number)) from error


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Spelling → id of every token that only a template or the sampler may produce.

    Example: ``{"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}``
    """
    added = {
        token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    return {**added, **dict(named)}


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], *, reply: bool
) -> str:
    """The text that a chat template makes of a conversation.

    Args:
        tokenizer: with a chat template.
        messages: the conversation.
        reply: whether the text ends where the model's reply begins.

    Raises:
        ModelError: the template refuses these messages.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply)
    except TemplateError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"chat template of {tokenizer.name_or_path}: {reason}") from error
    assert isinstance(text, str)
    return text
