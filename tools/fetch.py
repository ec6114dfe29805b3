"""Reading a page of the open web whose address a model chose."""

import ipaddress
import json
import socket
import ssl
import string
import threading
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar
from urllib.parse import quote, urljoin

import certifi

from graphpo_agent.errors import ToolError, first_line
from graphpo_agent.net.blocklist import BlockList
from graphpo_agent.net.checks import check_counts, check_rate, check_seconds
from graphpo_agent.net.deadline import Deadline, within
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.pace import Pace
from graphpo_agent.net.reply import Reply
from graphpo_agent.net.store import CallStore, request_key
from graphpo_agent.types import Document
from tools.addresses import Network, WebAddress, literal_address, parse_address, public_addresses
from tools.exchange import exchange
from tools.html import clean_text, decode_page, is_binary
from tools.html_pool import HtmlPool
from tools.page_kind import is_text, page_kind, parse_content_type
from tools.robots import RobotRules
from tools.sites import SiteFailed, Sites

__all__ = ["Resolver", "WebReader", "resolve"]

Resolver = Callable[[str, int], Sequence[str]]
"""Host name and port to every internet address of the host; raises socket.gaierror."""

_V = TypeVar("_V")

_MAX_REDIRECTS = 5
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_FIRST_BACKOFF_S = 0.5
_HEADERS = {
    "Accept": (
        "text/html, application/xhtml+xml, text/*;q=0.8, application/xml;q=0.8, "
        "application/rss+xml;q=0.8, application/atom+xml;q=0.8, application/json;q=0.5"
    ),
    "Accept-Encoding": "gzip, deflate",
    "Connection": "close",
}
_UNKNOWN_HOST = frozenset((socket.EAI_NONAME, socket.EAI_NODATA))
_HOST_GATES = 256


def resolve(host: str, port: int) -> list[str]:
    """The system's answer: every IPv4 and IPv6 address of a host.

    Raises:
        OSError: socket.gaierror: there is none, or none to be had.
    """
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in answers]


