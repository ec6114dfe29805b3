"""What http.client and urllib3 leave out of HTTP: interim responses, codings they cannot undo."""

import http.client
from collections.abc import Mapping

from urllib3.response import HTTPResponse

__all__ = ["FinalResponse", "unreadable_coding"]

_CODINGS = frozenset(
    ("aes128gcm", "br", "compress", "dcb", "dcz", "exi", "pack200-gzip", "x-compress", "zstd")
)
"""Registered ones that not every urllib3 undoes."""


class FinalResponse(http.client.HTTPResponse):
    """A response that is not an interim one, such as ``103 Early Hints`` (RFC 9110, section 15.2).

    The ``response_class`` of a connection.
    """

    def begin(self) -> None:
        """Read status and headers; those of interim responses are passed over."""
        super().begin()
        while 100 < self.status < 200 and self.status != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self.headers = None  # pyright: ignore[reportAttributeAccessIssue] (as before the first)
            super().begin()


def unreadable_coding(headers: Mapping[str, str]) -> str | None:
    """The content coding of a response that urllib3 would leave as it is; None: there is none.

    A name that is no coding, such as ``utf-8``, says nothing, as in browsers.

    Args:
        headers: finds them by their names in lower case.

    Example: ``unreadable_coding({"content-encoding": "br"})`` is ``"br"`` without brotli.
    """
    stated = headers.get("content-encoding", "").split(",")
    codings = [name.strip().lower() for name in stated]
    unreadable = _CODINGS.difference(HTTPResponse.CONTENT_DECODERS)
    return next((coding for coding in codings if coding in unreadable), None)
