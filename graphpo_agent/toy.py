"""``graphpo data toy``: a generated world and an untrained policy that can read and write it."""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.data.toy_kb import KB_PHRASES, make_kb
from graphpo_agent.data.toy_model import make_toy_model
from graphpo_agent.data.toy_reach import make_reach, reach_phrases
from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.dialects import SearchR1Dialect
from graphpo_agent.types import Document, ToolResult
from tools.search import format_documents

__all__ = ["make_toy"]

_MODEL_KNOBS = ("hidden_size", "num_layers", "num_heads", "max_context_tokens")


def make_toy(world: str, directory: Path, knobs: Sequence[str]) -> int:
    """Write a world and ``untrained/``, a random Qwen2 with a tokenizer for it.

    Args:
        world: ``kb`` or ``reach``.
        directory: receives train, held-out and demonstration files (and corpus and index).
        knobs: ``name=value``; parameters of ``make_kb`` or ``make_reach``, and of the model
            hidden_size, num_layers, num_heads, max_context_tokens.

    Returns:
        The model's number of parameters.

    Raises:
        ConfigError: a knob that the world does not have.
    """
    make: Callable[..., None] = make_kb if world == "kb" else make_reach
    known = {
        name: parameter.annotation
        for source in (make, make_toy_model)
        for name, parameter in inspect.signature(source).parameters.items()
        if parameter.annotation in (int, float)
    }
    values = dict(_knob(knob, known) for knob in knobs)
    model = {name: values.pop(name) for name in _MODEL_KNOBS if name in values}
    if world == "kb":
        make_kb(directory, format_observation=_observation_text, **values)
        phrases = KB_PHRASES
    else:
        make_reach(directory, **values)
        phrases = reach_phrases(values["limit"]) if "limit" in values else reach_phrases()
    return make_toy_model(
        directory / "untrained",
        _texts(directory),
        phrases=phrases,
        seed=values.get("seed", 0),
        **model,
    )


def _knob(text: str, known: Mapping[str, type]) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or name not in known:
        raise ConfigError(f"knob {text!r}: write name=value with one of {', '.join(sorted(known))}")
    number = yaml.safe_load(value)
    whole = isinstance(number, int) and not isinstance(number, bool)
    if known[name] is int and not (whole and number >= 0):
        raise ConfigError(f"knob {text!r}: the value must be a whole number of at least 0")
    if not (whole or isinstance(number, float)):
        raise ConfigError(f"knob {text!r}: the value must be a number")
    return name, number


def _observation_text(documents: Sequence[Document]) -> str:
    """What the agent reads after a search that found these documents."""
    result = ToolResult(format_documents(documents), tuple(documents))
    return SearchR1Dialect().observation(result).text


def _texts(directory: Path) -> Iterator[str]:
    """Everything the policy will read or write, for its tokenizer."""
    for name in ("train.jsonl", "heldout.jsonl"):
        for task in load_tasks(directory / name):
            yield task.question
    for demonstration in load_demonstrations(directory / "demonstrations.jsonl"):
        yield from (text for text, _ in demonstration.pieces)
    corpus = directory / "corpus.jsonl"
    if corpus.exists():
        for row, line in enumerate(corpus.open(encoding="utf-8")):
            yield _observation_text([Document(str(row), json.loads(line)["contents"])])