class WebReader:
    r"""A ``PageReader`` that fetches pages itself, as carefully as an address from a model needs.

    Only http and https on allowed ports; every internet address of the host, at the first
    request and at each redirect, must be public, and the connection goes to an address that was
    checked. No cookies, credentials or proxies. Bytes (after decompression), time and content
    types are limited; HTML and feeds are read in processes that can be killed, about 200,000
    characters of each; sites' robots.txt is respected. A ``<meta>`` that leads on within 5 seconds
    is a redirect. The text has no characters that cannot be seen.

    A page that fails for a passing reason is tried again while there is time; then it is one that
    cannot be had, or an outage where other sites cannot be reached either (``Sites``). At most
    ``per_host`` requests to one host run at once. Safe to use from several threads.

    Example::

        WebReader(blocked_hosts=["benchmark-mirrors"]).read("https://example.org/oak")
        # Document(id="https://example.org/oak", contents='"Oak"\nAn oak is a tree', ...)
    """

    def __init__(
        self,
        *,
        allowed_ports: Sequence[int] = (80, 443),
        allowed_networks: Sequence[str] = (),
        respect_robots: bool = True,
        include_links: bool = False,
        blocked_hosts: Sequence[str] = (),
        user_agent: str = "graphpo-agent/0.1 (reads single pages for a research agent)",
        deadline_s: float = 30.0,
        tries: int = 2,
        max_bytes: int = 4 * 2**20,
        per_host: int = 2,
        per_second: float | None = None,
        extraction_s: float = 10.0,
        extractors: int = 2,
        ca_file: str | None = None,
        store: CallStore | None = None,
        resolver: Resolver = resolve,
    ) -> None:
        """Set the limits; nothing is fetched or started yet.

        Args:
            allowed_ports: others are refused.
            allowed_networks: hosts of these networks may be visited although they are not on the
                public internet, such as ``10.20.0.0/16``, an intranet.
            respect_robots: read each site's robots.txt first and do what it says.
            include_links: keep links, as Markdown with absolute addresses; of a feed, those of its
                entries.
            blocked_hosts: patterns of a ``BlockList``, checked at each redirect, too.
            user_agent: what sites are told; its first word is what robots.txt may name.
            deadline_s: seconds for one page to arrive: look-up, all redirects and tries, and the
                wait for a process that turns it into text.
            tries: how often a page is asked for while it fails for a passing reason.
            max_bytes: of a page, decompressed; a longer one is cut there.
            per_host: requests to one host at once; others wait.
            per_second: pages begun per second at most, which does not count against their
                ``deadline_s``; None: any number.
            extraction_s: seconds to turn a page that has arrived into text; one that takes longer
                cannot be read, and its process is killed.
            extractors: processes that do so.
            ca_file: certificates (PEM) to trust instead of the public ones.
            store: where pages are recorded and taken from.
            resolver: looks up host names.

        Raises:
            ToolError: a limit that is not above 0, no list of ports or networks, a bad network or
                pattern, an unreadable ``ca_file``.
        """
        check_seconds("web reader", deadline_s=deadline_s, extraction_s=extraction_s)
        check_counts(
            "web reader",
            tries=tries,
            max_bytes=max_bytes,
            per_host=per_host,
            extractors=extractors,
        )
        check_rate("web reader", per_second)
        self._pace = Pace(per_second)
        self._allowed_ports = frozenset(_listed("allowed_ports", allowed_ports, int, "[80, 443]"))
        networks = _listed("allowed_networks", allowed_networks, str, "[10.20.0.0/16]")
        self._allowed_networks = [_network(text) for text in networks]
        self._include_links = include_links
        self._blocked = BlockList(blocked_hosts)
        self._headers = {"User-Agent": user_agent, **_HEADERS}
        self._deadline_s = deadline_s
        self._tries = tries
        self._max_bytes = max_bytes
        self._robots = RobotRules(user_agent) if respect_robots else None
        self._pool = HtmlPool(extractors, extraction_s)
        self._tls = _tls_context(ca_file)
        self._store = store
        self._resolver = resolver
        self._sites = Sites()
        self._gates = [threading.BoundedSemaphore(per_host) for _ in range(_HOST_GATES)]

    def read(self, url: str) -> Document:
        """The page as text; ``contents`` is its title in double quotes, a line end, its text.

        Raises:
            CallFailed: bad_arguments: an address that may not be visited; no_result: no such page,
                an empty one, one of another content type, or a site that is down; transient: the
                network is, or no process was free to make it text.
            ToolError: the store or the extractor cannot be used.
        """
        address = self._allowed(url)
        if self._store is None:
            record = self._record(address)
        else:
            record = self._store.fetch(self._key(address), lambda: self._record(address))
        page = json.loads(record)
        if "failure" in page:
            raise CallFailed(page["failure"], page["message"])
        self._allowed(page["url"])
        return Document(id=url, contents=f'"{page["title"] or url}"\n{page["text"]}', url=url)

    def _allowed(self, url: str) -> WebAddress:
        address = parse_address(url, self._allowed_ports)
        if self._blocked.covers(address.url):
            raise CallFailed("bad_arguments", f"{address.host}: this page may not be visited")
        return address

    def _key(self, address: WebAddress) -> str:
        settings = {
            "links": self._include_links,
            "max_bytes": self._max_bytes,
            "networks": sorted(map(str, self._allowed_networks)),
            "robots": self._robots is not None,
        }
        return request_key("READ", address.url, params=settings)

    def _record(self, address: WebAddress) -> bytes:
        """The page, or why it will never be one, as JSON.

        Raises:
            CallFailed: it may be one another time.
        """
        try:
            url, title, text = self._page(address)
        except CallFailed as error:
            if error.outage or isinstance(error, SiteFailed):
                raise
            return json.dumps({"failure": error.kind, "message": str(error)}).encode()
        return json.dumps({"url": url, "title": title, "text": text}).encode()

    def _page(self, address: WebAddress) -> tuple[str, str, str]:
        """Final address, title and text, after as many tries as it takes and there may be."""
        time.sleep(self._pace.wait_s())
        deadline = Deadline(self._deadline_s)
        for tried in range(1, self._tries + 1):
            try:
                return self._page_once(address, deadline)
            except SiteFailed as error:
                backoff = _FIRST_BACKOFF_S * 2 ** (tried - 1)
                last = tried == self._tries or deadline.passed or backoff >= deadline.left()
                if last or not error.again:
                    raise
                time.sleep(backoff)
        raise AssertionError("there is at least one try")

    def _page_once(self, address: WebAddress, deadline: Deadline) -> tuple[str, str, str]:
        """A page that leads on at once is a redirect, as in a browser."""
        for _ in range(_MAX_REDIRECTS + 1):
            final, reply = self._answer(address, deadline)
            title, text, leads_to = self._readable(final, reply, deadline)
            address = self._allowed(leads_to) if leads_to else final
            if address == final:
                if not text:
                    raise CallFailed("no_result", f"{final.host}: the page holds no text")
                return final.url, title, text
        raise _too_many_redirects(address)

    def _answer(self, address: WebAddress, deadline: Deadline) -> tuple[WebAddress, Reply]:
        """What the site says, and where; SiteFailed where it says nothing that will last."""
        try:
            final, reply = self._follow(address, deadline, self._robots)
            _check_status(final, reply.status)
        except CallFailed as error:
            if error.outage:
                raise self._sites.failed(address.host, error) from error
            raise
        return final, reply

    def _follow(
        self, address: WebAddress, deadline: Deadline, robots: RobotRules | None
    ) -> tuple[WebAddress, Reply]:
        """The first answer that is no redirect, and where it came from."""
        for _ in range(_MAX_REDIRECTS + 1):
            if robots is not None:
                robots.check(address, lambda place: self._follow(place, deadline, None)[1])
            reply = self._get(address, deadline)
            if reply.status not in _REDIRECTS or "location" not in reply.headers:
                return address, reply
            address = self._allowed(_target(address, reply.headers["location"]))
        raise _too_many_redirects(address)

    def _get(self, address: WebAddress, deadline: Deadline) -> Reply:
        """One request, in the host's turn, to an address that was looked up for it alone."""
        gate = self._gates[zlib.crc32(address.host.encode()) % _HOST_GATES]
        if not gate.acquire(timeout=deadline.left()):
            raise deadline.missed()
        try:
            reply = exchange(
                address,
                self._look_up(address, deadline),
                headers=self._headers,
                max_bytes=self._max_bytes,
                deadline=deadline,
                tls=self._tls,
            )
        finally:
            gate.release()
        self._sites.answered()
        return reply

    def _look_up(self, address: WebAddress, deadline: Deadline) -> list[str]:
        literal = literal_address(address.host)
        if literal is not None:
            return public_addresses(address.host, [literal], self._allowed_networks)
        try:
            resolved = within(deadline, lambda: self._resolver(address.host, address.port))
        except socket.gaierror as error:
            if error.errno in _UNKNOWN_HOST:
                raise CallFailed("no_result", f"{address.host}: no such host") from error
            raise CallFailed("transient", f"{address.host}: the look-up failed") from error
        return public_addresses(address.host, resolved, self._allowed_networks)

    def _readable(
        self, address: WebAddress, reply: Reply, deadline: Deadline
    ) -> tuple[str, str, str]:
        """Title and text of an answer, and the address it leads to at once; each may be empty."""
        content_type, charset = parse_content_type(reply.headers.get("content-type", ""))
        if not is_text(content_type):
            shown = content_type[:80]
            raise CallFailed("no_result", f"{address.host}: the page is not text but {shown}")
        title, text, leads_to = "", decode_page(reply.body, charset), ""
        if is_binary(text):
            raise CallFailed("no_result", f"{address.host}: the page is a binary file, not text")
        kind = page_kind(content_type, text)
        if kind != "text":
            found = self._pool.text(text, kind, address.url, self._include_links, deadline)
            title, text, leads_to = found
        return " ".join(clean_text(title).split()), clean_text(text), leads_to


