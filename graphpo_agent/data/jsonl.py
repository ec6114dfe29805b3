"""JSON lines on disk: read with the place of every mistake, written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from graphpo_agent.errors import DataError

__all__ = ["read_rows", "write_rows"]


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"{text} is too large for a number")
    return value


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(place, row)`` for every line that is not blank; ``place`` is ``file:line``.

    Example: the line ``{"id": "a"}``, second in ``tasks.jsonl``, gives
    ``("tasks.jsonl:2", {"id": "a"})``.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object in UTF-8 with finite
            numbers.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", _parse(f"{path}:{number}", line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _parse(place: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite_float)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(row).__name__}")
    if b"\\u" in line and not _is_text(json.dumps(row, ensure_ascii=False)):
        raise DataError(f"{place}: holds half a character, such as \\ud800 alone; remove it")
    return row


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line; the file appears, or is replaced, only when complete.

    Raises:
        DataError: the file cannot be written.
        ValueError: a row holds NaN or an infinite number.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
