"""What growing graphs wait for: the policy draws tokens for all of them while tools work beside.

Every graph is a coroutine. Whenever all of them wait, the policy advances by one token; tool calls,
embeddings and verifiers run in threads meanwhile, so that a slow search never stops the sampling.
"""

import asyncio
import json
from asyncio import FIRST_EXCEPTION
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from selectors import DefaultSelector, SelectorKey
from typing import Any, TypeVar, get_args

import numpy as np

from graphpo_agent.errors import ToolError
from graphpo_agent.net.checks import check_documents
from graphpo_agent.net.workers import Workers
from graphpo_agent.protocols import Policy, Tool
from graphpo_agent.types import (
    OUTAGES,
    Completion,
    FailureKind,
    Finding,
    SampleRequest,
    SamplingParams,
    ToolResult,
)

__all__ = ["PolicyScheduler", "complete"]

S = TypeVar("S")
T = TypeVar("T")

_to_json = json.JSONEncoder(sort_keys=True).encode

_TURNS = 2
"""Turns of the event loop from a completion to the requests of its graph's next layer."""
_LONG = 0.01
"""Seconds after which items that wait for one another get a thread each."""
_LAST_TURNS = 1.0
"""Seconds that the tasks of a run that failed have to end."""
_FAILURES = get_args(FailureKind)
_TOOL_BATCHES = 8
"""Batches of calls that one tool works on at once; further calls gather in the next batch."""


@dataclass(slots=True)
class _Counter:
    """Where items for one function wait until they are taken together.

    Attributes:
        function: from a list of items to as many results.
        places: how many batches it works on at once.
        most: items of one batch, unless one who asks has more.
        tool: whose calls the items are; each call waits for its one result, others for a list.
        waiting: what has come since the last batch was taken: items and who awaits their results.
    """

    function: Callable[[list[Any]], Any]
    places: int
    most: float = inf
    tool: Tool | None = None
    waiting: list[tuple[Sequence[Any], asyncio.Future[Any]]] = field(default_factory=list)

    def take(self) -> list[tuple[Sequence[Any], asyncio.Future[Any]]]:
        """The next batch, of those who have waited longest."""
        sizes = accumulate(len(items) for items, _ in self.waiting)
        fit = max(1, sum(size <= self.most for size in sizes))
        batch, self.waiting = self.waiting[:fit], self.waiting[fit:]
        return batch


class _Drawn:
    """Completions of requests that are awaited together."""

    def __init__(
        self,
        count: int,
        awaited: asyncio.Future[list[Completion]],
        drawn: Callable[[int, Completion], object] | None,
    ) -> None:
        self._completions: list[Any] = [None] * count
        self._missing = count
        self._awaited = awaited
        self._drawn = drawn

    def take(self, place: int, completion: Completion) -> None:
        self._completions[place] = completion
        if self._drawn is not None:
            self._drawn(place, completion)
        self._missing -= 1
        if not self._missing:
            self._awaited.set_result(self._completions)


def complete(
    policy: Policy, requests: Sequence[SampleRequest], sampling: SamplingParams
) -> list[Completion]:
    """One completion per request, in order, with nothing else going on."""
    tickets = [policy.submit(request, sampling) for request in requests]
    ended: dict[int, Completion] = {}
    while len(ended) < len(tickets):
        ended.update(policy.advance())
    return [ended[ticket] for ticket in tickets]


class _Selector(DefaultSelector):
    """Asks the operating system for events only where there is nothing else to do.

    The loop has no connections of its own; what threads send it is in its queue already.
    """

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        return [] if timeout == 0 else super().select(timeout)