def _target(address: WebAddress, location: str) -> str:
    """Where a redirect leads; ``location`` is the header's bytes as Latin-1.

    They are UTF-8, else what the server itself can read: its address is escaped byte by byte.
    """
    sent = location.encode("latin-1").strip()
    try:
        written = sent.decode()
    except UnicodeDecodeError:
        written = quote(sent, safe=string.punctuation)
    try:
        return urljoin(address.url, written.replace(" ", "%20"))
    except ValueError as error:
        raise CallFailed("bad_arguments", f"{address.host}: a redirect to nowhere") from error


def _too_many_redirects(address: WebAddress) -> CallFailed:
    return CallFailed("no_result", f"{address.host}: more than {_MAX_REDIRECTS} redirects")


def _check_status(address: WebAddress, status: int) -> None:
    if 200 <= status < 300:
        return
    message = f"{address.host}: status {status}"
    if status == 429:
        raise CallFailed("rate_limit", message)
    if 500 <= status < 600 or status in (408, 425):  # LinkedIn denies with 999
        raise CallFailed("transient", message)
    raise CallFailed("no_result", message)


def _listed(name: str, values: Sequence[_V], kind: type[_V], example: str) -> Sequence[_V]:
    """The values of a setting; ToolError where it is no list of its kind."""
    if (
        isinstance(values, str)
        or not isinstance(values, Collection)
        or not all(isinstance(each, kind) for each in values)
    ):
        raise ToolError(f"web reader: {name}: write a list such as {example}, found {values!r:.80}")
    return values


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ToolError(f"web reader: allowed_networks: {error}; write 10.20.0.0/16") from error


def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or certifi.where())
    except OSError as error:
        raise ToolError(
            f"web reader: ca_file {ca_file} cannot be used: {first_line(error)}"
        ) from error
