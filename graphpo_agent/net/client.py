"""Calls to a configured, trusted service: in time, a few at once, retried, recorded.

Addresses that a model chooses need more care (where they lead to); they are not for this client.
"""

import json
import math
import queue
import random
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn

import requests

from graphpo_agent.errors import QuotaError, ToolError
from graphpo_agent.net.checks import check_address, check_counts, check_rate, check_seconds
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.pace import Pace
from graphpo_agent.net.reply import Reply, Verdict, classify_json, classify_status
from graphpo_agent.net.secrets import Redactor, without_user
from graphpo_agent.net.store import CallStore, request_key
from graphpo_agent.net.transport import Broken, Session, exchange, proxy_secrets
from graphpo_agent.types import FailureKind

__all__ = ["HttpService", "Limits", "Reply", "Verdict", "classify_json", "classify_status"]

_FIRST_BACKOFF_S = 0.5
_SHORTEST_S = 0.001
"""A try is given this much though its wait took longer than meant."""
_SHOWN_CHARACTERS = 200
_REASON_CHARACTERS = 300
_STANDARD_HEADERS = {
    "User-Agent": "graphpo-agent",
    "Accept": "application/json",
    "Accept-Encoding": "gzip, deflate",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a service may be asked, and how long for.

    Example: ``Limits(deadline_s=10, tries=2)``

    Attributes:
        deadline_s: seconds for a whole call, all tries and the waits between them included; it
            runs from the moment when the call's turn has come.
        tries: how often a call is made that fails for a passing reason.
        max_backoff_s: the longest wait between two tries, whatever the service asks for.
        concurrency: calls under way at once; others wait.
        per_second: requests started per second, tries included; None: any number.
        max_bytes: of a reply, decompressed.
    """

    deadline_s: float = 30.0
    tries: int = 3
    max_backoff_s: float = 8.0
    concurrency: int = 16
    per_second: float | None = None
    max_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        owner = "limits of a service"
        check_counts(
            owner, tries=self.tries, concurrency=self.concurrency, max_bytes=self.max_bytes
        )
        check_seconds(owner, deadline_s=self.deadline_s, max_backoff_s=self.max_backoff_s)
        check_rate(owner, self.per_second)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A try that may be repeated."""

    kind: FailureKind
    reason: str
    retry_after_s: float = 0.0


class HttpService:
    """One service and its limits; threads share it.

    Every try has what is left of the call's deadline. A try that met no complete reply, or one that
    ``classify`` calls transient or a rate limit, is repeated after a wait that doubles from half
    a second, shortened at random by up to a half; a longer ``Retry-After`` is respected up to
    ``max_backoff_s``. Refused connections, unknown hosts and time-outs are transient. Credentials
    appear in no message, no record and no reply.

    Proxies and certificate bundles come from the usual environment variables; cookies and
    ``.netrc`` are not used; redirects are not followed.

    Example::

        service = HttpService("serper", secret_headers={"X-API-KEY": secret_from_env("SERPER_KEY")})
        service.call("POST", "https://google.serper.dev/search", body={"q": "oak"}).json()
    """

    def __init__(
        self,
        name: str,
        *,
        limits: Limits | None = None,
        secret_headers: Mapping[str, str] | None = None,
        secret_params: Mapping[str, str] | None = None,
        store: CallStore | None = None,
        classify: Callable[[Reply], Verdict] = classify_status,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            name: what messages call it.
            limits: see ``Limits``; None: its defaults.
            secret_headers: credentials that are sent as headers.
            secret_params: credentials that are sent in the query string.
            store: where answers are recorded and taken from; None: nowhere.
            classify: what a reply means.
        """
        self._name = name
        self._limits = limits or Limits()
        self._secret_headers = dict(secret_headers or {})
        self._secret_params = dict(secret_params or {})
        secrets = [*self._secret_headers.values(), *self._secret_params.values()]
        self._redactor = Redactor([*secrets, *proxy_secrets()])
        self._store = store
        self._classify = classify
        self._sessions: queue.LifoQueue[Session] = queue.LifoQueue()
        for _ in range(self._limits.concurrency):
            self._sessions.put(Session())
        self._pace = Pace(self._limits.per_second)
        self._random = random.Random()
        self._told = False

    def call(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float = math.inf,
    ) -> Reply:
        """The service's answer, or what is stored of it.

        Args:
            method: ``GET`` or ``POST``; both are repeated after a failure.
            url: without credentials.
            params: of the query string; those that are None are left out.
            body: a JSON value; None: no body.
            headers: besides the standard ones and the credentials.
            deadline_s: for this call, where it is less than the service's.

        Raises:
            CallFailed: no usable answer this time.
            QuotaError: the service is used up.
            ToolError: key, address or another setting is wrong, or the store fails.
        """
        shown = self._redactor.text(without_user(url))
        where = f"{self._name}: {method} {shown[:_SHOWN_CHARACTERS]}"
        request = self._prepare(method, url, params, body, headers, where)
        if self._store is None:
            reply = self._ask(request, where, deadline_s)
        else:
            key = request_key(method, shown, params=params, body=body, headers=headers)
            stored = self._store.fetch(
                key, lambda: self._ask(request, where, deadline_s).to_bytes()
            )
            reply = Reply.from_bytes(stored)
        verdict = self._classify(reply)
        if verdict is not None:
            _refuse(verdict, f"{where}: {_said(reply)}")
        return reply

    def _prepare(
        self,
        method: str,
        url: str,
        params: Mapping[str, Any] | None,
        body: Any,
        headers: Mapping[str, str] | None,
        where: str,
    ) -> requests.PreparedRequest:
        content = {} if body is None else {"Content-Type": "application/json"}
        sent = {**_STANDARD_HEADERS, **content, **(headers or {}), **self._secret_headers}
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        query = {**(params or {}), **self._secret_params}
        try:
            check_address(url)
            return requests.Request(method, url, params=query, data=data, headers=sent).prepare()
        except ValueError as error:
            reason = self._redactor.text(" ".join(str(error).split()))
        raise ToolError(f"{where} cannot be sent: {reason}")

    def _ask(self, request: requests.PreparedRequest, where: str, deadline_s: float) -> Reply:
        """An answer, or a refusal of what was asked for.

        Raises:
            CallFailed: no reply, or none but passing failures, in all tries.
            QuotaError, ToolError: as ``call``.
        """
        session = self._sessions.get()
        try:
            return self._ask_repeatedly(session, request, where, deadline_s)
        finally:
            self._sessions.put(session)

    def _ask_repeatedly(
        self, session: Session, request: requests.PreparedRequest, where: str, deadline_s: float
    ) -> Reply:
        time.sleep(self._pace.wait_s())
        deadline = time.monotonic() + min(deadline_s, self._limits.deadline_s)
        tried = 0
        while True:
            outcome = self._try(session, request, deadline - time.monotonic(), where)
            tried += 1
            if isinstance(outcome, Reply):
                self._told = True
                return outcome
            wait = self._backoff_s(tried, outcome.retry_after_s)
            last = tried == self._limits.tries
            if not last:
                wait = max(wait, self._pace.wait_s())
            if last or time.monotonic() + wait >= deadline:
                tries = "1 try" if tried == 1 else f"{tried} tries"
                failure = CallFailed(outcome.kind, f"{where}: {outcome.reason} ({tries})")
                self._tell_once(str(failure))
                raise failure
            self._tell_once(f"{where}: {outcome.reason}; asking again")
            time.sleep(wait)

    def _tell_once(self, failure: str) -> None:
        """A line about a service that has not answered yet: calls may take long to fail."""
        if not self._told:
            self._told = True
            warnings.warn(failure, stacklevel=2)

    def _try(
        self, session: Session, request: requests.PreparedRequest, left: float, where: str
    ) -> Reply | _Failure:
        reply = exchange(session, request, max(left, _SHORTEST_S), self._limits.max_bytes)
        if isinstance(reply, Broken):
            reason = self._redactor.text(reply.reason)[:_REASON_CHARACTERS]
            if reply.verdict == "transient":
                return _Failure(reply.verdict, reason)
            _refuse(reply.verdict, f"{where}: {reason}")
        reply = self._without_secrets(reply)
        verdict = self._classify(reply)
        reason = _said(reply)
        if verdict == "rate_limit" or verdict == "transient":
            return _Failure(verdict, reason, _retry_after_s(reply))
        if verdict == "quota" or verdict == "configuration":
            _refuse(verdict, f"{where}: {reason}")
        return reply

    def _without_secrets(self, reply: Reply) -> Reply:
        headers = {name: self._redactor.text(value) for name, value in reply.headers.items()}
        return Reply(reply.status, headers, self._redactor.body(reply.body))

    def _backoff_s(self, tried: int, retry_after_s: float) -> float:
        doubled = _FIRST_BACKOFF_S * 2 ** (tried - 1) * self._random.uniform(0.5, 1.0)
        return min(max(doubled, retry_after_s), self._limits.max_backoff_s)


def _said(reply: Reply) -> str:
    """A reply for messages, with the address that a redirect leads to."""
    leads_to = reply.headers.get("location", "") if 300 <= reply.status < 400 else ""
    redirect = f" leads to {leads_to[:_SHOWN_CHARACTERS]!a}" if leads_to else ""
    return f"HTTP {reply.status}{redirect}: {reply.excerpt}"


def _refuse(verdict: Verdict, message: str) -> NoReturn:
    if verdict == "quota":
        raise QuotaError(f"{message}; the service is used up: top it up or wait, then go on")
    if verdict == "configuration":
        raise ToolError(f"{message}; check its address, key and model")
    assert verdict is not None
    raise CallFailed(verdict, message)


def _retry_after_s(reply: Reply) -> float:
    """Seconds that the service asks to wait; 0 where it asks for none that can be understood."""
    text = reply.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        until = parsedate_to_datetime(text)
        if until.tzinfo is None:  # the C library's form, which is in GMT too (RFC 9110, 5.6.7)
            until = until.replace(tzinfo=UTC)
        return max(0.0, until.timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0
