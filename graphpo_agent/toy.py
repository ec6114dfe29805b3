"""``graphpo data toy``: a generated world and an untrained policy that can read and write it."""

import inspect
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.data.toy_hops import hops_phrases, make_hops
from graphpo_agent.data.toy_kb import kb_phrases, make_kb
from graphpo_agent.data.toy_model import make_toy_model
from graphpo_agent.data.toy_reach import make_reach, reach_phrases
from graphpo_agent.data.toy_search import SearchWriting
from graphpo_agent.data.toy_trace import make_trace, trace_phrases
from graphpo_agent.errors import ConfigError, DataError, first_line
from graphpo_agent.locks import directory_lock
from graphpo_agent.rollout.dialects.base import Dialect, ToolCall
from graphpo_agent.rollout.dialects.hermes import HermesDialect
from graphpo_agent.rollout.dialects.search_r1 import SearchR1Dialect
from graphpo_agent.types import Document, Finding, Piece, ToolResult
from graphpo_agent.yaml_text import NotYaml, parse_yaml

__all__ = ["WRITINGS", "make_toy"]

_MODEL_KNOBS = ("hidden_size", "num_layers", "num_heads", "max_context_tokens")
_WORLDS: Mapping[str, tuple[Callable[..., None], Callable[..., tuple[str, ...]]]] = {
    "kb": (make_kb, kb_phrases),
    "hops": (make_hops, hops_phrases),
    "reach": (make_reach, reach_phrases),
    "trace": (make_trace, trace_phrases),
}
"""How each is made, and the phrases of its texts; some need the same arguments."""
_MADE = "world.json"
"""What a complete world was made of: its name and all its knobs."""


_NEEDED = ("num_train", "num_heldout", "num_demonstrations", *_MODEL_KNOBS)
"""Knobs of which a world or a model has at least one."""


def make_toy(world: str, directory: Path, knobs: Sequence[str]) -> int | None:
    """Write a world and ``untrained/``, a random Qwen2 with a tokenizer for it.

    Nothing is written over: where the same world is complete nothing happens. Other files stay.

    Args:
        world: ``kb``, ``hops``, ``reach`` or ``trace``.
        directory: receives train, held-out and demonstration files (and corpus and index).
        knobs: ``name=value``; parameters of the world's ``make_...``, and of the model
            hidden_size, num_layers, num_heads, max_context_tokens. For kb and hops also
            ``dialect=search_r1`` or ``dialect=hermes``, in which the demonstrations are written.

    Returns:
        The model's number of parameters; None: this world is there.

    Raises:
        ConfigError: a knob that the world does not have, knobs that do not go together, another
            world or files of its names are there, or another process is writing there.
        DataError: the directory cannot be written.
    """
    make, phrases = _WORLDS[world]
    parameters = {
        name: parameter
        for source in (make, make_toy_model)
        for name, parameter in inspect.signature(source).parameters.items()
        if parameter.annotation in (int, float)
    }
    known: dict[str, type] = {name: each.annotation for name, each in parameters.items()}
    usual: dict[str, Any] = {name: each.default for name, each in parameters.items()}
    searches = "writing" in inspect.signature(make).parameters
    if searches:
        known["dialect"], usual["dialect"] = str, "search_r1"
    values = dict(_knob(knob, known) for knob in knobs)
    made = {"world": world} | usual | values
    if _is_there(directory, made):
        return None
    writing = WRITINGS[values.pop("dialect", "search_r1")]
    model = {name: values.pop(name) for name in _MODEL_KNOBS if name in values}
    arguments = {**values, "writing": writing} if searches else values
    named = inspect.signature(phrases).parameters
    with _filled(directory) as new:
        make(new, **arguments)
        size = make_toy_model(
            new / "untrained",
            _texts(new, writing),
            phrases=phrases(**{name: arguments[name] for name in named if name in arguments}),
            seed=values.get("seed", 0),
            **model,
        )
        (new / _MADE).write_text(json.dumps(made))
    return size


