"""One HTTP request to an internet address that was checked, bounded in time and bytes."""

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import DecodeError, HTTPError
from urllib3.response import BaseHTTPResponse

from graphpo_agent.net.alarm import alarm
from graphpo_agent.net.deadline import Deadline
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.http_message import FinalResponse, unreadable_coding
from graphpo_agent.net.reply import Reply
from tools.addresses import WebAddress

__all__ = ["exchange"]

_CHUNK = 65536
_BROKEN = (OSError, HTTPError, http.client.HTTPException, ValueError)
"""ValueError is urllib3's for a chunk of negative length."""
_LASTING = (ssl.SSLError, DecodeError)
"""The next try would meet the same, but for a connection that was cut short."""
_CUT_SHORT = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


class _PinnedHTTP(HTTPConnection):
    """Talks through the socket it is given; the host name serves the Host header only."""

    response_class = FinalResponse
    open_socket: Callable[[], socket.socket]

    def _new_conn(self) -> socket.socket:
        return self.open_socket()


class _PinnedHTTPS(HTTPSConnection):
    """As ``_PinnedHTTP``; the host name also serves SNI and the certificate check."""

    response_class = FinalResponse
    open_socket: Callable[[], socket.socket]

    def _new_conn(self) -> socket.socket:
        return self.open_socket()


def exchange(
    address: WebAddress,
    internet_addresses: Sequence[str],
    *,
    headers: Mapping[str, str],
    max_bytes: int,
    deadline: Deadline,
    tls: ssl.SSLContext,
) -> Reply:
    """Send one GET request and read the answer; redirects are returned, not followed.

    Args:
        address: names the host, for the request and the certificate.
        internet_addresses: checked ones; tried in order, and nothing else is connected to.
        headers: the only ones sent, besides Host.
        max_bytes: of the decompressed body; what is beyond is not read.
        deadline: everything is over by then, whatever the server does.
        tls: verifies the host's certificate.

    Raises:
        CallFailed: transient: no connection, a broken one, or out of time; no_result: a wrong
            certificate, a server that speaks no TLS as of today, or a page whose body cannot be
            decompressed.
    """
    host, port = address.host, address.port
    connection: _PinnedHTTP | _PinnedHTTPS = _PinnedHTTP(host, port, timeout=deadline.left())
    if address.scheme == "https":
        connection = _PinnedHTTPS(host, port, timeout=deadline.left(), ssl_context=tls)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        connection.open_socket = lambda: _connect(internet_addresses, address, deadline, stack)
        try:
            connection.request("GET", address.target, headers=dict(headers), preload_content=False)
            response = connection.getresponse()
            stack.callback(response.close)
            coding = unreadable_coding(response.headers)
            if coding is not None and response.status < 300:
                reason = f"the page is compressed as {coding}, which was not asked for"
                raise CallFailed("no_result", f"{address.host}: {reason}")
            body = _read(response, max_bytes)
        except _BROKEN as error:
            if deadline.passed:
                raise deadline.missed() from error
            lasting = isinstance(error, _LASTING) and not isinstance(error, _CUT_SHORT)
            kind = "no_result" if lasting else "transient"
            raise CallFailed(kind, f"{address.host}: {_one_line(error)}") from error
    if deadline.passed:
        raise deadline.missed()
    names = {name.lower(): value for name, value in response.headers.items()}
    return Reply(response.status, names, body)


def _connect(
    internet_addresses: Sequence[str],
    address: WebAddress,
    deadline: Deadline,
    stack: contextlib.ExitStack,
) -> socket.socket:
    """A socket to the first internet address that answers; shut down when the time is up."""
    refused = OSError("no internet address")
    for number, internet_address in enumerate(internet_addresses):
        patience = deadline.left() / (len(internet_addresses) - number)
        try:
            connected = socket.create_connection((internet_address, address.port), patience)
        except OSError as error:
            refused = error
            continue
        connected.settimeout(deadline.left())
        stack.enter_context(_shut_down_at(deadline, connected))
        return connected
    raise refused


@contextlib.contextmanager
def _shut_down_at(deadline: Deadline, connected: socket.socket) -> Iterator[None]:
    """End the connection at the deadline, even while a server sends byte after byte.

    A duplicate descriptor is kept: TLS takes the first one over.
    """
    handle = connected.dup()

    def shut_down() -> None:
        with contextlib.suppress(OSError):
            handle.shutdown(socket.SHUT_RDWR)

    try:
        with alarm(deadline.left(), shut_down):
            yield
    finally:
        handle.close()


def _read(response: BaseHTTPResponse, max_bytes: int) -> bytes:
    """The decompressed body up to ``max_bytes``."""
    body = bytearray()
    for chunk in response.stream(_CHUNK, decode_content=True):
        body += chunk
        if len(body) >= max_bytes:
            break
    return bytes(body[:max_bytes])


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
