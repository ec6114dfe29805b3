"""Which web addresses may be asked for, when a model chose them.

An address is taken apart once, here, and what was checked is what is connected to: the fetcher
uses the host, port and target of a ``WebAddress`` and the internet addresses that
``public_addresses`` returned, never the text again.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Literal

from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from graphpo_agent.net.failures import CallFailed

__all__ = [
    "Network",
    "WebAddress",
    "is_public",
    "literal_address",
    "parse_address",
    "public_addresses",
]

Network = IPv4Network | IPv6Network

_MAX_CHARACTERS = 2048
_PORTS = {"http": 80, "https": 443}
_GLOBAL_IPV6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_SPECIAL: tuple[Network, ...] = (
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),
    IPv4Network("168.63.129.16/32"),
    IPv6Network("2001::/23"),
    IPv6Network("3fff::/20"),
)
"""Not everybody's, whatever this Python's ``ipaddress`` knows: protocol assignments (RFC 6890; a
cloud answers with its credentials there), old relays, a cloud's own service, documentation."""
_UNWANTED = re.compile(r"[\x00-\x20\x7f-\x9f\\]")
_LABEL = "[a-z0-9_][a-z0-9_-]{0,62}"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*\.?|\[[0-9a-f:.]+\]")


@dataclass(frozen=True, slots=True)
class WebAddress:
    """One http address, taken apart; the fragment is gone, the host is lower-case ASCII.

    Example: ``https://Example.org/a b?c#d`` would be refused for its space;
    ``https://Example.org/a?c#d`` is ``WebAddress("https", "example.org", 443, "/a?c")``.
    """

    scheme: Literal["http", "https"]
    host: str
    """Without the brackets of an IPv6 literal."""
    port: int
    target: str
    """Path and query, percent-encoded: what the request line asks for."""

    @property
    def origin(self) -> str:
        """Scheme, host and port as text; the port is left out where it is the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    @property
    def url(self) -> str:
        """The whole address as text."""
        return self.origin + self.target


def parse_address(url: str, allowed_ports: Collection[int] = (80, 443)) -> WebAddress:
    """Take apart an address that a model or a page wrote.

    Raises:
        CallFailed: bad_arguments: not http or https, a user name or password, a port that is not
            allowed, no host, characters that belong in no address, or too long.
    """
    if len(url) > _MAX_CHARACTERS:
        raise _refused(url[:80] + "…", f"it is longer than {_MAX_CHARACTERS} characters")
    if _UNWANTED.search(url):
        raise _refused(url, "it holds a space, a backslash or a control character")
    try:
        parts = parse_url(url)
    except LocationParseError as error:
        raise _refused(url, "it cannot be read as an address") from error
    scheme = parts.scheme
    if scheme != "http" and scheme != "https":
        raise _refused(url, "it must start with http:// or https://")
    if parts.auth is not None:
        raise _refused(url, "it holds a user name")
    if not parts.host or not _HOST.fullmatch(parts.host):
        raise _refused(url, "it has no usable host name")
    port = parts.port if parts.port is not None else _PORTS[scheme]
    if port not in allowed_ports:
        raise _refused(url, f"port {port} is not allowed")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query is not None else "")
    return WebAddress(scheme, parts.host.strip("[]"), port, target)


def literal_address(host: str) -> str | None:
    """The internet address that a host name spells, in any notation; None: it is a name.

    Besides ``10.0.0.1`` and IPv6 these are the forms of inet_aton(3) that resolvers accept:
    ``2130706433``, ``0x7f.1``, ``0177.0.0.1`` and ``127.1`` are all 127.0.0.1.
    """
    bare = host.rstrip(".")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        pass
    try:
        return str(IPv4Address(socket.inet_aton(bare)))
    except OSError:
        return None


def public_addresses(
    host: str, resolved: Sequence[str], allowed_networks: Sequence[Network] = ()
) -> list[str]:
    """The resolved internet addresses of a host, when each of them may be connected to.

    Args:
        host: for the message.
        resolved: every A and AAAA answer.
        allowed_networks: these may be connected to as well (an intranet).

    Raises:
        CallFailed: bad_arguments when one of them is not public; no_result when there is none.
    """
    if not resolved:
        raise CallFailed("no_result", f"{host}: this host is not known")
    for address in resolved:
        ip = ipaddress.ip_address(address)
        if is_public(address) or any(ip in network for network in allowed_networks):
            continue
        raise CallFailed("bad_arguments", f"{host}: this host is not on the public internet")
    return list(dict.fromkeys(resolved))


def is_public(address: str) -> bool:
    """Whether an internet address is one that anybody on the public internet can reach.

    Addresses that carry an IPv4 address (v4-mapped, 6to4, Teredo, NAT64) are judged by what they
    carry. IPv6 outside 2000::/3 is not global unicast (RFC 4291, section 2.4).
    """
    ip = ipaddress.ip_address(address)
    carried = _carried(ip) if isinstance(ip, IPv6Address) else ()
    if carried:
        return all(is_public(str(each)) for each in carried)
    if any(ip in network for network in _SPECIAL):
        return False
    if isinstance(ip, IPv6Address) and ip not in _GLOBAL_IPV6:
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


def _carried(ip: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses inside an IPv6 address of a transition mechanism."""
    if ip.ipv4_mapped is not None:
        return (ip.ipv4_mapped,)
    if ip.sixtofour is not None:
        return (ip.sixtofour,)
    if ip.teredo is not None:
        return ip.teredo
    if ip in _NAT64:
        return (IPv4Address(ip.packed[-4:]),)
    return ()


def _refused(url: str, why: str) -> CallFailed:
    return CallFailed("bad_arguments", f"{url!r} cannot be visited: {why}")
