r"""Documents and pages from retrieval servers: Search-R1's protocol, and what others made of it.

``POST /retrieve`` with ``{"queries": [...], "topk": 3, "return_scores": true}`` is answered by
``{"result": [...]}``, one element per query. What an element may be:

* a list of hits, each ``{"document": {...}, "score": 1.5}``, a bare ``{"contents": ...}``, a
  string, ``{"document": "..."}`` or null, where a document has ``contents`` (a quoted title, a
  newline, the text) or ``title`` and ``text``;
* one string for the whole query, as from Tree-GRPO's Bing server.

``POST /access`` with ``{"urls": [...]}`` (ASearcher) is answered by one page or null per address.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from graphpo_agent.errors import ToolError
from graphpo_agent.net.checks import check_counts
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.store import CallStore, request_key
from graphpo_agent.plain_text import plain_text
from graphpo_agent.types import Document
from retrievers.failover import ServerPool, ServerUrls
from retrievers.together import Answer, search_batches, settle

__all__ = ["RemotePages", "RemoteRetriever", "parse_hits"]

_NOTHING_FOUND = "No search results found."
_SEARCH_FAILED = "Search failed for query:"
"""What Tree-GRPO's Bing server returns in the place of results."""


class RemoteRetriever:
    """A ``Retriever`` over one or several servers of one corpus; threads share it.

    Example::

        RemoteRetriever("http://127.0.0.1:8000").search(["Karo Venner mentor"], topk=3)
    """

    def __init__(
        self,
        urls: ServerUrls,
        *,
        deadline_s: float = 120.0,
        tries: int = 30,
        concurrency: int = 16,
        per_second: float | None = None,
        batch_size: int = 64,
        store: CallStore | None = None,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            urls: ``HOST:PORT``, ``http://HOST:PORT`` or the full address; ``/retrieve`` is added
                to those without a path. Several servers share the queries and stand in for each
                other (``retrievers.failover``).
            deadline_s: seconds for one request, tries and waits included.
            tries: of one request; waits grow to 8 s, so that its time is up before 30 of them.
            concurrency: requests under way at once.
            per_second: requests per second at most; None: any number.
            batch_size: queries in one request. With a store each query has its own request, so
                that an answer is found again whatever it was asked together with.
            store: recorded answers by query and ``topk``, wherever the servers are: it holds those
                of one corpus. None: none.

        Raises:
            ToolError: no URL, one that cannot be used, or a limit out of range.
        """
        check_counts("retriever", batch_size=batch_size)
        self._pool = ServerPool(
            "retriever",
            urls,
            "/retrieve",
            deadline_s=deadline_s,
            tries=tries,
            concurrency=concurrency,
            per_second=per_second,
        )
        self._concurrency = concurrency
        self._batch_size = 1 if store else batch_size
        self._store = store

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query at most ``topk`` documents, in the server's order; nulls are left out.

        Equal queries are asked once.

        Raises:
            PartlyFailed: a query got no usable answer from any server; it has the others'.
            ToolError: the address is wrong, or what answers there is no retrieval server.
        """
        unique = list(dict.fromkeys(map(plain_text, queries)))
        size = self._batch_size
        batches = [unique[start : start + size] for start in range(0, len(unique), size)]
        found = search_batches(lambda batch: self._ask(batch, topk), batches, self._concurrency)
        return settle([found[plain_text(query)] for query in queries])

    def _ask(self, batch: Sequence[str], topk: int) -> list[Answer]:
        body = {"queries": batch, "topk": topk, "return_scores": True}
        elements, server = _result(self._pool, body, len(batch), self._store, _answer)
        answers = [_answer(element, server) for element in elements]
        return [each if isinstance(each, CallFailed) else each[:topk] for each in answers]


class RemotePages:
    """A ``PageReader`` over ASearcher's ``POST /access``; threads share it.

    Example: ``RemotePages("http://127.0.0.1:8000").read("https://en.wikipedia.org/wiki/Oslo")``
    """

    def __init__(
        self,
        urls: ServerUrls,
        *,
        deadline_s: float = 60.0,
        tries: int = 5,
        concurrency: int = 16,
        per_second: float | None = None,
        store: CallStore | None = None,
    ) -> None:
        """Set up; the arguments are those of ``RemoteRetriever``."""
        self._pool = ServerPool(
            "pages",
            urls,
            "/access",
            deadline_s=deadline_s,
            tries=tries,
            concurrency=concurrency,
            per_second=per_second,
        )
        self._store = store

    def read(self, url: str) -> Document:
        """The page that the server has for an address.

        Raises:
            CallFailed: it has none (``no_result``), or no server answered.
            ToolError: the server's address is wrong, or what answers there serves no pages.
        """
        body = {"urls": [plain_text(url)]}
        [page], server = _result(self._pool, body, 1, self._store, _parse_hit)
        documents = parse_hits([page], server)
        if not documents or not documents[0].contents.strip():
            raise CallFailed("no_result", f"there is no page {url}")
        return Document(id=url, contents=documents[0].contents, url=url)


def _result(
    pool: ServerPool,
    body: dict[str, Any],
    expected: int,
    store: CallStore | None,
    check: Callable[[Any, str], object],
) -> tuple[list[Any], str]:
    """The ``expected`` elements of ``{"result": [...]}``, and who sent them.

    ``check`` raises ToolError for an element of an unknown shape: then another server is asked.

    Raises:
        ToolError: all servers' answers have another shape.
    """

    def read(value: Any, server: str) -> list[Any]:
        result = value.get("result") if isinstance(value, dict) else None
        if not isinstance(result, list):
            found = json.dumps(value)[:100]
            raise ToolError(f"{server}: answered no list 'result' but {found}; is it the address?")
        if len(result) != expected:
            raise ToolError(f"{server}: answered {len(result)} results, {expected} were asked for")
        for element in result:
            check(element, server)
        return result

    def ask_to_record() -> bytes:
        result, server = pool.ask(body, read)
        for element in result:
            _check_searched(element, server)
        return json.dumps([result, server]).encode()

    if store is None:
        return pool.ask(body, read)
    key = request_key("POST", pool.path, body=body)
    result, server = json.loads(store.fetch(key, ask_to_record))
    return result, server


def _answer(element: Any, server: str) -> Answer:
    try:
        return parse_hits(element, server)
    except CallFailed as failure:
        return failure


def _check_searched(element: Any, server: str) -> None:
    """Raise CallFailed if the server says of one query that its own search failed."""
    if isinstance(element, str) and element.strip().startswith(_SEARCH_FAILED):
        raise CallFailed("transient", f"{server}: {' '.join(element.split())[:200]}")


def parse_hits(element: Any, server: str) -> list[Document]:
    r"""The documents of one query's result, in any of the shapes above.

    Example: ``parse_hits([{"document": {"id": "7", "contents": "\"Oak\"\nA tree."}, "score": 2}],
    "http://host/retrieve")`` is ``[Document("7", '"Oak"\nA tree.', 2.0)]``. A document without an
    id gets one from its contents, so that equal documents have equal ids.

    Raises:
        CallFailed: the server says that its own search failed.
        ToolError: another shape.
    """
    if isinstance(element, str):
        _check_searched(element, server)
        text = element.strip()
        return [] if text in ("", _NOTHING_FOUND) else [_document(text, {}, None)]
    if not isinstance(element, list):
        raise _unknown(element, server)
    hits = [_parse_hit(hit, server) for hit in element]
    return [hit for hit in hits if hit is not None]


def _parse_hit(hit: Any, server: str) -> Document | None:
    """The document of one hit or page; None where there is none."""
    if hit is None:
        return None
    wrapped = isinstance(hit, dict) and "document" in hit
    fields, score = (hit["document"], hit.get("score")) if wrapped else (hit, None)
    if fields is None:
        return None
    if isinstance(fields, str):
        return _document(fields, {}, score)
    contents = _contents(fields) if isinstance(fields, dict) else None
    if contents is None:
        raise _unknown(hit, server)
    return _document(contents, fields, score)


def _contents(fields: dict[str, Any]) -> str | None:
    """``contents``, or the same from ``title`` and ``text``; None: there is neither."""
    contents, title, text = (fields.get(name) for name in ("contents", "title", "text"))
    if isinstance(contents, str):
        return contents
    if not isinstance(text, str):
        return None
    if not isinstance(title, str):
        return text
    return f"{title}\n{text}" if title.startswith('"') else f'"{title}"\n{text}'


def _document(contents: str, fields: dict[str, Any], score: Any) -> Document:
    given, url = fields.get("id"), fields.get("url")
    known = isinstance(given, str | int) and given != ""
    digest = hashlib.sha256(contents.encode(errors="surrogatepass")).hexdigest()
    return Document(
        id=str(given) if known else digest[:16],
        contents=contents,
        score=_number(score),
        url=url if isinstance(url, str) else None,
    )


def _number(score: Any) -> float | None:
    """A score; None: it is no number, or larger than any float."""
    try:
        return float(score) if type(score) in (int, float) else None
    except OverflowError:
        return None


def _unknown(value: Any, server: str) -> ToolError:
    return ToolError(f"{server}: answered a result of an unknown shape: {json.dumps(value)[:100]}")
