"""The search tool: documents for queries."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from graphpo_agent.errors import ToolError
from graphpo_agent.net.blocklist import BlockList
from graphpo_agent.net.checks import check_counts, check_seconds
from graphpo_agent.net.deadline import Deadline, within
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.protocols import Retriever
from graphpo_agent.types import Document, Finding, ToolResult
from retrievers.together import Answer, answers_of

__all__ = ["SearchTool"]

_SPELLINGS = ("query", "queries", "query_list")
"""Names of the one argument: this tool's own, and those that other agents were trained with."""


class SearchTool:
    r"""A ``Tool`` that finds documents. All calls of a layer are one request to the retriever.

    A call has one argument, ``query``: a string or a list of them. ``queries`` (as in WebDancer's
    function lists) and ``query_list`` (as in verl's search tool) mean the same. The first
    ``max_queries`` of a list are answered; the result's text says how many were left out.

    Example::

        SearchTool(retriever, topk=1).run([{"query": "Karo Venner born"}])
        # [ToolResult(findings=(Finding("Karo Venner born", (Document(...),)),))]
    """

    name = "search"

    def __init__(
        self,
        retriever: Retriever,
        topk: Annotated[int, Field(ge=1)] = 3,
        max_queries: Annotated[int, Field(ge=1)] = 5,
        deadline_s: float = 300.0,
        blocked_hosts: Sequence[str] = (),
    ) -> None:
        """Search with ``retriever``.

        Args:
            retriever: finds documents.
            topk: documents of one query, at most.
            max_queries: of one call; WebDancer's trajectories ask up to 5.
            deadline_s: seconds for all queries of one ``run``, whatever the retriever does; longer
                than those that a remote one has for each of its requests.
            blocked_hosts: patterns of a ``BlockList``; documents with such a url are left out.

        Raises:
            ToolError: a number out of range, ``retriever`` cannot search, or a bad pattern.
        """
        check_counts("search tool", topk=topk, max_queries=max_queries)
        check_seconds("search tool", deadline_s=deadline_s)
        if not isinstance(retriever, Retriever):
            raise ToolError(f"search tool: retriever {retriever!r} has no search method")
        self.description = (
            f"Searches for documents. Takes one query or a list of up to {max_queries} queries, "
            "and returns the best documents of each."
        )
        self.schema = _schema(max_queries)
        self._retriever = retriever
        self._topk = topk
        self._max_queries = max_queries
        self._deadline_s = deadline_s
        self._blocked = BlockList(blocked_hosts)

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        """What each query of each call found, in request order; a blank query finds nothing.

        A call whose arguments do not fit the schema failed with ``bad_arguments``; one with a query
        that the retriever could not answer (in time) failed as that query did.

        Raises:
            ToolError: the retriever is misconfigured, or its quota is used up.
        """
        read = [self._queries(call) for call in calls]
        lists = [queries[: self._max_queries] for queries in read if not isinstance(queries, str)]
        asked = list(dict.fromkeys(query for each in lists for query in each if query))
        answers = self._search(asked) if asked else []
        found: dict[str, Answer] = {"": [], **dict(zip(asked, answers, strict=True))}
        return [_result(queries, found, self._max_queries) for queries in read]

    def _search(self, queries: Sequence[str]) -> Sequence[Answer]:
        """For each query what it found, blocked documents left out, or why it found nothing."""
        search = partial(answers_of, self._retriever, queries, self._topk)
        try:
            answers = within(Deadline(self._deadline_s), search)
        except CallFailed as late:
            answers = [late] * len(queries)
        return [each if isinstance(each, CallFailed) else self._allowed(each) for each in answers]

    def _allowed(self, documents: Sequence[Document]) -> list[Document]:
        return [doc for doc in documents if doc.url is None or not self._blocked.covers(doc.url)]

    def _queries(self, call: Mapping[str, Any]) -> tuple[str, ...] | str:
        """The queries of a call, outer white space removed; or why it cannot be answered."""
        if len(call) != 1 or not set(call) <= set(_SPELLINGS):
            return "search needs one argument, query: a string or a list of strings"
        (value,) = call.values()
        queries = [value] if isinstance(value, str) else value
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            return "search: query must be a string or a list of strings"
        if not queries:
            return "search needs at least one query"
        return tuple(query.strip() for query in queries)


def _result(
    queries: tuple[str, ...] | str, found: Mapping[str, Answer], max_queries: int
) -> ToolResult:
    if isinstance(queries, str):
        return ToolResult(text=queries, failure="bad_arguments")
    findings: list[Finding] = []
    for query in queries[:max_queries]:
        answer = found[query]
        if isinstance(answer, CallFailed):
            return ToolResult(text=f"search failed: {answer}", failure=answer.kind)
        findings.append(Finding(query, tuple(answer)))
    left_out = len(queries) - len(findings)
    text = (
        f"{left_out} more not searched: at most {max_queries} queries a call." if left_out else ""
    )
    return ToolResult(text=text, findings=tuple(findings))


def _schema(max_queries: int) -> dict[str, Any]:
    queries = {
        "type": "array",
        "items": {"type": "string"},
        "minItems": 1,
        "maxItems": max_queries,
    }
    query = {
        "description": f"What to look for; up to {max_queries} queries may be asked at once.",
        "anyOf": [{"type": "string"}, queries],
    }
    return {
        "type": "object",
        "properties": {"query": query},
        "required": ["query"],
        "additionalProperties": False,
    }
