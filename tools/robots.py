"""What a site's robots.txt allows (RFC 9309)."""

import re
import string
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.reply import Reply
from tools.addresses import WebAddress

__all__ = ["RobotRules"]

_MAX_ORIGINS = 4096
_MAX_BYTES = 500 * 2**10
"""Of a robots.txt; what is beyond is not read (section 2.5)."""
_ESCAPED = re.compile("%[0-9A-Fa-f]{2}")
_UNRESERVED = frozenset(string.ascii_letters + string.digits + "-._~")
_KEPT = "%!&'()+,/:;=?@[]#"
"""Besides the unreserved: characters that stand for themselves in a path."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line of a robots.txt.

    Example: ``_Rule("/private/*.pdf$", allows=False)``
    """

    pattern: str
    """Escaped as a path is; ``*`` stands for any characters, ``$`` for the end."""
    allows: bool

    def covers(self, path: str) -> bool:
        """Whether the pattern fits the beginning of an escaped path that ends with ``$``.

        The path is searched once, from left to right, however many ``*`` a site writes.
        """
        first, *others = self.pattern.split("*")
        if not path.startswith(first):
            return False
        place = len(first)
        for part in others:
            found = path.find(part, place)
            if found < 0:
                return False
            place = found + len(part)
        return True


class RobotRules:
    """The rules of the sites visited so far; safe to use from several threads.

    A site's rules are kept until those of many later ones have been read.

    Example::

        RobotRules("graphpo-agent/0.1").check(address, fetch)
        # CallFailed: no_result: example.org: robots.txt does not allow this page to be read
    """

    def __init__(self, user_agent: str) -> None:
        """Rules as they hold for a user agent, whose first word is its product token."""
        self._token = _token(user_agent)
        self._rules: dict[str, Sequence[_Rule]] = {}
        self._lock = threading.Lock()

    def check(self, address: WebAddress, fetch: Callable[[WebAddress], Reply]) -> None:
        """Let a page pass that may be read.

        Args:
            address: the page.
            fetch: reads the robots.txt of a site that is not known yet.

        Raises:
            CallFailed: no_result: it may not be read; transient: the site does not say, its
                server failing (section 2.3.1.4); any other: as ``fetch`` raises.
        """
        with self._lock:
            rules = self._rules.get(address.origin)
        if rules is None:
            rules = _rules(self._token, _robots_txt(address, fetch))
            self._remember(address.origin, rules)
        if not _allowed(rules, address.target):
            raise CallFailed(
                "no_result", f"{address.host}: robots.txt does not allow this page to be read"
            )

    def _remember(self, origin: str, rules: Sequence[_Rule]) -> None:
        with self._lock:
            if len(self._rules) >= _MAX_ORIGINS:
                del self._rules[next(iter(self._rules))]
            self._rules[origin] = rules


def _robots_txt(address: WebAddress, fetch: Callable[[WebAddress], Reply]) -> str:
    """What a site says; one that has no robots.txt allows everything (section 2.3.1.3)."""
    reply = fetch(WebAddress(address.scheme, address.host, address.port, "/robots.txt"))
    if 500 <= reply.status < 600 or reply.status == 429:
        raise CallFailed("transient", f"{address.host}: robots.txt: status {reply.status}")
    return reply.body[:_MAX_BYTES].decode("utf-8-sig", "replace") if reply.status < 300 else ""


def _rules(token: str, text: str) -> Sequence[_Rule]:
    """Those of all groups that name the token, else of those for everybody (section 2.2.1)."""
    rules: dict[str, list[_Rule]] = {}
    group: set[str] = set()
    complete = False
    for line in re.split("[\r\n]+", text):
        key, _, value = (part.strip() for part in line.partition("#")[0].partition(":"))
        key = key.lower()
        if key == "user-agent":
            group, complete = (set() if complete else group), False
            named = _token(value)
            if named in (token, "*"):
                group.add(named)
                rules.setdefault(named, [])
        elif key in ("allow", "disallow"):
            complete = True
            if value:  # an empty one says nothing
                for named in group:
                    rules[named].append(_Rule(_pattern(value), key == "allow"))
    return rules.get(token, rules.get("*", ()))


def _allowed(rules: Sequence[_Rule], target: str) -> bool:
    """What the longest rule that covers a page says, an ``Allow`` before a ``Disallow``."""
    path = _escaped(target) + "$"
    covering = [(len(rule.pattern), rule.allows) for rule in rules if rule.covers(path)]
    return max(covering, default=(0, True))[1]


def _token(user_agent: str) -> str:
    """The product token of ``Oak-Bot/1.0 (reads)`` is ``oak-bot``."""
    return re.split(r"[\s/]", user_agent, maxsplit=1)[0].lower()


def _pattern(value: str) -> str:
    end = "$" if value.endswith("$") else ""
    return _escaped(value.removesuffix("$"), kept="*") + end


def _escaped(path: str, kept: str = "") -> str:
    """A path in the one spelling that is compared (section 2.2.2).

    Example: ``_escaped("/%62ar/ツ*")`` is ``"/bar/%E3%83%84%2A"``.
    """

    def needed(escape: re.Match[str]) -> str:
        character = chr(int(escape[0][1:], 16))
        return character if character in _UNRESERVED else escape[0].upper()

    return quote(_ESCAPED.sub(needed, path), safe=_KEPT + kept)
