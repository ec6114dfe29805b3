"""Pages from a file on disk, ASearcher's JSONL: ``{"url": "...", "contents": "..."}`` a line."""

from pathlib import Path
from typing import Any

from graphpo_agent.errors import DataError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.types import Document
from retrievers.corpus import Lines, checked_rows

__all__ = ["PageFile"]

_FIELDS = ("url", "contents")


class PageFile:
    """A ``PageReader`` over a file that stays on disk: only the addresses are held.

    Example::

        PageFile("pages.jsonl").read("https://en.wikipedia.org/wiki/Oslo").contents
    """

    def __init__(self, path: Path | str) -> None:
        """Read the file once. Of two rows with one address the last counts.

        Raises:
            DataError: the file is missing, holds no page or a row that cannot be used.
        """
        self._path = path = Path(path)
        self._ranges = {
            row["url"]: (start, end)
            for start, end, row in checked_rows(path, "reading the pages", _FIELDS)
        }
        if not self._ranges:
            raise DataError(f"{path}: holds no pages")
        self._lines = Lines(path)

    def __len__(self) -> int:
        """The number of addresses."""
        return len(self._ranges)

    def row(self, url: str) -> dict[str, Any] | None:
        """The page's whole row; None: there is none.

        An address with ``index.php/`` also finds the page under ``index.php?title=``, as on
        ASearcher's server.

        Raises:
            DataError: the file has changed since it was read.
        """
        for address in (url, url.replace("index.php/", "index.php?title=")):
            if address in self._ranges:
                start, end = self._ranges[address]
                return self._lines.row(f"{self._path}: page {address}", start, end, _FIELDS)
        return None

    def read(self, url: str) -> Document:
        """The page as a document.

        Raises:
            CallFailed: the file has no such page (``no_result``).
            DataError: as ``row``.
        """
        row = self.row(url)
        if row is None:
            raise CallFailed("no_result", f"there is no page {url}")
        return Document(id=url, contents=row["contents"], url=url)
