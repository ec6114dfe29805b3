"""What growing graphs wait for: the policy draws tokens for all of them while tools work beside.

Every graph is a coroutine. Whenever all of them wait, the policy advances by one token; tool calls
and embeddings run in threads meanwhile, so that a slow search never stops the sampling.
"""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from graphpo_agent.protocols import Policy, Tool
from graphpo_agent.types import Completion, SampleRequest, SamplingParams, ToolResult

__all__ = ["PolicyScheduler", "complete"]

T = TypeVar("T")

_TURNS = 4
"""Turns of the event loop from a completion to the requests of its graph's next layer."""


_MAX_IN_FLIGHT = 8
"""Batches of calls that one tool works on at once; further calls gather in the next batch."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A tool call that somebody waits for."""

    tool: Tool
    arguments: Mapping[str, Any]
    future: asyncio.Future[ToolResult]


def complete(
    policy: Policy, requests: Sequence[SampleRequest], sampling: SamplingParams
) -> list[Completion]:
    """One completion per request, in order, with nothing else going on."""
    tickets = [policy.submit(request, sampling) for request in requests]
    ended: dict[int, Completion] = {}
    while len(ended) < len(tickets):
        ended.update(policy.advance())
    return [ended[ticket] for ticket in tickets]


class PolicyScheduler:
    """Runs coroutines against one policy (``graphpo_agent.protocols.Scheduler``).

    Example::

        scheduler = PolicyScheduler(policy, overlap=True)
        steps = scheduler.run([expander.expand(scheduler, state, 7, sampling) for state in states])

    Attributes:
        policy: as given.
    """

    def __init__(self, policy: Policy, overlap: bool) -> None:
        """Set up.

        Args:
            policy: draws the tokens.
            overlap: tools and embedders run in threads beside the policy; off: one after another
                while the policy waits, which makes a run repeatable to the bit.
        """
        self.policy = policy
        self._overlap = overlap
        self._samples: dict[int, asyncio.Future[Completion]] = {}
        self._calls: list[_Call] = []
        self._in_flight: Counter[int] = Counter()
        self._batches: set[asyncio.Future[None]] = set()
        self._results: dict[tuple[int, str], asyncio.Future[ToolResult]] = {}
        self._wake = asyncio.Event()

    def run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of all coroutines, in order; the first exception of any ends them all."""
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(self._run(work))
        finally:
            unfinished = asyncio.all_tasks(loop)
            for task in unfinished:
                task.cancel()
            if unfinished:
                loop.run_until_complete(asyncio.wait(unfinished))
            loop.close()

    async def sample(self, request: SampleRequest, sampling: SamplingParams) -> Completion:
        """What the policy draws."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._samples[self.policy.submit(request, sampling)] = future
        self._wake.set()
        return await future

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[ToolResult, bool]:
        """A tool's result, and whether this call was made for it.

        It was not where an equal call has been made before; only a failed one is made again.
        """
        key = (id(tool), json.dumps(arguments, sort_keys=True))
        known = self._results.get(key)
        if known is not None and not (known.done() and known.result().error is not None):
            return await known, False
        future: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        self._results[key] = future
        self._calls.append(_Call(tool, arguments, future))
        self._wake.set()
        return await future, True

    async def beside(self, function: Callable[..., T], *arguments: Any) -> T:
        """``function(*arguments)``, in a thread where work overlaps."""
        if not self._overlap:
            return function(*arguments)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                settle = partial(future.set_result, function(*arguments))
            except BaseException as error:  # raised again where it is awaited
                settle = partial(future.set_exception, error)
            with suppress(RuntimeError):  # the run was interrupted and its loop is closed
                loop.call_soon_threadsafe(lambda: None if future.done() else settle())

        # A daemon: an interrupted run does not wait for a tool that hangs.
        threading.Thread(target=work, daemon=True).start()
        return await future

    async def _run(self, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        everything = asyncio.gather(*work)
        everything.add_done_callback(self._done)
        while not everything.done():
            self._wake.clear()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if self._dispatch() and not self._overlap:
                continue
            if self._samples:
                for ticket, completion in self.policy.advance():
                    self._samples.pop(ticket).set_result(completion)
            elif not everything.done():
                await self._wake.wait()
        return everything.result()

    def _done(self, everything: asyncio.Future[Any]) -> None:
        self._wake.set()
        if not everything.cancelled():
            everything.exception()  # asked for, so that an interrupted run does not log it

    def _dispatch(self) -> bool:
        """Start the calls that wait, all of one tool in one batch; whether there were any."""
        by_tool: dict[int, list[_Call]] = {}
        for call in self._calls:
            by_tool.setdefault(id(call.tool), []).append(call)
        ready = {key for key in by_tool if self._in_flight[key] < _MAX_IN_FLIGHT}
        self._calls = [call for call in self._calls if id(call.tool) not in ready]
        for key in ready:
            self._in_flight[key] += 1
            self._batches.add(asyncio.ensure_future(self._make(by_tool[key])))
        return bool(ready)

    async def _make(self, calls: Sequence[_Call]) -> None:
        """Make several calls of one tool."""
        tool = calls[0].tool
        try:
            results = await self.beside(tool.run, [call.arguments for call in calls])
            for call, result in zip(calls, results, strict=True):
                call.future.set_result(result)
        except Exception as error:
            for call in calls:
                call.future.set_exception(error)
        self._in_flight[id(tool)] -= 1
        self._wake.set()
