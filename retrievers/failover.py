"""One question to several servers of the same kind: any that is well may answer it."""

import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator

from graphpo_agent.errors import QuotaError, ToolError
from graphpo_agent.net.client import HttpService, Limits, classify_json
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.secrets import without_user

__all__ = ["ServerPool", "ServerUrls", "endpoint"]

T = TypeVar("T")

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 30.0
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 8.0
_TRY_SHARE = 0.45
"""Of a question's time for one try, where there are several servers."""
_MAX_REPLY_BYTES = 64 * 2**20


@dataclass(slots=True)
class _Server:
    """One server; one that failed ``failures`` times in a row rests until ``rests_until``."""

    url: str
    failures: int = 0
    rests_until: float = 0.0


def _checked(urls: str | Sequence[str]) -> str | Sequence[str]:
    for url in [urls] if isinstance(urls, str) else urls:
        try:
            endpoint("server", url, "/")
        except ToolError as error:
            raise ValueError(str(error)) from None
    return urls


ServerUrls = Annotated[str | Sequence[str], AfterValidator(_checked)]
"""One or several addresses; a dry run checks their form."""


class ServerPool:
    """Servers that answer ``POST`` with JSON, asked in turn; threads share it.

    A server that gave no usable answer is left alone for 1 s, after each further failure twice as
    long, up to 30 s; then one question tries it. While all rest, the one whose rest ends first is
    asked. What is no such server at all (a wrong address, another program) is left alone in the
    same way while there are others, with a warning. Refusals of the question itself (4xx) go to
    the caller.

    Attributes:
        path: what is asked, such as ``/retrieve``.

    Example::

        pool = ServerPool("retriever", ["10.0.0.1:8000", "10.0.0.2:8000"], "/retrieve",
                          deadline_s=120, tries=10, concurrency=16)
        pool.ask({"queries": ["oak"], "topk": 3}, lambda value, server: value["result"])
    """

    def __init__(
        self,
        name: str,
        urls: str | Sequence[str],
        path: str,
        *,
        deadline_s: float,
        tries: int,
        concurrency: int,
        per_second: float | None = None,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            name: what messages call the servers.
            urls: one or several; see ``endpoint``.
            path: where they answer, for those that name no path.
            deadline_s: seconds for one question, waits included. With several servers one try
                has less than half of it, so that a server that hangs leaves time for another.
            tries: of one question, over all servers.
            concurrency: requests under way at once.
            per_second: requests to all servers, tries included; None: any number.

        Raises:
            ToolError: no URL, one that cannot be used, or a limit out of range.
        """
        addresses = [urls] if isinstance(urls, str) else list(urls)
        if not addresses:
            raise ToolError(f"{name}: urls must name at least one server")
        self.path = path
        self._name = name
        self._servers = [_Server(endpoint(name, url, path)) for url in addresses]
        alone = len(addresses) == 1  # then the service itself repeats a try
        self._rounds = 1 if alone else tries
        self._deadline_s = deadline_s
        self._try_s = deadline_s if alone else deadline_s * _TRY_SHARE
        limits = Limits(
            deadline_s=deadline_s,
            tries=tries,
            max_backoff_s=_LONGEST_WAIT_S,
            concurrency=concurrency,
            per_second=per_second,
            max_bytes=_MAX_REPLY_BYTES,
        )
        limits = limits if alone else replace(limits, tries=1)
        self._service = HttpService(name, limits=limits, classify=classify_json)
        self._turns = threading.Semaphore(concurrency)
        self._lock = threading.Lock()
        self._next = 0

    def ask(self, body: Any, read: Callable[[Any, str], T]) -> tuple[T, str]:
        """What a server answered, and the server.

        Args:
            body: the question.
            read: takes the JSON value and the server; ToolError where it is no answer.

        Raises:
            CallFailed: no server answered in time, or one refused the question.
            QuotaError: a server is used up.
            ToolError: all addresses are wrong, or what answers there is something else.
        """
        with self._turns:  # what happens to a server while a question waits counts
            return self._ask(body, read)

    def _ask(self, body: Any, read: Callable[[Any, str], T]) -> tuple[T, str]:
        wrong: set[str] = set()
        give_up = time.monotonic() + self._deadline_s
        for tried in range(1, self._rounds + 1):
            server = self._choose()
            try:
                time_s = min(self._try_s, give_up - time.monotonic())
                reply = self._service.call("POST", server.url, body=body, deadline_s=time_s)
                answer = read(reply.json(), server.url)
            except QuotaError:
                raise
            except ToolError as error:
                wrong.add(server.url)
                if len(wrong) == len({each.url for each in self._servers}):
                    raise ToolError(f"{error} (what urls of the {self._name} names)") from error
                warnings.warn(f"{error}; asking the others", stacklevel=2)  # shown once
                failure = CallFailed("transient", str(error))
            except CallFailed as error:
                if error.kind in ("bad_arguments", "no_result"):
                    raise
                failure = error
            else:
                self._recover(server)
                return answer, server.url
            wait_s = self._rest(server, tried)
            if tried == self._rounds or time.monotonic() + wait_s >= give_up:
                raise failure
            time.sleep(wait_s)
        raise AssertionError("there is at least one try")

    def _choose(self) -> _Server:
        """The next server that does not rest; if all do, the one whose rest ends first."""
        with self._lock:
            now = time.monotonic()
            count = len(self._servers)
            order = [self._servers[(self._next + step) % count] for step in range(count)]
            self._next = (self._next + 1) % count
            awake = [server for server in order if server.rests_until <= now]
            if not awake:
                return min(order, key=lambda server: server.rests_until)
            if awake[0].failures:
                awake[0].rests_until = now + _rest_s(awake[0].failures)  # one try will show
            return awake[0]

    def _rest(self, server: _Server, tried: int) -> float:
        """Leave a server alone; how long to wait for the next try, in seconds."""
        with self._lock:
            now = time.monotonic()
            server.failures += 1
            server.rests_until = now + _rest_s(server.failures)
            if any(each.rests_until <= now for each in self._servers):
                return 0.0
        doubled = min(_FIRST_WAIT_S * 2 ** (tried - 1), _LONGEST_WAIT_S)
        return doubled * random.uniform(0.5, 1.0)

    def _recover(self, server: _Server) -> None:
        with self._lock:
            server.failures = 0
            server.rests_until = 0.0


def _rest_s(failures: int) -> float:
    return min(_FIRST_REST_S * 2 ** min(failures - 1, 16), _LONGEST_REST_S)


def endpoint(name: str, url: str, path: str) -> str:
    """The full address: ``http://`` and ``path`` are added where they are missing.

    Example: ``endpoint("retriever", "127.0.0.1:8000", "/retrieve")`` is
    ``"http://127.0.0.1:8000/retrieve"``; an address with a path stays as it is.

    Raises:
        ToolError: it is no http address, or one with a user name.
    """
    full = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(full)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        usable = usable and "@" not in parts.netloc
        has_path = bool(parts.path.strip("/"))
    except ValueError:  # a port that is no number
        usable = has_path = False
    if not usable:
        raise ToolError(f"{name}: {without_user(url)!r} is no address; write http://HOST:PORT")
    return full if has_path else full.rstrip("/") + path
