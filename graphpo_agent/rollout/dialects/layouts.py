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
from dataclasses import dataclass
from typing import Literal

from graphpo_agent.types import Document, Finding, ToolResult

__all__ = ["Layout", "Listing", "lay_out"]

Layout = Literal["search_r1", "verl", "asearcher", "web"]


@dataclass(frozen=True, slots=True)
class Listing:
    """Documents in one layout: what is before them, a piece each, what is after them.

    Example: ``Listing("", ("Doc 1(Title: T) x",), (doc,), "")``

    Attributes:
        pieces: put one behind the other they neither begin nor end with white space; there is
            always one.
        documents: those of the first pieces, one each; a document may occur again.
    """

    before: str
    pieces: tuple[str, ...]
    documents: tuple[Document, ...]
    after: str


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""Characters that JSON would write as escapes of several characters."""
_ASEARCHER_CHARACTERS = 5000
"""Of one document, as ASearcher's agent shows it."""
_QUERY_CHARACTERS = 200
"""Of a query in its heading: a longer one would leave no room for what it found."""


def lay_out(result: ToolResult, layout: Layout) -> Listing:
    """The documents of a result and its text, in one layout."""
    listed = list(_LISTERS[layout](result))
    pieces = [piece for piece, _ in listed]
    if not pieces:
        pieces = [_without(result, layout)]
    elif result.text:
        pieces.append(result.text)
    pieces[0] = pieces[0].lstrip()
    pieces[-1] = pieces[-1].rstrip()
    before, after = ('{"result": "', '"}') if layout == "verl" else ("", "")
    if layout == "verl":
        pieces = [_json_text(piece) for piece in pieces]
    return Listing(before, tuple(pieces), tuple(document for _, document in listed), after)


def _json_text(text: str) -> str:
    return json.dumps(_CONTROL.sub(" ", text), ensure_ascii=False)[1:-1]


def _without(result: ToolResult, layout: Layout) -> str:
    """The text of a result without documents."""
    if result.text or layout == "search_r1":
        return result.text
    if layout == "web":
        return "\n=======\n".join(_heading(finding) for finding in result.findings)
    return "No search results are found."


_Lister = Callable[[ToolResult], Iterator[tuple[str, Document]]]


def _search_r1(result: ToolResult) -> Iterator[tuple[str, Document]]:
    for number, document in enumerate(result.documents, start=1):
        yield f"Doc {number}(Title: {document.title}) {document.text}\n", document


def _verl(result: ToolResult) -> Iterator[tuple[str, Document]]:
    for finding, first in _with_documents(result):
        for number, document in enumerate(finding.documents, start=1):
            divider = "" if first or number > 1 else "---\n"
            text = f"{divider}Doc {number} (Title: {document.title})\n{document.text}\n\n"
            yield text, document


def _asearcher(result: ToolResult) -> Iterator[tuple[str, Document]]:
    for number, document in enumerate(result.documents, start=1):
        where = document.url or document.id
        shown = document.contents[:_ASEARCHER_CHARACTERS]
        yield f"[Doc {number}]({where}):\n{shown}\n\n", document


def _web(result: ToolResult) -> Iterator[tuple[str, Document]]:
    for finding, first in _with_documents(result):
        for number, document in enumerate(finding.documents, start=1):
            divider = "" if first else "=======\n"
            before = f"{divider}{_heading(finding)}\n" if number == 1 else ""
            yield f"{before}{number}. {_link(document)}\n{document.text}\n\n", document


def _heading(finding: Finding) -> str:
    count = len(finding.documents)
    query = finding.query[:_QUERY_CHARACTERS]
    return f"A Google search for '{query}' found {count} results:\n\n## Web Results"


def _link(document: Document) -> str:
    title = document.title.strip('"')
    return f"[{title}]({document.url})" if document.url else title


def _with_documents(result: ToolResult) -> Iterable[tuple[Finding, bool]]:
    """The findings that hold something, and whether each is the first one."""
    found = [finding for finding in result.findings if finding.documents]
    return [(finding, index == 0) for index, finding in enumerate(found)]


_LISTERS: dict[Layout, _Lister] = {
    "search_r1": _search_r1,
    "verl": _verl,
    "asearcher": _asearcher,
    "web": _web,
}
