"""Credentials: read from the environment, and kept out of every message and record."""

import json
import os
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

from graphpo_agent.errors import ToolError
from graphpo_agent.net.store import CallStore

__all__ = ["Redactor", "bearer", "secret_from_env", "without_user"]

_MIN_LENGTH = 8
"""Shorter values are placeholders such as ``EMPTY``; blotting them out would spoil plain text."""
_BLOT = "***"
_USER = re.compile(r"(?<=//)[^/?#]*@|^[^/?#]*@")


def secret_from_env(name: str, store: CallStore | None = None) -> str:
    """The value of an environment variable that holds a credential, outer white space removed.

    A service whose store makes no calls needs none: then it is empty where it is not set.

    Example: ``secret_from_env("SERPER_KEY_ID")``.

    Raises:
        ToolError: it is needed and not set, empty, or holds characters that no HTTP header can
            carry. The message names the variable and never shows its value.
    """
    value = os.environ.get(name, "").strip()
    if not value and store is not None and not store.asks:
        return ""
    if not value:
        raise ToolError(f"environment variable {name} is not set; export it with the service's key")
    if not value.isascii() or not value.isprintable():
        raise ToolError(
            f"environment variable {name} holds characters that cannot be sent as a key; "
            "copy the key again"
        )
    return value


def bearer(api_key_env: str | None, store: CallStore | None) -> dict[str, str]:
    """The header that carries the key as most services want it; none without a variable.

    Raises:
        ToolError: the environment variable is not set, and ``store`` may make calls.
    """
    if api_key_env is None:
        return {}
    return {"Authorization": f"Bearer {secret_from_env(api_key_env, store)}"}


def without_user(url: str) -> str:
    """An address whose user name and password are blotted out.

    Example: ``without_user("http://me:secret@host/a")`` is ``"http://***@host/a"``.
    """
    return _USER.sub(f"{_BLOT}@", url)


class Redactor:
    """Replaces credentials by ``***``, however they are spelled: plain, in a URL, in JSON.

    A header value such as ``Bearer sk-1234567`` is also removed without its first word. Values
    below eight characters are placeholders and left alone.

    Example: ``Redactor(["Bearer sk-1234567"]).text("key sk-1234567 refused")`` is
    ``"key *** refused"``.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        values = {part for secret in secrets for part in (secret.strip(), *secret.split()[-1:])}
        spellings = {
            spelling
            for value in values
            if len(value) >= _MIN_LENGTH
            for spelling in _spellings(value)
        }
        longest_first = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))
        self._texts = re.compile("|".join(map(re.escape, longest_first))) if spellings else None
        self._bytes = [spelling.encode() for spelling in longest_first]

    def text(self, text: str) -> str:
        """The text without credentials."""
        return text if self._texts is None else self._texts.sub(_BLOT, text)

    def body(self, body: bytes) -> bytes:
        """The bytes without credentials."""
        for spelling in self._bytes:
            body = body.replace(spelling, _BLOT.encode())
        return body


def _spellings(value: str) -> set[str]:
    in_json = json.dumps(value)[1:-1]
    in_urls = {quote(value), quote(value, safe=""), quote_plus(value)}
    return {value, in_json, in_json.replace("/", "\\/"), *in_urls}