def _is_there(directory: Path, made: Mapping[str, Any]) -> bool:
    """Whether a directory holds a complete world that was made so.

    Raises:
        ConfigError: it holds another one.
    """
    try:
        there = dict(json.loads((directory / _MADE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False
    others = [f"{name}={there.get(name)}" for name in made if there.get(name) != made[name]]
    if others:
        kind = there.get("world")
        held = f"a {kind} world" if kind != made["world"] else f"a world with {', '.join(others)}"
        raise ConfigError(f"{directory} holds {held}: name another directory, or delete that one")
    return True


def _knob(text: str, known: Mapping[str, type]) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or name not in known:
        raise ConfigError(f"knob {text!r}: write name=value with one of {', '.join(sorted(known))}")
    if known[name] is str:
        if value not in WRITINGS:
            raise ConfigError(f"knob {text!r}: the value must be one of {', '.join(WRITINGS)}")
        return name, value
    try:
        number = parse_yaml(value)
    except NotYaml:
        raise ConfigError(f"knob {text!r:.200}: the value must be a number") from None
    whole = isinstance(number, int) and not isinstance(number, bool)
    least = int(name in _NEEDED)
    if known[name] is int and not (whole and least <= number < 2**63):
        raise ConfigError(
            f"knob {text!r:.200}: the value must be a whole number of at least {least} and less "
            "than 2**63"
        )
    if not (whole or isinstance(number, float)) or (known[name] is float and not 0 <= number <= 1):
        raise ConfigError(f"knob {text!r}: the value must be a number in [0, 1]")
    return name, number


@contextmanager
def _filled(directory: Path) -> Iterator[Path]:
    """A new directory whose entries move to ``directory`` if the ``with`` block succeeds.

    What says that all are there comes last.
    """
    new, made_here = directory / ".new", not directory.exists()
    busy = ConfigError(f"{directory}: another process is writing a world there; wait for it")
    try:
        with directory_lock(directory, busy):
            try:
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
                yield new
                entries = sorted(new.iterdir(), key=lambda entry: (entry.name == _MADE, entry))
                for taken in (directory / entry.name for entry in entries):
                    if taken.exists():
                        raise ConfigError(
                            f"{taken} is there, and no complete world of these knobs: name another "
                            "directory, or delete that one"
                        )
                for entry in entries:
                    entry.rename(directory / entry.name)
            finally:
                shutil.rmtree(new, ignore_errors=True)
                if made_here and not any(directory.iterdir()):
                    directory.rmdir()
    except OSError as error:
        raise DataError(f"{directory}: cannot be written ({first_line(error)})") from error


def _observer(dialect: Dialect) -> Callable[[str, Sequence[Document]], Piece]:
    """What the environment writes in a dialect after a search."""

    def observe(query: str, documents: Sequence[Document]) -> Piece:
        result = ToolResult(findings=(Finding(query, tuple(documents)),))
        observation = dialect.observation(ToolCall("search", {"query": query}), result)
        return Piece(observation.text, trained=False, role=observation.role)

    return observe


_HERMES_CALL = ('\n<tool_call>\n{"name": "search", "arguments": {"query": "', '"}}\n</tool_call>')
WRITINGS = {
    "search_r1": SearchWriting(
        write_search=lambda query: f"<search> {query}</search>",
        write_observation=_observer(SearchR1Dialect()),
        phrases=("<search>", "</search>", "<information>", "</information>"),
    ),
    "hermes": SearchWriting(
        write_search=lambda query: f"{_HERMES_CALL[0]} {query}{_HERMES_CALL[1]}",
        write_observation=_observer(HermesDialect({}, system_prompt="", documents="search_r1")),
        phrases=(*_HERMES_CALL, "<tool_response>\n", "\n</tool_response>", "user\n", "assistant\n"),
    ),
}


def _texts(directory: Path, writing: SearchWriting) -> Iterator[str]:
    """Everything the policy will read or write, for its tokenizer."""
    for name in ("train.jsonl", "heldout.jsonl"):
        for task in load_tasks(directory / name):
            yield task.question
    for demonstration in load_demonstrations(directory / "demonstrations.jsonl"):
        yield from (piece.text for piece in demonstration.pieces)
    corpus = directory / "corpus.jsonl"
    if corpus.exists():
        for row, line in enumerate(corpus.open(encoding="utf-8")):
            document = Document(str(row), json.loads(line)["contents"])
            yield writing.write_observation("", [document]).text
