"""How the published text encoders want queries and passages."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from graphpo_agent.encoder import EncoderEmbedder, Pooling
from graphpo_agent.errors import ModelError, ToolError, first_line
from graphpo_agent.pretrained import check_place, why_not_loaded

__all__ = [
    "PRESETS",
    "EncoderSettings",
    "Preset",
    "check_device",
    "encoder_dimension",
    "resolve_encoder",
]


@dataclass(frozen=True, slots=True)
class Preset:
    """What a family of encoders was trained with.

    Example: ``Preset("mean", query_prefix="query: ", passage_prefix="passage: ")`` is E5's.
    """

    pooling: Pooling
    query_prefix: str = ""
    passage_prefix: str = ""
    normalize: bool = True
    max_tokens: int = 256


PRESETS = {
    "e5": Preset("mean", query_prefix="query: ", passage_prefix="passage: "),
    "bge": Preset("cls", query_prefix="Represent this sentence for searching relevant passages: "),
    "plain": Preset("mean"),
}


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """An encoder and how it is used; what an index must be searched with as it was built.

    Example::

        EncoderSettings("intfloat/e5-base-v2", "mean", "query: ", "passage: ", True, 256)
    """

    model: str
    pooling: Pooling
    query_prefix: str
    passage_prefix: str
    normalize: bool
    max_tokens: int

    def load(self, prefix: str, batch_size: int, device: str) -> EncoderEmbedder:
        """The encoder for texts that follow ``prefix``.

        Raises:
            ModelError: there is no usable model or tokenizer.
            ToolError: there is no such device.
        """
        check_device(device)
        return EncoderEmbedder(
            self.model,
            pooling=self.pooling,
            normalize=self.normalize,
            prefix=prefix,
            batch_size=batch_size,
            max_tokens=self.max_tokens,
            device=device,
        )


def resolve_encoder(
    model: str | Path,
    *,
    preset: str | None = None,
    pooling: str | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    normalize: bool | None = None,
    max_tokens: int | None = None,
) -> EncoderSettings:
    """The settings of ``preset`` with the given ones in their place.

    Args:
        model: a directory in the Hugging Face layout (kept as an absolute path), or a model name.
        preset: e5, bge or plain; None: e5 or bge where the model's name has that word.
        pooling: over the tokens of a text: mean, cls or last.
        query_prefix: written before every query.
        passage_prefix: written before every passage.
        normalize: scale vectors to length 1.
        max_tokens: longer texts lose their end.

    Raises:
        ToolError: no such preset or pooling, or none is given and the name does not tell.
    """
    chosen = _preset_of(str(model)) if preset is None else preset
    if chosen not in PRESETS:
        raise ToolError(
            f"dense index: preset must be one of {', '.join(PRESETS)}, found {preset!r} "
            f"(the name {str(model)!r} does not tell which)"
        )
    given = {
        "pooling": pooling,
        "query_prefix": query_prefix,
        "passage_prefix": passage_prefix,
        "normalize": normalize,
        "max_tokens": max_tokens,
    }
    settings: dict[str, Any] = asdict(PRESETS[chosen])
    settings |= {name: value for name, value in given.items() if value is not None}
    if settings["pooling"] not in get_args(Pooling):
        raise ToolError(
            f"dense index: pooling must be one of {', '.join(get_args(Pooling))}, found {pooling!r}"
        )
    if settings["max_tokens"] < 1:
        raise ToolError(f"dense index: max_tokens must be at least 1, found {max_tokens}")
    place = Path(model)
    return EncoderSettings(str(place.resolve()) if place.is_dir() else str(model), **settings)


def encoder_dimension(model: str) -> int:
    """The length of an encoder's vectors, from its configuration alone.

    Raises:
        ModelError: there is no such model.
    """
    from transformers import AutoConfig

    check_place("encoder", model)
    try:
        return AutoConfig.from_pretrained(model, local_files_only=Path(model).is_dir()).hidden_size
    except (OSError, ValueError, AttributeError) as error:  # the last one: no model of text alone
        reason = why_not_loaded(model, error)
        raise ModelError(f"encoder {model!r} cannot be loaded: {reason}") from error


def check_device(device: str) -> None:
    """Raise ToolError unless torch can compute on ``device``."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ToolError(f"device {device!r} cannot be used: {first_line(error)}") from error


def _preset_of(model: str) -> str | None:
    """The family that the last part of a model's name names as a word of its own."""
    found = re.search(r"(?<![a-z0-9])(e5|bge)(?![a-z0-9])", Path(model).name.lower())
    return found[1] if found else None
