"""JSON lines on disk: read with the place of every mistake, written whole or not at all."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from graphpo_agent.atomic import replacing
from graphpo_agent.errors import DataError, json_reason
from graphpo_agent.outputs import check_place

__all__ = ["append_line", "checked_row", "parse_json", "read_rows", "write_rows"]

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise ValueError(f"{text} is too large for a number")
    return value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {twice!r:.40} is there twice in one object; remove one")
    return value


_DECODER = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_finite_float, object_pairs_hook=_unrepeated
)
"""One for all lines: making one costs as much as a short line."""


def read_rows(path: Path, log: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(place, row)`` for every line that is not blank; ``place`` is ``file:line``.

    Of a ``log`` a last line that no newline ends is left out: who wrote it may have been killed.

    Example: the line ``{"id": "a"}``, second in ``tasks.jsonl``, gives
    ``("tasks.jsonl:2", {"id": "a"})``.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object in UTF-8 with finite
            numbers and no key twice.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and (line.endswith(b"\n") or not log):
                    place = f"{path}:{number}"
                    row = parse_json(place, line.rstrip(b"\r\n"))
                    yield place, checked_row(place, row, b"\\u" in line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def parse_json(place: str, text: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        DataError: it is not JSON in UTF-8 with finite numbers, holds an object with a key twice,
            or is nested too deeply.
    """
    try:
        return _DECODER.decode(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON ({json_reason(error)})") from error


def checked_row(place: str, value: Any, escaped: bool) -> dict[str, Any]:
    r"""A row of a file, which must be an object whose strings can be written in UTF-8.

    Args:
        place: where it is, for the message.
        value: what JSON made of it.
        escaped: whether the file has ``\u`` escapes, which alone can hold half a character.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(value).__name__}")
    if escaped and _HALF_CHARACTER.search(json.dumps(value, ensure_ascii=False)):
        raise DataError(f"{place}: holds half a character, such as \\ud800 alone; remove it")
    return value


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line; the file appears, or is replaced, only when complete.

    Raises:
        DataError: the file cannot be written.
        ValueError: a row holds NaN or an infinite number.
    """
    check_place(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error


def append_line(path: Path, line: str) -> int:
    """Append a line to a file, which is as it was where that fails.

    Returns:
        The byte at which the line begins.

    Raises:
        OSError: it cannot be written; names the file.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        if path.exists():
            os.truncate(path, size)
        error.filename = str(path)
        raise
    return size
