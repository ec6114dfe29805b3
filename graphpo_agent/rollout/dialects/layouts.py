r"""How documents are listed in an observation, one piece each. A checkpoint knows one layout.

==============  ==================================================================================
``search_r1``   ``Doc 1(Title: "T") text\n``, all documents of a call numbered through
``verl``        ``Doc 1 (Title: "T")\ntext`` per query, a blank line between documents, queries
                divided by ``\n---\n``, all of it as the JSON object ``{"result": "..."}`` (its
                search tool's reply)
``asearcher``   ``[Doc 1](url):\ntext``, a blank line between documents
``web``         a heading per query and ``1. [title](url)\n\ntext``, lines with date and source
                before the blank one, queries divided by ``\n=======\n``; a visited page is a block
                with address, goal, evidence and summary: as WebDancer and Tongyi DeepResearch
==============  ==================================================================================
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from graphpo_agent.types import Document, ToolResult

__all__ = ["Layout", "Listing", "lay_out", "lay_out_pages"]

Layout = Literal["search_r1", "verl", "asearcher", "web"]


@dataclass(frozen=True, slots=True)
class Listing:
    """Documents in one layout: what is before them, a piece each, what is after them.

    Example: ``Listing("", ("Doc 1(Title: T) x",), (doc,), "")``

    Attributes:
        pieces: a document each, and with it what follows it up to the next one, such as a heading;
            there is always one.
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
"""Of a query or goal in its heading: a longer one would leave no room for what it found."""
_ADDRESS_CHARACTERS = 500
_DIVIDERS: dict[Layout, str] = {
    "search_r1": "\n",
    "verl": "\n---\n",
    "asearcher": "\n\n",
    "web": "\n=======\n",
}
"""Between groups."""
_DATE_AND_SOURCE = re.compile(r"(?:Date published: [^\n]*\n?)?(?:Source: [^\n]*\n?)?")

_Part = tuple[str, Document | None]
"""Text that shows a document, or that stands between documents."""
_Group = list[_Part]


def lay_out(result: ToolResult, layout: Layout) -> Listing:
    """The documents of a result and its text, in one layout."""
    return _listing([*_LISTERS[layout](result), *_text_of(result)], layout)


def lay_out_pages(result: ToolResult, goal: str) -> Listing:
    """Visited pages in the layout ``web``: a block for each, then the result's text.

    Args:
        result: each finding a page and the address as asked for.
        goal: what the pages were read for; perhaps empty.
    """
    pages: list[_Group] = [
        [(_page(finding.query, goal, document), document)]
        for finding in result.findings
        for document in finding.documents
    ]
    return _listing([*pages, *_text_of(result)], "web")


def _text_of(result: ToolResult) -> list[_Group]:
    text = result.text.strip()
    return [[(text, None)]] if text else []


def _listing(groups: list[_Group], layout: Layout) -> Listing:
    """The groups one behind the other, divided as the layout does."""
    pieces: list[str] = []
    documents: list[Document] = []
    before = ""
    for number, group in enumerate(groups):
        divider: _Group = [(_DIVIDERS[layout], None)] if number else []
        for text, document in [*divider, *group]:
            if document is not None:
                pieces.append(before + text)
                documents.append(document)
                before = ""
            elif pieces:
                pieces[-1] += text
            else:
                before += text
    pieces = pieces or [before]
    if layout == "verl":
        in_json = tuple(_json_text(piece) for piece in pieces)
        return Listing('{"result": "', in_json, tuple(documents), '"}')
    pieces[-1] = pieces[-1].rstrip()
    return Listing("", tuple(pieces), tuple(documents), "")


def _json_text(text: str) -> str:
    return json.dumps(_CONTROL.sub(" ", text), ensure_ascii=False)[1:-1]


def _search_r1(result: ToolResult) -> Iterator[_Group]:
    for number, document in enumerate(result.documents, start=1):
        yield [(f"Doc {number}(Title: {document.title}) {document.text}", document)]


def _verl(result: ToolResult) -> Iterator[_Group]:
    """A group for each query, also for one that found nothing."""
    for finding in result.findings:
        last = len(finding.documents)
        group: _Group = []
        for number, document in enumerate(finding.documents, start=1):
            text = f"Doc {number} (Title: {document.title})\n{document.text}"
            group.append((text.rstrip() if number == last else f"{text}\n\n", document))
        yield group


def _asearcher(result: ToolResult) -> Iterator[_Group]:
    documents = result.documents
    if result.findings and not documents:
        yield [("No search results are found.", None)]
    for number, document in enumerate(documents, start=1):
        where = document.url or document.id
        shown = document.contents[:_ASEARCHER_CHARACTERS]
        yield [(f"[Doc {number}]({where}):\n{shown}", document)]


def _web(result: ToolResult) -> Iterator[_Group]:
    for finding in result.findings:
        query, count = finding.query[:_QUERY_CHARACTERS], len(finding.documents)
        if not count:
            yield [(f"No results found for '{query}'. Another wording may find some.", None)]
            continue
        heading = f"A Google search for '{query}' found {count} results:\n\n## Web Results\n"
        group: _Group = [(heading, None)]
        for number, document in enumerate(finding.documents, start=1):
            divider = "\n\n" if number < count else ""
            group.append((f"{number}. {_hit(document)}{divider}", document))
        yield group


def _hit(document: Document) -> str:
    """Title, link, date and source as lines; a blank one; the text."""
    text = document.text.strip()
    match = _DATE_AND_SOURCE.match(text)
    about = match[0] if match else ""
    title = document.title
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1].replace('""', '"')
    link = f"[{title}]({document.url})" if document.url else title
    lines = f"{link}\n{about}".rstrip()
    snippet = text[len(about) :]
    return f"{lines}\n\n{snippet}" if snippet else f"{lines}\n"


def _page(address: str, goal: str, document: Document) -> str:
    """What a page holds for a goal; all of it is evidence where nothing was chosen."""
    text = document.text.strip()
    if not text.startswith(("Evidence in page: \n", "Summary: \n")):
        text = f"Evidence in page: \n{document.contents.strip()}"
    purpose = f" for user goal {goal[:_QUERY_CHARACTERS]}" if goal else ""
    where = address[:_ADDRESS_CHARACTERS]
    return f"The useful information in {where}{purpose} as follows: \n\n{text}"


_LISTERS: dict[Layout, Callable[[ToolResult], Iterator[_Group]]] = {
    "search_r1": _search_r1,
    "verl": _verl,
    "asearcher": _asearcher,
    "web": _web,
}
