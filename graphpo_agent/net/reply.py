"""What a service answered, and what its status says."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graphpo_agent.net.failures import CallFailed
from graphpo_agent.types import FailureKind

__all__ = ["Reply", "Verdict", "classify_json", "classify_status"]

Verdict = FailureKind | Literal["quota", "configuration"] | None
"""What a reply means: a failed call, a reason to stop the run, or None: an answer."""

_EXCERPT_CHARACTERS = 200
_BY_STATUS: Mapping[int, Verdict] = {
    400: "bad_arguments",
    402: "quota",
    408: "transient",
    409: "transient",
    413: "bad_arguments",
    414: "bad_arguments",
    421: "transient",
    422: "bad_arguments",
    424: "transient",
    425: "transient",
    429: "rate_limit",
    431: "bad_arguments",
    451: "no_result",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP reply, credentials blotted out.

    Example: ``Reply(200, {"content-type": "application/json"}, b'{"organic": []}')``
    """

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """Decompressed."""

    @property
    def text(self) -> str:
        """The body as UTF-8; bytes that are not are replaced."""
        return self.body.decode(errors="replace")

    @property
    def excerpt(self) -> str:
        """The beginning of the text in one line, for messages."""
        return " ".join(self.text[: 4 * _EXCERPT_CHARACTERS].split())[:_EXCERPT_CHARACTERS]

    def json(self) -> Any:
        """The body's JSON value.

        Raises:
            CallFailed: it is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise CallFailed("transient", f"the reply is not JSON: {self.excerpt!r}") from None

    def to_bytes(self) -> bytes:
        """What a store keeps; ``from_bytes`` reads it."""
        body = base64.b64encode(self.body).decode()
        return json.dumps([self.status, dict(self.headers), body]).encode()

    @classmethod
    def from_bytes(cls, stored: bytes) -> "Reply":
        """What ``to_bytes`` wrote."""
        status, headers, body = json.loads(stored)
        return cls(status, headers, base64.b64decode(body))


def classify_status(reply: Reply) -> Verdict:
    """What the status of a reply says, for services without rules of their own.

    2xx is an answer. 400, 413, 414, 422 and 431 refuse the arguments; 402 says that nothing is left
    to spend; 429 is a rate limit; 408, 409, 421, 424, 425 and 5xx are transient; 451 has no result.
    3xx and every other 4xx say that key, address, model or proxy are wrong.

    Example: ``classify_status(Reply(503, {}, b""))`` is ``"transient"``.
    """
    if 200 <= reply.status < 300:
        return None
    if reply.status in _BY_STATUS:
        return _BY_STATUS[reply.status]
    return "configuration" if reply.status < 500 else "transient"


def classify_json(reply: Reply) -> Verdict:
    """``classify_status``; an answer that is not JSON, such as a gateway's page, is transient."""
    verdict = classify_status(reply)
    if verdict is not None:
        return verdict
    try:
        reply.json()
    except CallFailed:
        return "transient"
    return None
