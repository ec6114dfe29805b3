"""Task files and demonstration files.

A task is one line ``{"id", "question", "answers": [str], "metadata": {}}`` (``metadata`` may be
absent). A demonstration is one line ``{"id", "messages": [{"role", "content"}],
"pieces": [{"text", "trained", "role"}], "ends"}`` (``ends`` may be absent: true; ``role`` too:
the piece continues the policy's own message).
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from graphpo_agent.data.jsonl import read_rows, write_rows
from graphpo_agent.errors import DataError
from graphpo_agent.types import Demonstration, Message, Piece, Task

__all__ = ["load_demonstrations", "load_tasks", "write_demonstrations", "write_tasks"]

T = TypeVar("T")

_OF_TASK = {"id", "question", "answers", "metadata"}
_JSON_NAMES = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}


def load_tasks(*paths: Path) -> list[Task]:
    """Read task files. Two tasks may ask the same question, but not have the same id.

    Example: the line ``{"id": "kb-1", "question": "when: ...", "answers": ["1987"]}`` gives
    ``Task(id="kb-1", question="when: ...", answers=("1987",), metadata={})``.

    Raises:
        DataError: with file, line and field, for a file without tasks or a row that cannot be used.
    """
    first_place: dict[str, str] = {}
    tasks: list[Task] = []
    for path in paths:
        try:
            own = [_task(place, row) for place, row in _unique_rows(path, _OF_TASK, first_place)]
        except DataError as error:
            if path.is_file() and not _begins_as_task(path):
                raise DataError(
                    f"{error}; `graphpo data prepare` makes tasks of a data set's own file"
                ) from error
            raise
        if not own:
            raise DataError(f"{path}: holds no tasks")
        tasks += own
    return tasks


def load_demonstrations(path: Path) -> list[Demonstration]:
    """Read a demonstration file.

    Raises:
        DataError: with file, line and field, for an empty file or a row that cannot be used.
    """
    rows = _unique_rows(path, {"id", "messages", "pieces", "ends"}, {})
    demonstrations = [_demonstration(place, row) for place, row in rows]
    if not demonstrations:
        raise DataError(f"{path}: holds no demonstrations")
    return demonstrations


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Write a task file that ``load_tasks`` reads back; whole or not at all.

    Raises:
        DataError: with task and field, for a task that could not be read back.
    """
    write_rows(path, (_task_row(task) for task in tasks))


def write_demonstrations(path: Path, demonstrations: Iterable[Demonstration]) -> None:
    """Write a file that ``load_demonstrations`` reads back; whole or not at all."""
    write_rows(path, (_demonstration_row(demonstration) for demonstration in demonstrations))


def _begins_as_task(path: Path) -> bool:
    """Whether the first row has a task's fields and no others."""
    try:
        _, row = next(read_rows(path))
    except DataError:
        return False
    return _OF_TASK - {"metadata"} <= row.keys() <= _OF_TASK


def _unique_rows(
    path: Path, allowed: set[str], first_place: dict[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file and their places; ``first_place`` gathers every id's."""
    for place, row in read_rows(path):
        for field in row:
            if field not in allowed:
                raise DataError(f"{place}: field '{field}' is not one of {sorted(allowed)}")
        identifier = _field(place, row, "id", str)
        if identifier in first_place:
            raise DataError(
                f"{place}: field 'id' repeats '{identifier}' of {first_place[identifier]}"
            )
        first_place[identifier] = place
        yield place, row


def _field(place: str, row: Mapping[str, Any], name: str, kind: type[T], label: str = "") -> T:
    """``row[name]``, which must be there and of this type; ``label`` is its name in the message."""
    label = label or name
    if name not in row:
        raise DataError(f"{place}: field '{label}' is missing")
    if not isinstance(row[name], kind):
        raise DataError(
            f"{place}: field '{label}' must be {_JSON_NAMES[kind]}, found {row[name]!r:.40}"
        )
    return row[name]


def _objects(place: str, row: Mapping[str, Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of the non-empty list ``row[name]``, each with its label."""
    values = _field(place, row, name, list)
    if not values:
        raise DataError(f"{place}: field '{name}' must not be empty")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(f"{place}: field '{name}[{index}]' must be an object")
        yield f"{name}[{index}]", value


def _task(place: str, row: Mapping[str, Any]) -> Task:
    question = _field(place, row, "question", str)
    if not question.strip():
        raise DataError(f"{place}: field 'question' must not be empty")
    answers = _field(place, row, "answers", list)
    if not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{place}: field 'answers' must hold strings, found {answers!r:.40}")
    metadata = _field(place, {"metadata": {}, **row}, "metadata", dict)
    return Task(row["id"], question, tuple(answers), metadata)


def _demonstration(place: str, row: Mapping[str, Any]) -> Demonstration:
    messages: list[Message] = []
    for label, message in _objects(place, row, "messages"):
        role = _field(place, message, "role", str, f"{label}.role")
        content = _field(place, message, "content", str, f"{label}.content")
        messages.append({"role": role, "content": content})
    pieces: list[Piece] = []
    for label, piece in _objects(place, row, "pieces"):
        text = _field(place, piece, "text", str, f"{label}.text")
        trained = _field(place, piece, "trained", bool, f"{label}.trained")
        role = _field(place, piece, "role", str, f"{label}.role") if "role" in piece else None
        if trained and role is not None:
            raise DataError(f"{place}: field '{label}' is trained and has a role: only a reply has")
        pieces.append(Piece(text, trained, role))
    if not any(piece.trained for piece in pieces):
        raise DataError(f"{place}: field 'pieces' holds no trained piece")
    ends = _field(place, {"ends": True, **row}, "ends", bool)
    return Demonstration(row["id"], tuple(messages), tuple(pieces), ends)


def _task_row(task: Task) -> dict[str, Any]:
    answers = task.answers  # a text alone is no list of its characters
    row: dict[str, Any] = {
        "id": task.id,
        "question": task.question,
        "answers": answers if isinstance(answers, str) else list(answers),
        "metadata": dict(task.metadata),
    }
    place = f"task {task.id!r:.60}"
    _field(place, row, "id", str)
    _task(place, row)
    return row


def _demonstration_row(demonstration: Demonstration) -> dict[str, Any]:
    return {
        "id": demonstration.id,
        "messages": [dict(message) for message in demonstration.messages],
        "pieces": [_piece_row(piece) for piece in demonstration.pieces],
        "ends": demonstration.ends,
    }


def _piece_row(piece: Piece) -> dict[str, Any]:
    row: dict[str, Any] = {"text": piece.text, "trained": piece.trained}
    return row if piece.role is None else row | {"role": piece.role}
