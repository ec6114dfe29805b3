r"""How documents are listed in an observation, one piece each. A checkpoint knows one layout.

==============  ==================================================================================
``search_r1``   ``Doc 1(Title: "T") text\n``, all documents of a call numbered through
``verl``        ``Doc 1 (Title: "T")\ntext\n\n`` per query, queries divided by ``\n---\n``, all of
                it as the JSON object ``{"result": "..."}`` (its search tool's reply)
``asearcher``   ``[Doc 1](url):\ntext\n\n``
``web``         a heading per query and ``1. [title](url)\ntext\n\n``, queries divided by
                ``\n=======\n``, as WebDancer and Tongyi DeepResearch list search results
==============  ==================================================================================
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from graphpo_agent.types import Document, Finding, ToolResult

__all__ = ["Layout", "Listing", "lay_out"]

Layout = Literal["search_r1", "verl", "asearcher", "web"]

Listing = tuple[str, tuple[str, ...], str]
"""What stands before the documents, one text per document, what stands after them."""

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""Characters that JSON would write as escapes of several characters."""
_ASEARCHER_CHARACTERS = 5000
"""Of one document, as ASearcher's agent shows it."""


def lay_out(result: ToolResult, layout: Layout) -> Listing:
    """The documents of a result, or its text where it found none, in one layout.

    The pieces of the second part put one behind the other are the whole listing; it neither begins
    nor ends with white space.
    """
    opening, closing = ('{"result": "', '"}') if layout == "verl" else ("", "")
    pieces = list(_LISTERS[layout](result)) if result.documents else [_without(result, layout)]
    pieces[0] = pieces[0].lstrip()
    pieces[-1] = pieces[-1].rstrip()
    if layout == "verl":
        pieces = [_json_text(piece) for piece in pieces]
    return opening, tuple(pieces), closing


def _json_text(text: str) -> str:
    return json.dumps(_CONTROL.sub(" ", text), ensure_ascii=False)[1:-1]


def _without(result: ToolResult, layout: Layout) -> str:
    """The text of a result without documents."""
    if result.text or layout == "search_r1":
        return result.text
    if layout == "web":
        return "\n=======\n".join(_heading(finding) for finding in result.findings)
    return "No search results are found."


def _search_r1(result: ToolResult) -> Iterator[str]:
    for number, document in enumerate(result.documents, start=1):
        yield f"Doc {number}(Title: {document.title}) {document.text}\n"


def _verl(result: ToolResult) -> Iterator[str]:
    for finding, first in _with_documents(result):
        for number, document in enumerate(finding.documents, start=1):
            divider = "" if first or number > 1 else "---\n"
            yield f"{divider}Doc {number} (Title: {document.title})\n{document.text}\n\n"


def _asearcher(result: ToolResult) -> Iterator[str]:
    for number, document in enumerate(result.documents, start=1):
        where = document.url or document.id
        yield f"[Doc {number}]({where}):\n{document.contents[:_ASEARCHER_CHARACTERS]}\n\n"


def _web(result: ToolResult) -> Iterator[str]:
    for finding, first in _with_documents(result):
        for number, document in enumerate(finding.documents, start=1):
            divider = "" if first else "=======\n"
            before = f"{divider}{_heading(finding)}\n" if number == 1 else ""
            yield f"{before}{number}. {_link(document)}\n{document.text}\n\n"


def _heading(finding: Finding) -> str:
    count = len(finding.documents)
    return f"A Google search for '{finding.query}' found {count} results:\n\n## Web Results"


def _link(document: Document) -> str:
    title = document.title.strip('"')
    return f"[{title}]({document.url})" if document.url else title


def _with_documents(result: ToolResult) -> Iterable[tuple[Finding, bool]]:
    """The findings that hold something, and whether each is the first one."""
    found = [finding for finding in result.findings if finding.documents]
    return [(finding, index == 0) for index, finding in enumerate(found)]


_LISTERS: dict[Layout, Callable[[ToolResult], Iterator[str]]] = {
    "search_r1": _search_r1,
    "verl": _verl,
    "asearcher": _asearcher,
    "web": _web,
}
