"""Checks of what a configuration gives to a tool, a retriever or a service, and what these find."""

import math
from collections.abc import Sequence
from numbers import Real
from urllib.parse import urlsplit

from graphpo_agent.errors import ToolError
from graphpo_agent.types import Document

__all__ = ["check_address", "check_counts", "check_documents", "check_rate", "check_seconds"]

_FIELDS = {"id": str, "contents": str, "score": Real | None, "url": str | None}
"""Of a document, and their types."""


def check_address(url: str) -> str:
    """Let the address of a service pass.

    Raises:
        ValueError: it is not http(s), or holds a name and a password.
    """
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https"):
        raise ValueError("an address begins with http:// or https://")
    if "@" in parts.netloc:
        raise ValueError("name and password do not belong into an address")
    return url


def check_counts(owner: str, *, least: int = 1, **counts: object) -> None:
    """Let whole numbers of at least ``least`` pass.

    Example: ``check_counts("search tool", topk=0)`` raises ``search tool: topk must be a whole
    number of at least 1, found 0``.

    Raises:
        ToolError: one of them is something else; names it.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ToolError(
                f"{owner}: {name} must be a whole number of at least {least}, found {value!r}"
            )


def check_seconds(owner: str, *, above: float = 0.0, **seconds: object) -> None:
    """Let finite numbers above ``above`` pass.

    Raises:
        ToolError: one of them is something else; names it.
    """
    for name, value in seconds.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            usable = False
        else:
            usable = above < value < math.inf
        if not usable:
            raise ToolError(f"{owner}: {name} must be a number above {above:g}, found {value!r}")


def check_rate(owner: str, per_second: object) -> None:
    """Let a finite number above 0 pass, and None: any number of starts per second.

    Raises:
        ToolError: it is something else.
    """
    if per_second is not None:
        check_seconds(owner, per_second=per_second)


def check_documents(owner: str, found: object) -> None:
    """Let a sequence of documents pass.

    Example: ``check_documents("Mine.search", [Document(7, "Oak")])`` raises ``Mine.search found
    Document(id=7, contents='Oak', score=None, url=None): id is of type int``.

    Raises:
        ToolError: it is something else, or a field of a document is not what ``Document`` says.
    """
    if not isinstance(found, Sequence):
        raise ToolError(f"{owner} found {found!r:.60}, want a list of Documents")
    for document in found:
        if not isinstance(document, Document):
            raise ToolError(f"{owner} found {document!r:.60}, which is no Document")
        for name, kind in _FIELDS.items():
            value = getattr(document, name)
            if not isinstance(value, kind):
                kind_found = type(value).__name__
                raise ToolError(f"{owner} found {document!r:.120}: {name} is of type {kind_found}")
