r"""Search-R1's corpus on disk: one ``{"id": "0", "contents": "\"Title\"\ntext"}`` per line.

ASearcher's rows also have a ``url``; other keys are ignored. A corpus is never held in memory:
rows are read from the file by the byte ranges of their lines. It is not mapped, as a mapped file
that somebody cuts would end the process by a signal.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import DataError, json_reason
from graphpo_agent.plain_text import plain_text
from graphpo_agent.types import Document
from retrievers.progress import progress

__all__ = [
    "Corpus",
    "Lines",
    "checked_rows",
    "line_ranges",
    "read_corpus",
    "scan_corpus",
]

_FIELDS = ("id", "contents")
_HEAD_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 24


class Lines:
    """Lines of an open file, whatever takes its name meanwhile. Threads may share it.

    Example: ``Lines(Path("corpus.jsonl")).row("corpus.jsonl: row 0", 0, 38, ("id", "contents"))``
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be read.
        """
        self._path = path
        self._file = path.open("rb", buffering=0)

    def fingerprint(self) -> dict[str, Any]:
        """What tells another version of the file without reading all of it: size and head.

        Raises:
            OSError: it cannot be read.
        """
        return _fingerprint(self._file.fileno())

    def line(self, start: int, end: int) -> bytes:
        """The bytes in [start, end).

        Raises:
            DataError: the file holds them no more, or cannot be read.
        """
        try:
            line = os.pread(self._file.fileno(), end - start, start)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror})") from error
        if len(line) < end - start:
            raise _changed(self._path)
        return line

    def row(self, place: str, start: int, end: int, fields: Sequence[str]) -> dict[str, Any]:
        """The JSON object there, ``place`` in messages; its ``fields`` are strings.

        Raises:
            DataError: there is none, or the file holds it no more.
        """
        return _row(place, self.line(start, end), fields)


class Corpus:
    r"""The documents of a corpus file by row number. Threads may share it.

    Example::

        corpus = read_corpus(Path("corpus.jsonl"))
        corpus.document(17, score=9.3)
        # Document(id="17", contents='"Karo Venner"\n...', score=9.3, url=None)

    Attributes:
        path: the file.
        ranges: [num_docs, 2] where each row's line starts and ends, in bytes.
        fingerprint: of the file when it was opened; see ``Lines.fingerprint``.
    """

    def __init__(self, path: Path, ranges: NDArray[np.int64]) -> None:
        """Open the file.

        Raises:
            OSError: it cannot be read.
        """
        self.path = path
        self.ranges = ranges
        self._lines = Lines(path)
        self.fingerprint = self._lines.fingerprint()

    def __len__(self) -> int:
        return len(self.ranges)

    def check_unchanged(self) -> None:
        """Raise DataError unless ``path`` still leads to what was opened."""
        if _fingerprint_at(self.path) != self.fingerprint:
            raise _changed(self.path)

    def line(self, row: int) -> bytes:
        """The row as it stands in the file.

        Raises:
            DataError: the file was cut.
        """
        start, end = self.ranges[row]
        return self._lines.line(int(start), int(end))

    def document(self, row: int, score: float | None = None) -> Document:
        """The document of a row.

        Raises:
            DataError: the row is not a document, or the file was cut.
        """
        line = self.line(row)
        fields = _row(f"{self.path}: row {row}", line, _FIELDS)
        contents = fields["contents"]
        if b"\\ud" in line or b"\\uD" in line:
            contents = plain_text(contents)
        return Document(fields["id"], contents, score, fields.get("url"))

    def texts(self, start: int, stop: int) -> list[str]:
        """The contents of the rows in [start, stop)."""
        return [self.document(row).contents for row in range(start, min(stop, len(self)))]


def read_corpus(path: Path) -> Corpus:
    """A corpus all of whose rows have been checked.

    Raises:
        DataError: see ``scan_corpus``; or another file took its place meanwhile.
    """
    before = _fingerprint_at(path)
    corpus = Corpus(path, scan_corpus(path))
    if corpus.fingerprint != before:
        raise _changed(path)
    return corpus


def scan_corpus(path: Path) -> NDArray[np.int64]:
    """Check every row and return the [num_docs, 2] byte ranges of their lines.

    Blank lines are no rows. Memory: 24 bytes a row, whatever the ids are.

    Raises:
        DataError: the file cannot be read or holds no documents; a row is no JSON object, a field
            is missing or no string, or an id is there twice (file, line and field).
    """
    ranges, hashes = array("q"), array("q")
    for start, end, row in checked_rows(path, "checking the corpus", _FIELDS):
        ranges.extend((start, end))
        hashes.append(hash(row["id"]))
    if not ranges:
        raise DataError(f"{path}: holds no documents")
    corpus = Corpus(path, np.frombuffer(ranges, dtype=np.int64).reshape(-1, 2))
    _refuse_repeated_ids(corpus, np.frombuffer(hashes, dtype=np.int64))
    return corpus.ranges


def line_ranges(path: Path) -> NDArray[np.int64]:
    """The [num_lines, 2] byte ranges of a file's lines, blank ones left out; nothing is checked.

    Raises:
        DataError: the file cannot be read or has no lines.
    """
    newlines: list[NDArray[np.int64]] = []
    try:
        size = path.stat().st_size
        with path.open("rb") as file, progress("finding lines", size, "B") as bar:
            while block := file.read(_BLOCK_BYTES):
                found = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
                newlines.append(found + file.tell() - len(block))
                bar.update(len(block))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    ends = np.unique(np.concatenate([*newlines, [size - 1]])) + 1
    ranges = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1)
    ranges = ranges[ends - ranges[:, 0] > len("\r\n")]
    if not len(ranges):
        raise DataError(f"{path}: holds no documents")
    return ranges


def checked_rows(
    path: Path, description: str, fields: Sequence[str]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Start, end and object of every line that is not blank, each byte of the file shown as done.

    Raises:
        DataError: the file cannot be read, or a row is none (file, line and field).
    """
    start = 0
    try:
        size = path.stat().st_size
        with path.open("rb") as file, progress(description, size, "B") as bar:
            for number, line in enumerate(file, start=1):
                end = start + len(line)
                if line.strip():
                    yield start, end, _row(f"{path}:{number}", line, fields)
                bar.update(len(line))
                start = end
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _fingerprint(number: int) -> dict[str, Any]:
    """Of the file that a descriptor is open on."""
    head = hashlib.sha256(os.pread(number, _HEAD_BYTES, 0)).hexdigest()
    return {"corpus_bytes": os.fstat(number).st_size, "corpus_head_sha256": head}


