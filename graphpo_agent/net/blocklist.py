"""Hosts and paths that a tool must not show, and those that hold benchmark answers."""

import posixpath
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote

from graphpo_agent.errors import ToolError

__all__ = ["BENCHMARK_MIRRORS", "BlockList"]

_HUBS = ("huggingface.co", "hf.co", "hf-mirror.com", "modelscope.cn", "kaggle.com")
_CODE_HOSTS = (
    "github.com",
    "github.io",
    "raw.githubusercontent.com",
    "cdn.jsdelivr.net",
    "cdn.statically.io",
    "raw.githack.com",
    "rawcdn.githack.com",
)
_DATA_SETS = ("gaia-benchmark", "browsecomp", "browse_comp", "webwalker", "xbench")
_WORDS = ("gaia", *_DATA_SETS)
_REPOSITORIES = (*_DATA_SETS, "simple-evals", "webthinker")

BENCHMARK_MIRRORS: tuple[str, ...] = (
    *(f"{hub}/*{word}" for hub in _HUBS for word in (*_WORDS, "asearcher-test")),
    *(f"{host}/*{name}" for host in _CODE_HOSTS for name in _REPOSITORIES),
    *(f"*{word}*.hf.space" for word in _WORDS),
    "openaipublic.blob.core.windows.net/simple-evals",
    "*huggingface-co.translate.goog",
    "xbench.org",
)
"""Where GAIA, BrowseComp, WebWalkerQA and xbench, their answers and leaderboards are published;
the patterns of a ``BlockList`` entry ``benchmark-mirrors``."""

_BEGINNING = re.compile(r"[/=]")
_HOST_AND_PATH = re.compile(
    r"(?:[^/?#@]{0,256}@)?(?P<host>[^/?#@:]{1,253}?)\.?(?::\d*)?(?=[/?#&]|$)(?P<path>.*)", re.DOTALL
)
_MAX_CHARACTERS = 4096
_MAX_DECODINGS = 3


class _Pattern(NamedTuple):
    host: re.Pattern[str]
    path: re.Pattern[str]


class BlockList:
    """A set of ``host`` or ``host/path`` patterns; ``*`` stands for any text.

    A host covers its subdomains, a path what begins with it; case, ports, dot segments and
    percent-encoding make no difference. An address that carries another one (a web archive, a
    reader service, a translation proxy) is covered when the carried one is.

    Example::

        blocked = BlockList(["benchmark-mirrors", "example.org/private"])
        blocked.covers("https://huggingface.co/datasets/gaia-benchmark/GAIA")       # True
        blocked.covers("http://web.archive.org/web/2025/http://example.org/private")  # True
        blocked.covers("https://example.org/public")                                # False
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """Block what the patterns cover; ``benchmark-mirrors`` stands for the built-in list.

        Raises:
            ToolError: ``patterns`` is no list of patterns, or one of them holds a scheme or
                nothing.
        """
        if isinstance(patterns, str):
            raise ToolError(f"blocked_hosts: write a list of hosts, found {patterns!r}")
        self._patterns: list[_Pattern] = []
        for pattern in patterns:
            members = BENCHMARK_MIRRORS if pattern == "benchmark-mirrors" else (pattern,)
            self._patterns += [_compiled(member) for member in members]

    def covers(self, url: str) -> bool:
        """Whether an address, or one written inside it, is blocked."""
        if not self._patterns:
            return False
        return any(self._covers_one(address) for address in _addresses_in(url))

    def _covers_one(self, address: str) -> bool:
        """Whether ``host/path`` is blocked; ``address`` may be something else, too."""
        match = _HOST_AND_PATH.match(address)
        if match is None:
            return False
        path = posixpath.normpath("/" + match["path"].lstrip("/"))
        return any(
            pattern.host.fullmatch(match["host"]) and pattern.path.match(path)
            for pattern in self._patterns
        )


def _compiled(pattern: str) -> _Pattern:
    host, _, path = pattern.lower().rstrip("/").partition("/")
    if "://" in pattern or not host:
        raise ToolError(
            f"blocked_hosts: write host or host/path without a scheme, found {pattern!r}"
        )
    return _Pattern(
        re.compile(rf"(?:.*\.)?{_glob(host)}", re.DOTALL), re.compile("/" + _glob(path), re.DOTALL)
    )


def _glob(text: str) -> str:
    return ".*".join(re.escape(part) for part in text.split("*"))


def _addresses_in(url: str) -> list[str]:
    """The text behind each place where an address can begin, decoded and lower-case.

    Example: ``https://archive.org/x?u=Example.org/a`` gives ``archive.org/x?u=example.org/a``,
    ``example.org/a`` and others that are no addresses.
    """
    text = url[:_MAX_CHARACTERS]
    for _ in range(_MAX_DECODINGS):
        text = unquote(text)
    text = text.lower().replace("\\", "/")
    return [text, *(text[begin.end() :] for begin in _BEGINNING.finditer(text))]
