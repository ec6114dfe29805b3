"""Pages from a file on disk, ASearcher's JSONL: ``{"url": "...", "contents": "..."}`` a line."""

import json
import mmap
from pathlib import Path
from typing import Any

from graphpo_agent.errors import DataError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.types import Document
from retrievers.corpus import checked_rows

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
        path = Path(path)
        self._ranges = {
            row["url"]: (start, end)
            for start, end, row in checked_rows(path, "reading the pages", ("url", "contents"))
        }
        if not self._ranges:
            raise DataError(f"{path}: holds no pages")
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

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