def _fingerprint_at(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return _fingerprint(file.fileno())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _changed(path: Path) -> DataError:
    return DataError(f"{path}: has changed since it was opened; start again")


def _row(place: str, line: bytes, fields: Sequence[str]) -> dict[str, Any]:
    """A JSON object whose ``fields`` are strings; its url, if it has one, too."""
    try:
        row = json.loads(line.rstrip(b"\r\n"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not valid JSON ({json_reason(error)})") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(row).__name__}")
    optional = ["url"] if row.get("url") is not None else []
    for field in (*fields, *optional):
        if not isinstance(row.get(field), str):
            raise DataError(f"{place}: field '{field}' must be a string")
    return row


def _refuse_repeated_ids(corpus: Corpus, hashes: NDArray[np.int64]) -> None:
    """Equal hashes make two rows suspects; their ids decide."""
    order = np.argsort(hashes, kind="stable")
    equal = np.flatnonzero(np.diff(hashes[order]) == 0)
    seen: set[str] = set()
    for row in sorted({*order[equal].tolist(), *order[equal + 1].tolist()}):
        id_ = corpus.document(row).id
        if id_ in seen:
            place = f"{corpus.path}:{_line_number(corpus, row)}"
            raise DataError(f"{place}: field 'id' repeats '{id_}'")
        seen.add(id_)


def _line_number(corpus: Corpus, row: int) -> int:
    """From 1, blank lines counted."""
    before, count = int(corpus.ranges[row][0]), 1
    with corpus.path.open("rb") as file:
        while before > 0 and (block := file.read(min(before, _BLOCK_BYTES))):
            count += block.count(b"\n")
            before -= len(block)
    return count
