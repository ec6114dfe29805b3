r"""WebDancer's data: questions with answers, and trajectories of its agent.

Question rows have ``question``, ``answer`` and ``tag``. Trajectory rows have ``messages`` (system,
user, then the agent's turns as ``assistant`` and the observations as ``user``), ``answer`` (a list
in a list) and ``tag``; the question is what follows the last line ``User:`` of the first user
message. The tool schemas in ``functions`` are not read: they contradict the prompt's (``queries``
where prompt and calls say ``query``).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from graphpo_agent.data.source import (
    SourceRow,
    Trajectory,
    answer_field,
    text_field,
    text_of,
)
from graphpo_agent.errors import DataError
from graphpo_agent.types import Message, Piece

__all__ = ["read_row"]

_USER = "\nUser: "


def read_row(place: str, row: Mapping[str, Any]) -> SourceRow:
    """One question row or one trajectory row.

    Raises:
        DataError: with place and field, for a row that cannot be used.
    """
    source = text_field(place, row, "tag") if "tag" in row else None
    answers = answer_field(place, _flattened(row), "answer")
    if "messages" not in row:
        return SourceRow(text_field(place, row, "question"), answers, source)
    prompt, turns = _split(place, _messages(place, row["messages"]))
    trajectory = Trajectory(prompt, _pieces(place, len(prompt), turns))
    return SourceRow(_question(place, prompt), answers, source, trajectory=trajectory)


def _flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row, its ``answer`` one list where it is a list of lists."""
    nested = row.get("answer")
    if not isinstance(nested, list) or not all(isinstance(one, list) for one in nested):
        return dict(row)
    return {**row, "answer": [answer for one in nested for answer in one]}


def _messages(place: str, value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise DataError(f"{place}: field 'messages' must be a list, found {value!r:.40}")
    return [_message(place, f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(place: str, label: str, value: Any) -> Message:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        raise DataError(f"{place}: field '{label}' must be an object with role and content")
    return {
        "role": text_of(place, f"{label}.role", value["role"]),
        "content": text_of(place, f"{label}.content", value["content"]),
    }


def _split(
    place: str, messages: Sequence[Message]
) -> tuple[tuple[Message, ...], Sequence[Message]]:
    """The prompt (system and first user message) and what follows, its roles checked."""
    roles = [message["role"] for message in messages]
    start = roles.index("user") + 1 if "user" in roles else 0
    turns = roles[start:]
    alternating = [("assistant", "user")[i % 2] for i in range(len(turns))]
    if roles[:start] not in (["user"], ["system", "user"]):
        raise DataError(f"{place}: field 'messages' must begin with system and user, or user")
    if turns != alternating or len(turns) % 2 == 0:
        raise DataError(
            f"{place}: field 'messages' must alternate assistant and user after the prompt and "
            f"end with assistant, found {', '.join(turns) or 'nothing'}"
        )
    return tuple(messages[:start]), messages[start:]


def _pieces(place: str, start: int, turns: Sequence[Message]) -> tuple[Piece, ...]:
    """Own turns trained, observations not; every one must hold the tag that it is there for."""
    last = len(turns) - 1
    pieces: list[Piece] = []
    for i, turn in enumerate(turns):
        own = i % 2 == 0
        tag = "answer" if i == last else "tool_call" if own else "tool_response"
        if f"<{tag}>" not in turn["content"] or f"</{tag}>" not in turn["content"]:
            raise DataError(
                f"{place}: field 'messages[{start + i}].content' must hold a <{tag}> element"
            )
        pieces.append(Piece(turn["content"], trained=own, role=None if own else "user"))
    return tuple(pieces)


def _question(place: str, prompt: Sequence[Message]) -> str:
    label = f"messages[{len(prompt) - 1}].content"
    _, marker, question = prompt[-1]["content"].rpartition(_USER)
    if not marker:
        raise DataError(f"{place}: field '{label}' has no line 'User: …' with the question")
    return text_of(place, f"{label} after 'User:'", question)
