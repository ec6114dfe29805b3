r"""What the retrieval server reads and writes: Search-R1's and ASearcher's JSON. Pure functions.

``POST /retrieve`` takes ``{"queries": ["..."], "topk": 3, "return_scores": true}`` and answers
``{"result": [[{"document": {"id": "0", "contents": "\"Title\"\ntext"}, "score": 1.5}]]}``, one
list per query in their order; without scores the hits are the documents themselves.
``POST /access`` takes ``{"urls": ["..."]}`` and answers ``{"result": [PAGE, null]}``, where a page
is a row ``{"url": "...", "contents": "..."}`` and null stands for one that is not there.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from graphpo_agent.errors import ToolError
from graphpo_agent.net.checks import check_counts
from graphpo_agent.plain_text import plain_text
from graphpo_agent.types import Document

__all__ = ["Bounds", "Refusal", "RetrieveRequest", "parse_access", "parse_retrieve", "render"]

_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask for.

    Example: ``Bounds(topk=3, max_topk=100, max_queries=4096, max_query_chars=8192,
    max_body_bytes=2**24)``; a request without ``topk``, or with 0, gets 3 documents a query.

    Attributes:
        topk: documents a query where a request names no number.
        max_topk: documents a query at most.
        max_queries: queries (or addresses) of one request at most.
        max_query_chars: characters of one query at most.
        max_body_bytes: of one request.
    """

    topk: int = 3
    max_topk: int = 100
    max_queries: int = 4096
    max_query_chars: int = 8192
    max_body_bytes: int = 16 * 2**20

    def __post_init__(self) -> None:
        check_counts("server", **asdict(self))
        if self.topk > self.max_topk:
            raise ToolError(f"server: topk is {self.topk}, more than max_topk, {self.max_topk}")


class Refusal(Exception):
    """A request that is answered with an error: an HTTP status and one line.

    Example: ``Refusal(422, "topk is 500, at most 100 are allowed")``.
    """

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}


@dataclass(frozen=True, slots=True)
class RetrieveRequest:
    """One ``POST /retrieve``, checked; ``topk`` is at least 1."""

    queries: Sequence[str]
    topk: int
    return_scores: bool


def parse_retrieve(body: bytes, bounds: Bounds) -> RetrieveRequest:
    """Read a request; keys that are not Search-R1's are ignored.

    A half of a surrogate pair in a query, which is no text but valid JSON, becomes ``?``.

    Raises:
        Refusal: 400 no JSON object, 422 a field that is missing, wrong or over its bound.
    """
    fields = _object(body)
    topk, scores = fields.get("topk"), fields.get("return_scores", False)
    if topk is not None and (type(topk) is not int or topk < 0):
        raise Refusal(422, f"topk must be a whole number of at least 0 or null, found {topk!r:.80}")
    if topk and topk > bounds.max_topk:
        raise Refusal(422, f"topk is {topk}, at most {bounds.max_topk} are allowed")
    if type(scores) is not bool:
        raise Refusal(422, f"return_scores must be true or false, found {scores!r:.80}")
    return RetrieveRequest(_strings(fields, "queries", bounds), topk or bounds.topk, scores)


def parse_access(body: bytes, bounds: Bounds) -> list[str]:
    """The addresses asked for; raises ``Refusal`` as ``parse_retrieve`` does."""
    return _strings(_object(body), "urls", bounds)


def render(result: RetrieveRequest, found: Sequence[Sequence[Document]]) -> bytes:
    """The answer to a request; documents with an address carry ``url`` as on ASearcher's server."""
    hit = _scored if result.return_scores else _bare
    return dump({"result": [[hit(document) for document in documents] for documents in found]})


def dump(value: Any) -> bytes:
    """JSON in UTF-8; text that has no UTF-8 (half of a surrogate pair) is escaped."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value).encode()


def _scored(document: Document) -> dict[str, Any]:
    score = None if document.score is None else float(document.score)  # a numpy one, perhaps
    return {"document": _bare(document), "score": score}


def _bare(document: Document) -> dict[str, Any]:
    fields = {"id": document.id, "contents": document.contents}
    return fields if document.url is None else {**fields, "url": document.url}


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        fields = _loaded(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise Refusal(400, f"the body must be a JSON object, found {type(fields).__name__}")
    return fields


def _loaded(body: bytes) -> Any:
    """The body's JSON; orjson reads no halves of surrogate pairs, the slower json does."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        if _HALF_PAIR.search(body) is None:
            raise
        return json.loads(body)


def _strings(fields: Mapping[str, Any], name: str, bounds: Bounds) -> list[str]:
    values = fields.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise Refusal(422, f"{name} must be a list of strings")
    if len(values) > bounds.max_queries:
        raise Refusal(422, f"{len(values)} {name}, at most {bounds.max_queries} are allowed")
    for number, value in enumerate(values):
        if len(value) > bounds.max_query_chars:
            raise Refusal(
                422,
                f"{name}[{number}] has {len(value)} characters, at most "
                f"{bounds.max_query_chars} are allowed",
            )
    return [plain_text(value) for value in values]
