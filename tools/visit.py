"""The visit tool: pages for addresses, whole or as the evidence they hold for a goal."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

from graphpo_agent.errors import ToolError
from graphpo_agent.net.blocklist import BlockList
from graphpo_agent.net.checks import check_counts, check_seconds
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.workers import Workers
from graphpo_agent.protocols import PageReader
from graphpo_agent.types import OUTAGES, Document, FailureKind, Finding, ToolResult
from tools.extract import EvidenceExtractor

__all__ = ["VisitTool"]

_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
"""What is the least the policy's fault comes last."""
_SHOWN_CHARACTERS = 200
_TITLE_CHARACTERS = 500

_Asked = tuple[str, str]
"""An address and the goal it is read for; the goal is empty where pages are shown whole."""
_Page = Document | CallFailed


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one call.

    Example: ``_Call(("https://example.org/oak", "https://example.org/fir"), "who wrote it")``
    """

    urls: tuple[str, ...]
    goal: str


@dataclass(slots=True, eq=False)
class _Reading:
    """A page that is to be read once, for each of its goals.

    Attributes:
        began: when its turn came, or its last goal's; None: it waits for its turn.
        shown: what there is of it so far, by goal.
        given_up: nobody waits for the rest.
    """

    url: str
    goals: Sequence[str]
    asked: float
    began: float | None = None
    shown: dict[str, _Page] = field(default_factory=dict)
    given_up: bool = False


class VisitTool:
    r"""A ``Tool`` that reads pages. The pages of all calls are read at once, each one time.

    A call's findings are its pages that could be read, in request order, each with one document
    whose url is the address as asked for; its id tells the page, and what was taken from it for a
    goal, from a search result of the same address. ``text`` has a line for each page that could not
    be read. The call failed when there was no other, or when an outage withheld one of them: of the
    kind that is the least the policy's fault.

    Example::

        VisitTool(reader).run([{"url": "https://example.org/oak"}])
        # [ToolResult(findings=(Finding("https://example.org/oak", (Document(...),)),))]
    """

    name = "visit"

    def __init__(
        self,
        reader: PageReader,
        extractor: EvidenceExtractor | None = None,
        max_urls: int = 3,
        max_characters: int = 25000,
        deadline_s: float = 60.0,
        concurrency: int = 8,
        blocked_hosts: Sequence[str] = (),
    ) -> None:
        """Read pages with ``reader``.

        Args:
            reader: fetches a page.
            extractor: shortens a page to what a goal needs; None: pages are shown whole.
            max_urls: of one call.
            max_characters: of one page's text; what is beyond is cut off, as it is from a title
                of more than 500.
            deadline_s: seconds for one page from the moment when its turn has come, and again for
                what each goal takes from it; a page that took longer failed. So did one whose turn
                does not come while no page at all ends for so long.
            concurrency: pages read at once, over all threads.
            blocked_hosts: patterns of a ``BlockList``.

        Raises:
            ToolError: a limit that is not above 0, no reader, a bad pattern.
        """
        check_counts(
            "visit tool", max_urls=max_urls, max_characters=max_characters, concurrency=concurrency
        )
        check_seconds("visit tool", deadline_s=deadline_s)
        if not isinstance(reader, PageReader):
            raise ToolError(f"visit tool: reader {reader!r} has no read method")
        self.description, self.schema = _described(max_urls, extractor is not None)
        self._reader = reader
        self._extractor = extractor
        self._max_urls = max_urls
        self._max_characters = max_characters
        self._deadline_s = deadline_s
        self._blocked = BlockList(blocked_hosts)
        self._workers = Workers(concurrency)
        self._last_end = 0.0

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        """The pages of each call, in order; see the class.

        Raises:
            ToolError: no page can be had: the reader or the extractor is misconfigured or its
                quota is used up.
        """
        read = [self._arguments(call) for call in calls]
        good = [call for call in read if isinstance(call, _Call)]
        pages = self._pages([(url, call.goal) for call in good for url in call.urls])
        return [
            ToolResult(text=call, failure="bad_arguments")
            if isinstance(call, str)
            else _result({url: pages[url, call.goal] for url in call.urls})
            for call in read
        ]

    def _arguments(self, call: Mapping[str, Any]) -> _Call | str:
        """What is asked for, or why it cannot be."""
        url, goal = call.get("url"), call.get("goal", "")
        urls = [url] if isinstance(url, str) else url
        if not isinstance(urls, list) or not urls or not all(isinstance(u, str) for u in urls):
            return "visit needs an argument url: an address or a list of addresses"
        if not set(call) <= {"url", "goal"}:
            return f"visit has no argument {min(set(call) - {'url', 'goal'})!r}; use url and goal"
        if not isinstance(goal, str) or (self._extractor is not None and not goal.strip()):
            return "visit needs an argument goal: what to look for on the page"
        stripped = tuple(dict.fromkeys(u.strip() for u in urls))
        if len(stripped) > self._max_urls:
            return f"visit reads at most {self._max_urls} pages a call, found {len(stripped)}"
        return _Call(stripped, goal.strip() if self._extractor is not None else "")

    def _pages(self, asked: Sequence[_Asked]) -> dict[_Asked, _Page]:
        """Each page for each of its goals; those that took too long are outages."""
        now = time.monotonic()
        goals: dict[str, dict[str, None]] = {}
        for url, goal in asked:
            goals.setdefault(url, {})[goal] = None
        readings = {url: _Reading(url, list(each), now) for url, each in goals.items()}
        jobs = {self._workers.submit(partial(self._read, each)): each for each in readings.values()}
        try:
            self._wait(jobs)
        finally:
            for job, reading in jobs.items():
                job.cancel()
                reading.given_up = True
        missed = CallFailed("transient", f"no answer within {self._deadline_s:g} s")
        return {(url, goal): readings[url].shown.get(goal, missed) for url, goal in asked}

    def _wait(self, jobs: Mapping[Future[None], _Reading]) -> None:
        """Until each job has ended or is overdue; raises what a job raised."""
        waiting = set(jobs)
        while waiting:
            due = min(self._due(jobs[job]) for job in waiting)
            ended, waiting = wait(
                waiting, timeout=max(0.0, due - time.monotonic()), return_when="FIRST_COMPLETED"
            )
            for job in ended:
                job.result()
            now = time.monotonic()
            waiting = {job for job in waiting if self._due(jobs[job]) > now}

    def _due(self, reading: _Reading) -> float:
        """When a page failed for the time it takes, as of now."""
        since = reading.began or max(reading.asked, self._last_end)
        return since + self._deadline_s

    def _read(self, reading: _Reading) -> None:
        """Read one page, once, and show it for each goal."""
        reading.began = time.monotonic()
        try:
            if self._blocked.covers(reading.url):
                raise CallFailed("bad_arguments", "this page may not be visited")
            page = self._reader.read(reading.url)
            for goal in reading.goals:
                if reading.given_up:
                    return
                reading.began = time.monotonic()
                reading.shown[goal] = self._shown(page, goal)
        except CallFailed as error:
            for goal in reading.goals:
                reading.shown[goal] = error
        finally:
            self._last_end = time.monotonic()

    def _shown(self, page: Document, goal: str) -> _Page:
        """What an agent sees of a page: the evidence for its goal, or the text, cut to size."""
        text, identifier = page.text, f"page {page.id}"
        if self._extractor is not None:
            try:
                evidence = self._extractor.extract(text, goal)
            except CallFailed as error:
                return error
            text = text if evidence is None else evidence.text
            identifier += f" for {goal}"
        shown = f"{page.title[:_TITLE_CHARACTERS]}\n{text[: self._max_characters]}"
        return replace(page, id=identifier, contents=shown)


def _result(pages: Mapping[str, _Page]) -> ToolResult:
    findings = tuple(
        Finding(url, (page,)) for url, page in pages.items() if isinstance(page, Document)
    )
    failed = {url: page for url, page in pages.items() if isinstance(page, CallFailed)}
    text = "\n".join(f"{_in_line(url)} could not be read: {error}" for url, error in failed.items())
    kinds = {error.kind for error in failed.values()}
    failure: FailureKind | None = next((kind for kind in reversed(_KINDS) if kind in kinds), None)
    if findings and failure not in OUTAGES:
        failure = None
    return ToolResult(text=text, findings=findings, failure=failure)


def _in_line(url: str) -> str:
    return " ".join(url.split())[:_SHOWN_CHARACTERS]


def _described(max_urls: int, with_goal: bool) -> tuple[str, dict[str, Any]]:
    """What an agent reads about the tool, and the JSON schema of its arguments."""
    urls = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": max_urls}
    properties: dict[str, Any] = {
        "url": {
            "description": f"The page's address, or up to {max_urls} of them.",
            "anyOf": [{"type": "string"}, urls],
        },
        "goal": {"description": "What to look for on the page.", "type": "string"},
    }
    shown = "what they say about a goal" if with_goal else "their text"
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["url", "goal"] if with_goal else ["url"],
        "additionalProperties": False,
    }
    return f"Visits one or several web pages and shows {shown}.", schema
