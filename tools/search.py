"""The search tool: documents for a query, as Search-R1's agents read them."""

from collections.abc import Mapping, Sequence
from typing import Any

from graphpo_agent.errors import ToolError
from graphpo_agent.protocols import Retriever
from graphpo_agent.types import Document, ToolResult

__all__ = ["SearchTool", "format_documents"]


def format_documents(documents: Sequence[Document]) -> str:
    r"""Search-R1's text of a list of documents, without the tags around it.

    Example: one document with contents ``'"Karo Venner"\nborn : 1987'`` gives
    ``'Doc 1(Title: "Karo Venner") born : 1987\n'``.
    """
    return "".join(
        f"Doc {number}(Title: {document.title}) {document.text}\n"
        for number, document in enumerate(documents, start=1)
    )


class SearchTool:
    r"""A ``Tool`` that finds documents. All calls of a layer are one request to the retriever.

    Example::

        SearchTool(retriever, topk=1).run([{"query": "Karo Venner born"}])
        # [ToolResult(text='Doc 1(Title: "Karo Venner") ...\n', documents=(Document(...),))]
    """

    name = "search"
    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "query": {
                "description": "What to look for; several queries may be asked at once.",
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            }
        },
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, retriever: Retriever, topk: int = 3) -> None:
        """Search with ``retriever``, at most ``topk`` documents a query.

        Raises:
            ToolError: ``topk`` is no number of at least 1, or ``retriever`` cannot search.
        """
        if type(topk) is not int or topk < 1:
            raise ToolError(f"search tool: topk must be at least 1, found {topk!r}")
        if not isinstance(retriever, Retriever):
            raise ToolError(f"search tool: retriever {retriever!r} has no search method")
        self._retriever = retriever
        self._topk = topk

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        """The documents of each call, those of a list of queries in order and each once.

        A call whose arguments do not fit the schema, and every call of a request that the
        retriever could not answer, has an ``error``; an empty query finds nothing.

        Raises:
            ToolError: the retriever is misconfigured.
        """
        queries = [_queries(call) for call in calls]
        asked = list(dict.fromkeys(query for each in queries for query in each or ()))
        try:
            found = dict(zip(asked, self._retriever.search(asked, self._topk), strict=True))
        except OSError as error:
            failure = f"search failed: {error}"
            return [ToolResult(text=failure, error=failure) for _ in calls]
        return [_result(each, found) for each in queries]


def _queries(call: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The queries of a call that are not blank; None: the arguments do not fit the schema."""
    query = call.get("query")
    queries = [query] if isinstance(query, str) else query
    if set(call) != {"query"} or not isinstance(queries, list):
        return None
    if not all(isinstance(each, str) for each in queries):
        return None
    return tuple(each.strip() for each in queries if each.strip())


def _result(queries: tuple[str, ...] | None, found: Mapping[str, Sequence[Document]]) -> ToolResult:
    if queries is None:
        failure = "search needs one argument, query: a string or a list of strings"
        return ToolResult(text=failure, error=failure)
    unique = {document.id: document for query in queries for document in found[query]}
    documents = tuple(unique.values())
    return ToolResult(text=format_documents(documents), documents=documents)
