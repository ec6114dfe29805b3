"""What a site's robots.txt allows (RFC 9309)."""

import threading
from collections.abc import Callable
from urllib.robotparser import RobotFileParser

from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.reply import Reply
from tools.addresses import WebAddress

__all__ = ["RobotRules"]

_MAX_ORIGINS = 4096


class RobotRules:
    """The rules of the sites visited so far; safe to use from several threads.

    A site's rules are kept until those of many later ones have been read.

    Example::

        RobotRules("graphpo-agent/0.1").check(address, fetch)
        # CallFailed: no_result: example.org: robots.txt does not allow this page to be read
    """

    def __init__(self, user_agent: str) -> None:
        """Rules as they hold for a user agent."""
        self._user_agent = user_agent
        self._rules: dict[str, RobotFileParser] = {}
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
            rules = _read_rules(address, fetch)
            self._remember(address.origin, rules)
        if not rules.can_fetch(self._user_agent, address.url):
            raise CallFailed(
                "no_result", f"{address.host}: robots.txt does not allow this page to be read"
            )

    def _remember(self, origin: str, rules: RobotFileParser) -> None:
        with self._lock:
            if len(self._rules) >= _MAX_ORIGINS:
                del self._rules[next(iter(self._rules))]
            self._rules[origin] = rules


def _read_rules(address: WebAddress, fetch: Callable[[WebAddress], Reply]) -> RobotFileParser:
    """The rules of a site; one that has no robots.txt allows everything (section 2.3.1.3)."""
    reply = fetch(WebAddress(address.scheme, address.host, address.port, "/robots.txt"))
    if reply.status >= 500 or reply.status == 429:
        raise CallFailed("transient", f"{address.host}: robots.txt: status {reply.status}")
    rules = RobotFileParser()
    text = reply.body.decode("utf-8", "replace") if reply.status < 300 else ""
    rules.parse(text.splitlines())
    return rules
