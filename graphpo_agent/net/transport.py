"""One HTTP exchange that ends in time and in bounded memory, whatever the server does.

``requests`` limits each read, so a server that sends a byte now and then is never stopped. Here a
watchdog shuts the socket down when the exchange has had its time, from the connection on: also
while a proxy answers and while the two agree on TLS.
"""

import base64
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import requests
import urllib3
from requests.adapters import HTTPAdapter
from requests.utils import get_auth_from_url, prepend_scheme_if_needed, select_proxy
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import NameResolutionError, NewConnectionError
from urllib3.util import parse_url
from urllib3.util.connection import create_connection

from graphpo_agent.errors import ToolError, first_line
from graphpo_agent.net.alarm import alarm
from graphpo_agent.net.http_message import FinalResponse, unreadable_coding
from graphpo_agent.net.reply import Reply, Verdict

__all__ = ["Broken", "Session", "exchange", "proxy_secrets"]

_CONNECT_S = 10.0
"""For each address of a host, at most."""
_SHORTEST_S = 0.001
"""A time-out of 0 would be none."""
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
_CHUNK_BYTES = 1 << 16
_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError)
"""ValueError is urllib3's for a chunk of negative length."""
_NO_ADDRESS = (TypeError, ValueError, urllib3.exceptions.LocationParseError)
_DROPPED_HEADERS = frozenset(
    ("set-cookie", "content-length", "content-encoding", "transfer-encoding", "connection")
)


@dataclass(frozen=True, slots=True)
class Broken:
    """An exchange without a complete reply.

    Example: ``Broken("transient", "no complete reply within 3 s")``
    """

    verdict: Verdict
    """``transient`` (refused, reset, cut short, too slow, compressed otherwise than asked for),
    ``no_result`` (too large) or ``configuration`` (a certificate that is not trusted here, https
    to what speaks plain http, a proxy that wants a login)."""
    reason: str
    """In one line."""


class _Watchdog:
    """Shuts down the connection of one exchange when its time is over.

    Attributes:
        barked: whether it did.
    """

    def __init__(self, seconds: float) -> None:
        self.barked = False
        self._end = time.monotonic() + seconds
        self._handle: socket.socket | None = None
        self._lock = threading.Lock()

    def left(self) -> float:
        """Seconds that the exchange still has, more than 0."""
        return max(self._end - time.monotonic(), _SHORTEST_S)

    def guard(self, sock: socket.socket) -> None:
        """Watch this connection from now on.

        A duplicate descriptor is kept: TLS takes the first one over.
        """
        handle = socket.socket(fileno=os.dup(sock.fileno()))
        self.close()
        with self._lock:
            self._handle = handle
            if self.barked:
                _shut_down(handle)

    def bark(self) -> None:
        """The time is over."""
        with self._lock:
            self.barked = True
            if self._handle is not None:
                _shut_down(self._handle)

    def close(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            if self._handle is not None:
                self._handle.close()
            self._handle = None


def _shut_down(sock: socket.socket) -> None:
    """End all reads of a socket, also those that wait in another thread."""
    with suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)


class _Watch(threading.local):
    dog: _Watchdog


_watch = _Watch()
"""The watchdog of the exchange that this thread is in."""


class _GuardedConnection(HTTPConnection):
    """Shows its socket to the watchdog, when it is made and when it is used again."""

    response_class = FinalResponse

    def _new_conn(self) -> socket.socket:
        try:
            sock = _connect(self._dns_host, self.port, _watch.dog, self.socket_options)
        except socket.gaierror as error:
            raise NameResolutionError(self.host, self, error) from error
        except OSError as error:
            reason = f"Failed to establish a new connection: {error}"
            raise NewConnectionError(self, reason) from error
        _watch.dog.guard(sock)
        return sock

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:
            _watch.dog.guard(self.sock)
        super().request(*args, **kwargs)