class PolicyScheduler:
    """Runs coroutines against one policy (``graphpo_agent.protocols.Scheduler``).

    Example::

        scheduler = PolicyScheduler(policy, overlap=True)
        (steps,) = scheduler.run([expander.expand(scheduler, states, seeds, sampling)])

    Attributes:
        policy: as given.
    """

    def __init__(
        self,
        policy: Policy,
        overlap: bool,
        drawn: Callable[[int], object] = lambda num_tokens: None,
    ) -> None:
        """Set up.

        Args:
            policy: draws the tokens.
            overlap: what is not the policy's runs in threads beside it; off: one after another
                while the policy waits, which makes a run repeatable to the bit.
            drawn: told how many tokens each completion has, as soon as it is there.
        """
        self.policy = policy
        self._drawn = drawn
        self._overlap = overlap
        self._workers = Workers()
        self._samples: dict[int, tuple[_Drawn, int]] = {}
        self._counters: dict[Any, _Counter] = {}
        self._batches: set[asyncio.Future[None]] = set()
        self._results: dict[tuple[int, str], asyncio.Future[ToolResult]] = {}
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    def run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of all coroutines, in order; the first exception of any ends them all.

        To be called once. Inside an event loop (a notebook's) it runs in a thread of its own.
        """
        loop = asyncio.SelectorEventLoop(_Selector())
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # there is none
            return self._run_loop(loop, work)
        with ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(self._run_loop, loop, work).result()
            except BaseException:  # an interrupt comes here and not to the thread
                with suppress(RuntimeError):  # the run has ended by itself and its loop is closed
                    loop.call_soon_threadsafe(_cancel_all, loop)
                raise

    async def sample(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingParams,
        drawn: Callable[[int, Completion], object] | None = None,
    ) -> list[Completion]:
        """What the policy draws for each, once it has drawn all of them.

        Args:
            requests: continuations.
            sampling: temperature and top-p.
            drawn: told of each request's place and completion as soon as that one is there.
        """
        if not requests:
            return []
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        together = _Drawn(len(requests), future, drawn)
        for place, request in enumerate(requests):
            self._samples[self.policy.submit(request, sampling)] = (together, place)
        self._wake.set()
        return await future

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[Awaitable[ToolResult], bool]:
        """A tool's result to come, and whether a call is made for it.

        It is not where an equal call has been made before; only one that met an outage is made
        again. A tool that cannot go on, or that gives too few or too many results or none that is
        a ``ToolResult``, ends the run with a ``ToolError``.
        """
        key = (id(tool), _to_json(arguments))
        known = self._results.get(key)
        if known is not None and not (known.done() and known.result().failure in OUTAGES):
            return known, False
        counter = self._counters.setdefault(id(tool), _Counter(tool.run, _TOOL_BATCHES, tool=tool))
        self._results[key] = self._ask(counter, [arguments])
        return self._results[key], True

    async def together(
        self, function: Callable[[list[Any]], Any], items: Sequence[Any], most: float = inf
    ) -> Sequence[Any]:
        """``function(items)``, on the items of all who ask at one moment; never twice at once.

        Where these are more than ``most``, those who asked last wait for a later call, which begins
        when the others have gone on with their results. A function that gives too few or too many
        results ends the run with a ``ToolError``.
        """
        if not items:
            return []
        counter = self._counters.setdefault(function, _Counter(function, places=1, most=most))
        return await self._ask(counter, items)

    async def each(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """``function(item)`` of each item, in one thread until that takes long, then in many."""
        if not (self._overlap and items):
            return [function(item) for item in items]
        results: dict[int, T] = {}
        waiting = deque(enumerate(items))

        def work() -> None:
            while waiting:
                try:
                    place, item = waiting.popleft()
                except IndexError:  # another thread took it
                    return
                results[place] = function(item)

        threads = {asyncio.ensure_future(self._beside(work))}
        try:
            while threads:
                ended, threads = await asyncio.wait(
                    threads, timeout=_LONG if waiting else None, return_when=FIRST_EXCEPTION
                )
                for thread in ended:
                    thread.result()
                threads |= {asyncio.ensure_future(self._beside(work)) for _ in range(len(waiting))}
        finally:
            waiting.clear()
        return [results[place] for place in range(len(items))]

    async def _beside(self, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments)``, in a thread where work overlaps."""
        if not self._overlap:
            return function(*arguments)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result((value, error))

        def work() -> None:
            value = error = None
            try:
                value = function(*arguments)
            except BaseException as raised:  # raised again where it is awaited
                error = raised
            with suppress(RuntimeError):  # the run was interrupted and its loop is closed
                loop.call_soon_threadsafe(settle, value, error)

        self._workers.start(work)  # an interrupted run does not wait for a tool that hangs
        value, error = await future
        if error is not None:
            raise error
        return value

    def _ask(self, counter: _Counter, items: Sequence[Any]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        counter.waiting.append((items, future))
        self._wake.set()
        return future

    def _run_loop(
        self, loop: asyncio.AbstractEventLoop, work: Sequence[Coroutine[Any, Any, T]]
    ) -> list[T]:
        try:
            return loop.run_until_complete(self._run(work))
        finally:
            loop.set_exception_handler(lambda loop, context: None)  # one error ends a run
            unfinished = asyncio.all_tasks(loop)
            _cancel_all(loop)
            if unfinished:  # an interrupt inside the loop's own code may cost a task its next turn
                loop.run_until_complete(asyncio.wait(unfinished, timeout=_LAST_TURNS))
            loop.close()
            self._workers.close()

    async def _run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        everything = asyncio.gather(*work)
        everything.add_done_callback(lambda _: self._wake.set())
        while not everything.done():
            self._wake.clear()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if self._failure is not None:
                raise self._failure
            if self._dispatch() and not self._overlap:
                continue
            if self._samples:
                for ticket, completion in self.policy.advance():
                    together, place = self._samples.pop(ticket)
                    together.take(place, completion)
                    self._drawn(len(completion.token_ids))
            elif not everything.done():
                await self._wake.wait()
        return everything.result()

    def _dispatch(self) -> bool:
        """Start what waits, the items for one function in one batch; whether there were any."""
        ready = [one for one in self._counters.values() if one.waiting and one.places]
        for counter in ready:
            counter.places -= 1
            batch = asyncio.ensure_future(self._serve(counter, counter.take()))
            self._batches.add(batch)
            batch.add_done_callback(self._batches.discard)
        return bool(ready)

    async def _serve(
        self,
        counter: _Counter,
        waiting: Sequence[tuple[Sequence[Any], asyncio.Future[Any]]],
    ) -> None:
        """Call a function on the items of all who wait, and give each their results."""
        items = [item for own, _ in waiting for item in own]
        try:
            results = await self._beside(counter.function, items)
            _check_results(counter.function, results, len(items))
            if counter.tool is not None:
                _check_tool_results(counter.tool, results)
        except Exception as error:
            self._failure = error
        else:
            start = 0
            for own, future in waiting:
                many = results[start : start + len(own)]
                future.set_result(many if counter.tool is None else many[0])
                start += len(own)
        finally:
            counter.places += 1
            self._wake.set()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


def _check_tool_results(tool: Tool, results: Sequence[Any]) -> None:
    """Raise ``ToolError`` unless a tool gave ``ToolResult``s as they are to be."""
    name = type(tool).__name__
    for result in results:
        if not isinstance(result, ToolResult):
            raise ToolError(f"{name}.run returned {result!r:.60} for a call, want a ToolResult")
        if result.failure not in (None, *_FAILURES):
            known = ", ".join(_FAILURES)
            raise ToolError(f"{name}.run: failure {result.failure!r:.60} is none of {known}")
        if not isinstance(result.text, str):
            raise ToolError(f"{name}.run: text {result.text!r:.60} is no string")
        if not isinstance(result.findings, Sequence):
            raise ToolError(f"{name}.run: findings {result.findings!r:.60} are no list")
        for finding in result.findings:
            if not isinstance(finding, Finding):
                raise ToolError(f"{name}.run found {finding!r:.60}, which is no Finding")
            check_documents(f"{name}.run", finding.documents)


def _check_results(function: Callable[[list[Any]], Any], results: Any, num_items: int) -> None:
    """Raise ``ToolError`` unless a function gave one result per item."""
    many = isinstance(results, Sequence | np.ndarray) and not isinstance(results, str | bytes)
    if many and len(results) == num_items:
        return
    given = f"{len(results)} results" if many else f"{type(results).__name__}, no list of results,"
    name = getattr(function, "__qualname__", repr(function))
    raise ToolError(f"{name} returned {given} for {num_items} inputs")
