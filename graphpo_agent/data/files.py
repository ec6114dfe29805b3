"""The rows of a public data file as it was published: JSON lines, a JSON array, CSV or parquet."""

import csv
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graphpo_agent.data.jsonl import checked_row, parse_json, read_rows
from graphpo_agent.errors import DataError, first_line

__all__ = ["Row", "read_data_file"]

Row = dict[str, Any]

_PARQUET_ROWS = 1024
"""Rows of a parquet file in memory at a time."""
_MAX_CELL = 2**24
"""Characters of a CSV cell at most."""


def read_data_file(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield ``(place, row)`` for every row; a null counts as absent.

    The kind is told by the name (``.parquet``, ``.csv``) and else by the first character: ``[``
    begins a JSON array, anything else JSON lines. ``place`` is ``file:line`` in JSON lines and
    ``file: row N`` (from 1) elsewhere.

    Raises:
        DataError: the file cannot be read, is a pipe, is not what its name says, or names a column
            twice.
    """
    _check_can_be_read_twice(path)
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
    elif path.suffix == ".csv":
        rows = _csv_rows(path)
    elif _first_character(path) == b"[":
        rows = _array_rows(path)
    else:
        rows = read_rows(path)
    for place, row in rows:
        yield place, {name: value for name, value in row.items() if value is not None}


def _check_can_be_read_twice(path: Path) -> None:
    """What was read of a pipe to tell its kind would be gone."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        raise DataError(f"{path}: is not a regular file; write its rows to a file first")


def _first_character(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    except OSError as error:
        raise _unreadable(path, error) from error


def _array_rows(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    escaped = b"\\u" in text
    for number, value in enumerate(parse_json(str(path), text), start=1):
        place = f"{path}: row {number}"
        yield place, checked_row(place, value, escaped)


def _csv_rows(path: Path) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(_MAX_CELL)
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(path, filter(None, reader.fieldnames or ()))
            for number, row in enumerate(reader, start=1):
                place = f"{path}: row {number}"
                if None in row:
                    raise DataError(f"{place}: has more cells than the header; quote its commas")
                yield place, row
    except OSError as error:
        raise _unreadable(path, error) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: not valid CSV in UTF-8 from row {number + 1} on ({error})"
        ) from error


def _check_columns(path: Path, names: Iterable[str]) -> None:
    """Raise DataError where two columns have one name: of two cells one would be lost."""
    ((name, times),) = Counter(names).most_common(1) or [("", 0)]
    if times > 1:
        raise DataError(f"{path}: column {name!r:.40} is there twice; remove or rename one")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                names = batch.schema.names
                columns = [_values(path, name, batch[name]) for name in names]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield f"{path}: row {number}", dict(zip(names, values, strict=True))
    except OSError as error:
        raise _unreadable(path, error) from error
    except pa.ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file ({first_line(error)})") from error


def _values(path: Path, name: str, column: pa.Array) -> list[Any]:
    """The values of a column; DataError names it where Python has none for one of them."""
    try:
        return column.to_pylist()
    except (pa.ArrowException, ValueError, OverflowError) as error:
        reason = f"column {name!r:.40}: {first_line(error)}"
        raise DataError(f"{path}: not a readable parquet file ({reason})") from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read ({first_line(error)})")