def _connect(host: str, port: int, dog: _Watchdog, options: Any) -> socket.socket:
    """A socket to the first address of a host that answers; each has a share of what is left."""
    addresses = [found[4] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    refused = OSError("the host has no address")
    for number, address in enumerate(addresses):
        patience = min(dog.left() / (len(addresses) - number), _CONNECT_S)
        numeric, _ = socket.getnameinfo(address, _NUMERIC)
        try:
            sock = create_connection((numeric, port), patience, socket_options=options)
        except OSError as error:
            refused = error
            continue
        sock.settimeout(dog.left())
        return sock
    raise refused


class _GuardedTlsConnection(_GuardedConnection, HTTPSConnection):
    pass


class _GuardedPool(HTTPConnectionPool):
    ConnectionCls = _GuardedConnection  # pyright: ignore[reportAssignmentType] (urllib3's own does)


class _GuardedTlsPool(HTTPSConnectionPool):
    ConnectionCls = _GuardedTlsConnection  # pyright: ignore[reportAssignmentType] (as above)


_POOLS = {"http": _GuardedPool, "https": _GuardedTlsPool}


class _GuardedAdapter(HTTPAdapter):
    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager


class Session(requests.Session):
    """Connections that are kept open, for one thread at a time; no reply leads it elsewhere.

    The proxies and certificate bundles that the environment names for a host are looked up once.
    """

    def __init__(self) -> None:
        super().__init__()
        for scheme in _POOLS:
            self.mount(f"{scheme}://", _GuardedAdapter(pool_connections=4, pool_maxsize=1))
        self._settings: dict[tuple[str, str], Any] = {}

    def environment(self, url: str) -> Mapping[str, Any]:
        """What ``send`` is to be told for an address.

        Raises:
            ToolError: a proxy that the environment names is no address or none of HTTP, or the
                certificates that it names cannot be read.
        """
        host = urlsplit(url)[:2]
        if host not in self._settings:
            settings = self.merge_environment_settings(url, {}, True, None, None)
            _check_proxy(url, settings["proxies"])
            if host[0].lower() == "https" and settings["verify"] is not True:
                _check_certificates(settings["verify"])
            self._settings[host] = settings
        return self._settings[host]

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """None: also where redirects are not followed, requests would read the whole reply for it.

        And it would raise errors of many kinds about an address that cannot be read.
        """
        return None


def _check_proxy(url: str, proxies: dict[str, str]) -> None:
    """Refuse what requests would raise errors of many kinds about; it may hold a password."""
    proxy = select_proxy(url, proxies)
    if proxy is None:
        return
    try:
        scheme, _, host, *_ = parse_url(prepend_scheme_if_needed(proxy, "http"))
    except _NO_ADDRESS:
        scheme = host = None
    named = "the proxy that the environment names (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY)"
    if not host:
        raise ToolError(f"{named} has no host; write http://host:port")
    if scheme not in _POOLS:
        raise ToolError(
            f"{named} speaks {scheme}, want http or https; write http://host:port, or name the "
            "hosts that need none in NO_PROXY"
        )


def _check_certificates(path: str) -> None:
    """Refuse what every connection would fail for: no file or directory of certificates."""
    try:
        if os.path.isdir(path):
            ssl.create_default_context(capath=path)
        else:
            ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ToolError(
            f"the certificates that the environment names (REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE) "
            f"cannot be read: {path}: {first_line(error)}"
        ) from error


def proxy_secrets() -> list[str]:
    """Passwords of the proxies that the environment names, plain and as they are sent."""
    secrets = []
    for proxy in getproxies().values():
        with suppress(*_NO_ADDRESS):  # refused when it is used
            user, password = get_auth_from_url(prepend_scheme_if_needed(proxy, "http"))
            sent = base64.b64encode(f"{user}:{password}".encode("latin-1")).decode()
            secrets += [password, sent] if password else []
    return secrets


def exchange(
    session: Session, request: requests.PreparedRequest, seconds: float, max_bytes: int
) -> Reply | Broken:
    """Send a request and read the whole reply; redirects are not followed.

    The proxies and certificate bundles that the environment names are used, as by other programs
    (``HTTPS_PROXY``, ``NO_PROXY``, ``REQUESTS_CA_BUNDLE``). Cookies and ``.netrc`` are not.
    Looking up a host's name has the limits of the system's resolver.

    Args:
        session: of no other exchange at this moment.
        request: prepared.
        seconds: for everything from here to the last byte.
        max_bytes: of the body, decompressed.
    """
    assert request.url is not None
    settings = session.environment(request.url)
    outcome: Reply | Broken
    dog = _watch.dog = _Watchdog(seconds)
    with closing(dog), alarm(seconds, dog.bark):
        try:
            with session.send(  # the dog is sooner than this time-out
                request, timeout=seconds + 1.0, allow_redirects=False, **settings
            ) as response:
                outcome = _read(response, max_bytes)
        except _ERRORS as error:
            outcome = _broken(error)
    # Behind a shut socket the end of a reply looks like any other end: the dog knows better.
    return (
        Broken("transient", f"no complete reply within {seconds:.3g} s") if dog.barked else outcome
    )


def _read(response: requests.Response, max_bytes: int) -> Reply | Broken:
    """The reply, its body decompressed piece by piece."""
    coding = unreadable_coding(response.headers)
    if coding is not None and response.status_code < 300:
        return Broken("transient", f"the reply is compressed as {coding}, which was not asked for")
    body = bytearray()
    for chunk in response.iter_content(_CHUNK_BYTES):
        body += chunk
        if len(body) > max_bytes:
            return Broken("no_result", f"the reply is larger than {max_bytes} bytes")
    return Reply(response.status_code, _kept(response.headers), bytes(body))


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Names in lower case; what belongs to the connection, and cookies, left out."""
    lowered = {name.lower(): value for name, value in headers.items()}
    return {name: value for name, value in lowered.items() if name not in _DROPPED_HEADERS}


def _broken(error: BaseException) -> Broken:
    """What went wrong, inside all that requests and urllib3 have wrapped around it."""
    cause: BaseException | None = error
    while cause is not None:
        error = cause
        inner = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else None
        cause = inner or next((one for one in error.args if isinstance(one, BaseException)), None)
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        reason = reason.partition("): ")[2] or reason  # the connection's name is not the user's
    if "Tunnel connection failed: 407" in reason:
        return Broken("configuration", f"{reason}: HTTPS_PROXY needs the proxy's user and password")
    if "WRONG_VERSION_NUMBER" in reason:
        return Broken(
            "configuration",
            f"{reason}: no TLS is spoken there; write http:// (of a proxy: in HTTPS_PROXY)",
        )
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return Broken(
            "configuration", f"{reason}: set REQUESTS_CA_BUNDLE to the file of its certificate"
        )
    return Broken("transient", reason)
