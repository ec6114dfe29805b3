"""verl's servers as the sampler of one growing graph.

The graph grows in a thread of its own; requests go to the event loop of the process, which talks to
the servers. Nothing here imports verl.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from graphpo_agent.engines.local.drawing import StopFinder
from graphpo_agent.errors import RunError
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.types import Completion, Context, FinishReason, SampleRequest, SamplingParams

__all__ = ["Drawn", "Generate", "ServerContext", "ServerPolicy"]

_WAIT_SECONDS = 0.05
"""How long an advance waits for a completion while tools may have something to say."""
_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a server drew for one request; ``cached_tokens`` of its prompt were not computed."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    cached_tokens: int = 0


Generate = Callable[[list[int], dict[str, Any]], Awaitable[Drawn]]
"""Token ids and vLLM's sampling parameters → what is drawn."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """A prefix as its token ids. Example: ``ServerContext((5, 9, 30))``."""

    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens from the start of the prompt to here."""
        return len(self.token_ids)


class ServerPolicy:
    """Servers as a policy (``graphpo_agent.protocols.Policy``).

    A request's seed goes to vLLM, whose numbers are not those of the other engines.

    Attributes:
        tokenizer: as given.
        max_context_tokens: no context grows longer than this.
    """

    def __init__(
        self,
        generate: Generate,
        loop: asyncio.AbstractEventLoop,
        tokenizer: Tokenizer,
        stops: StopFinder,
        max_context_tokens: int,
    ) -> None:
        """Set up.

        Args:
            generate: asks a server; runs in ``loop``, which is not that of the calling thread.
            loop: of the process.
            tokenizer: the model's.
            stops: of the same tokenizer; may be shared.
            max_context_tokens: what the servers hold.
        """
        self.tokenizer = tokenizer
        self.max_context_tokens = max_context_tokens
        self._generate = generate
        self._loop = loop
        self._stops = stops
        self._running: dict[int, Future[Completion]] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._tickets = self._prefilled_tokens = 0

    def open(self, token_ids: Sequence[int]) -> ServerContext:
        """A context that holds a prompt."""
        return ServerContext(tuple(map(int, token_ids)))

    def extend(self, context: Context, token_ids: Sequence[int]) -> ServerContext:
        """``context`` followed by tokens that the policy did not sample."""
        return ServerContext((*_ids(context), *map(int, token_ids)))

    def cut(self, context: Context, num_tokens: int, last: int) -> ServerContext:
        """The first tokens of a context."""
        token_ids = _ids(context)[:num_tokens]
        assert token_ids[-1] == last
        return ServerContext(token_ids)

    def submit(self, request: SampleRequest, sampling: SamplingParams) -> int:
        """Send one continuation to the servers and return its ticket."""
        self._tickets += 1
        ticket = self._tickets
        work = self._complete(request, sampling)
        self._running[ticket] = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running[ticket].add_done_callback(lambda _: self._ended.put(ticket))
        return ticket

    def advance(self) -> list[tuple[int, Completion]]:
        """Wait a moment for what the servers draw; what ended, perhaps nothing.

        Raises:
            RunError: a server drew nothing.
        """
        ended: list[int] = []
        try:
            if self._running:
                ended.append(self._ended.get(timeout=_WAIT_SECONDS))
            while True:
                ended.append(self._ended.get_nowait())
        except Empty:
            pass
        return [(t, self._running.pop(t).result()) for t in ended if t in self._running]

    def take_prefilled_tokens(self) -> int:
        """Tokens of the requests that no server had in its cache, since the last call."""
        count, self._prefilled_tokens = self._prefilled_tokens, 0
        return count

    def release(self) -> None:
        """Forget every unfinished continuation."""
        for future in self._running.values():
            future.cancel()
        self._running = {}

    async def _complete(self, request: SampleRequest, sampling: SamplingParams) -> Completion:
        """One completion, in as many calls as its earliest end needs.

        A server knows nothing of ``min_new_tokens`` in our sense: the tokens before it are drawn
        without stop strings. Where the server stops, and whether it should have, is found here.
        """
        before = _ids(request.context)
        limit = min(request.max_new_tokens, self.max_context_tokens - len(before))
        token_ids: list[int] = []
        logprobs: list[float] = []
        reason: FinishReason | None = None if limit > 0 else "length"
        while reason is None:
            free = request.min_new_tokens - 1 - len(token_ids) if request.stop else 0
            room = limit - len(token_ids)
            stop, count = (request.stop, room) if free <= 0 else ((), min(free, room))
            seed = request.seed + len(token_ids)
            params = self._params(seed, sampling, stop, count)
            part = await self._generate([*before, *token_ids], params)
            if not part.token_ids:
                raise RunError("a server of verl ended a request without a token")
            self._prefilled_tokens += len(before) + len(token_ids) - part.cached_tokens
            for token, logprob in zip(part.token_ids, part.logprobs, strict=True):
                token_ids.append(int(token))
                logprobs.append(float(logprob))
                reason = self._stops.ends(token_ids, request.stop, request.min_new_tokens)
                reason = reason or ("length" if len(token_ids) >= limit else None)
                if reason is not None:
                    break
        after = ServerContext((*before, *token_ids))
        assert reason is not None
        return Completion(tuple(token_ids), tuple(logprobs), reason, after)

    def _params(
        self, seed: int, sampling: SamplingParams, stop: tuple[str, ...], count: int
    ) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": count,
            "stop": list(stop),
            "stop_token_ids": sorted(self.tokenizer.eos_ids),
            "ignore_eos": True,  # those of the model's generation config, that is
            "detokenize": bool(stop),
            "seed": seed % _SEEDS,
            "logprobs": True,
        }


def _ids(context: Context) -> tuple[int, ...]:
    assert isinstance(context, ServerContext), "made by another policy"
    return context.token_ids
