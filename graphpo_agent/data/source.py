"""What every public data set is read into, and the checks of single fields."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpo_agent.errors import DataError
from graphpo_agent.types import Message, Piece

__all__ = [
    "SourceRow",
    "Trajectory",
    "answer_field",
    "first_of",
    "mapping_field",
    "text_field",
    "text_of",
]

_EXACT = 2.0**53
"""Below it a float tells every whole number from the next."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One recorded conversation that answers a question; ``pieces`` begin and end with the agent.

    Example::

        Trajectory(
            messages=({"role": "user", "content": "mentor of Karo Venn?"},),
            pieces=(Piece("<tool_call>…</tool_call>", trained=True),
                    Piece("<tool_response>…</tool_response>", trained=False, role="user"),
                    Piece("<answer>Ola Brand</answer>", trained=True)),
        )
    """

    messages: tuple[Message, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One checked row of a public file.

    Example::

        SourceRow("mentor of Karo Venn?", ("Ola Brand",), source="hotpotqa", source_id="train_7")
    """

    question: str
    answers: tuple[str, ...]
    source: str | None = None
    """The data set that the row says it is from."""
    source_id: str | None = None
    """The row's own id; not unique over several sources."""
    aug_answers: tuple[str, ...] = ()
    """Aliases of the answers."""
    unanswerable: bool = False
    """The question has no answer by design."""
    left_out: str | None = None
    """Why the row cannot be used, in a few words."""
    trajectory: Trajectory | None = None
    prompt: tuple[Message, ...] = ()
    """What the row asks a policy, word for word; empty where it has none."""
    prompt_has_tools: bool = False
    """The prompt is for a policy that calls tools (verl's), not for one that writes tags."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else a task keeps of the row."""


def text_field(place: str, row: Mapping[str, Any], name: str) -> str:
    """``row[name]``, stripped, which must be a text that is not blank.

    Raises:
        DataError: it is missing, of another type or blank.
    """
    return text_of(place, name, _present(place, row, name))


def text_of(place: str, label: str, value: Any) -> str:
    """A value, stripped, which must be a text that is not blank; ``label`` names its field.

    Raises:
        DataError: it is of another type or blank.
    """
    if not isinstance(value, str):
        raise DataError(f"{place}: field '{label}' must be a string, found {value!r:.40}")
    if not value.strip():
        raise DataError(f"{place}: field '{label}' must not be empty")
    return value.strip()


def answer_field(place: str, row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The answers in ``row[name]``: a text, a number or a list of these; blank ones left out.

    Example: ``{"answer": ["1987", 1987.0, ""]}`` gives ``("1987",)``.

    Raises:
        DataError: it is missing, or holds something else.
    """
    value = _present(place, row, name)
    values: Sequence[Any] = value if isinstance(value, list) else (value,)
    texts = [_answer(place, name, one).strip() for one in values]
    return tuple(dict.fromkeys(text for text in texts if text))


def first_of(row: Mapping[str, Any], *names: str) -> str | None:
    """The first of these fields that a row has, as text; None where all are missing or null.

    Example: ``first_of({"task_id": None, "id": 7.0}, "task_id", "id")`` is ``"7"``.
    """
    return next((_text(row[name]) for name in names if row.get(name) is not None), None)


def mapping_field(place: str, row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """``row[name]``, which must be an object.

    Raises:
        DataError: it is missing or of another type.
    """
    value = _present(place, row, name)
    if not isinstance(value, dict):
        raise DataError(f"{place}: field '{name}' must be an object, found {value!r:.40}")
    return value


def _present(place: str, row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise DataError(f"{place}: field '{name}' is missing")
    return row[name]


def _answer(place: str, name: str, value: Any) -> str:
    finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, str | int | float) or not finite:
        raise DataError(
            f"{place}: field '{name}' must hold strings or finite numbers, found {value!r:.40}"
        )
    return _text(value)


def _text(value: Any) -> str:
    """A whole number as such, also where a column with gaps made it a float."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return str(int(value) if whole else value)
