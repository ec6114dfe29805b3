"""Pages from a file on disk, ASearcher's JSONL: ``{"url": "...", "contents": "..."}`` a line."""

import json
import mmap
from pathlib import Path
from typing import Any

from graphpo_agent.errors import DataError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.types import Document

__all__ = ["PageFile"]


class PageFile:
    """A ``PageReader`` over a file that is memory-mapped: only the addresses are held.

    Example::

        PageFile("pages.jsonl").read("https://en.wikipedia.org/wiki/Oslo").contents
    """

    def __init__(self, path: Path | str) -> None:
        """Read the file once. Of two rows with one address the last counts.

        Raises:
            DataError: the file is missing, holds no page or a row that cannot be used.
        """
        self._path = Path(path)
        self._ranges: dict[str, tuple[int, int]] = {}
        start = 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        url = _parse(f"{self._path}:{number}", line)["url"]
                        self._ranges[url] = (start, start + len(line))
                    start += len(line)
                if not self._ranges:
                    raise DataError(f"{self._path}: holds no pages")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read ({error.strerror})") from error

    def __len__(self) -> int:
        """The number of addresses."""
        return len(self._ranges)

    def row(self, url: str) -> dict[str, Any] | None:
        """The page's whole row; None: there is none.

        An address with ``index.php/`` also finds the page under ``index.php?title=``, as on
        ASearcher's server.
        """
        for address in (url, url.replace("index.php/", "index.php?title=")):
            if address in self._ranges:
                start, end = self._ranges[address]
                return json.loads(self._data[start:end])
        return None

    def read(self, url: str) -> Document:
        """The page as a document.

        Raises:
            CallFailed: the file has no such page (``no_result``).
        """
        row = self.row(url)
        if row is None:
            raise CallFailed("no_result", f"there is no page {url}")
        return Document(id=url, contents=row["contents"], url=url)


def _parse(place: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(row).__name__}")
    for field in ("url", "contents"):
        if not isinstance(row.get(field), str):
            raise DataError(f"{place}: field '{field}' must be a string")
    return row
