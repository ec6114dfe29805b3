"""A policy that says what it is told to, over a byte-level tokenizer. Protocols met in full."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpo_agent.protocols import Expander, Policy, StateDescriber
from graphpo_agent.rollout.scheduler import PolicyScheduler
from graphpo_agent.types import (
    Completion,
    Document,
    FailureKind,
    Finding,
    FinishReason,
    PathState,
    Prompt,
    SampleRequest,
    SamplingParams,
    StateDescription,
    Step,
    ToolResult,
    TurnBreak,
)

EOS, START, END_OF_MESSAGE = 256, 257, 258
_MERGED = ("</search>", "<information>", "</information>", "Doc ", "ab")
SPECIAL_SPELLING = "<|eos|>"


class ByteTokenizer:
    """One token per UTF-8 byte, three special tokens, and a few merges that ``encode`` prefers.

    The merges make re-tokenising visible: bytes that were sampled one by one come back merged.
    """

    eos_ids = frozenset({EOS})
    vocab_size = 259 + len(_MERGED)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        i = 0
        while i < len(text):
            for merge, spelling in enumerate(_MERGED):
                if text.startswith(spelling, i):
                    ids.append(259 + merge)
                    i += len(spelling)
                    break
            else:
                ids.extend(text[i].encode())
                i += 1
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        parts = [
            bytes([i]) if i < 256 else _MERGED[i - 259].encode()
            for i in token_ids
            if i < 256 or i > 258
        ]
        return b"".join(parts).decode(errors="replace")

    def render(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        ids: list[int] = []
        for message in prompt:
            content = f"{message['role']}\n{message['content']}"
            ids += [START, *self.encode(content), END_OF_MESSAGE]
        return [*ids, START]

    def turn_break(self, role: str) -> TurnBreak:
        opening = (EOS, START, *self.encode(f"{role}\n"))
        return TurnBreak(opening, (END_OF_MESSAGE, START))


@dataclass(frozen=True)
class TokenContext:
    token_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


Script = Callable[[tuple[int, ...], int], Sequence[int]]
"""(context token ids, seed) -> the token ids that the policy would go on to say."""


class ScriptedPolicy:
    """Says ``script(context, seed)``, cut by stop strings, limits and end-of-sequence tokens."""

    def __init__(self, script: Script, max_context_tokens: int = 100_000) -> None:
        self.tokenizer = ByteTokenizer()
        self.max_context_tokens = max_context_tokens
        self.requests: list[SampleRequest] = []
        self.sampling: list[SamplingParams] = []
        self._script = script
        self._answered = 0

    def open(self, token_ids: Sequence[int]) -> TokenContext:
        return TokenContext(tuple(token_ids))

    def extend(self, context: TokenContext, token_ids: Sequence[int]) -> TokenContext:
        return TokenContext((*context.token_ids, *token_ids))

    def submit(self, request: SampleRequest, sampling: SamplingParams) -> int:
        self.requests.append(request)
        self.sampling.append(sampling)
        return len(self.requests)

    def advance(self) -> list[tuple[int, Completion]]:
        """All that was asked for since, at once."""
        tickets = range(self._answered + 1, len(self.requests) + 1)
        self._answered = len(self.requests)
        return [(ticket, self._complete(self.requests[ticket - 1])) for ticket in tickets]

    def _complete(self, request: SampleRequest) -> Completion:
        context: Any = request.context
        assert 1 <= request.max_new_tokens <= self.max_context_tokens - context.num_tokens
        planned = tuple(self._script(context.token_ids, request.seed))
        ids: list[int] = []
        reason: FinishReason = "length"
        while len(ids) < request.max_new_tokens:
            ids.append(planned[len(ids)])
            if ids[-1] in self.tokenizer.eos_ids:
                reason = "eos"
                break
            if self._stops(ids, request):
                reason = "stop"
                break
        logprobs = tuple(-0.01 * (1 + i) for i in range(len(ids)))
        return Completion(tuple(ids), logprobs, reason, self.extend(context, ids))

    def _stops(self, ids: Sequence[int], request: SampleRequest) -> bool:
        if len(ids) < request.min_new_tokens:
            return False
        text = self.tokenizer.decode(ids)
        early = self.tokenizer.decode(ids[: max(0, request.min_new_tokens - 1)])
        return any(text.count(stop) > early.count(stop) for stop in request.stop)

    def take_prefilled_tokens(self) -> int:
        return 0

    def release(self) -> None:
        pass


def expand(
    expander: Expander,
    policy: Policy,
    states: Sequence[PathState],
    seeds: Sequence[int],
    sampling: SamplingParams,
) -> list[Step]:
    """One step from each state, all under way together."""
    scheduler = PolicyScheduler(policy, overlap=False)
    return scheduler.run([expander.expand(scheduler, states, seeds, sampling)])[0]


def describe(
    describer: StateDescriber, policy: Policy, states: Sequence[PathState]
) -> list[StateDescription]:
    """The descriptions of states."""
    scheduler = PolicyScheduler(policy, overlap=False)
    return scheduler.run([describer.describe(scheduler, states)])[0]


def bytes_of(text: str) -> tuple[int, ...]:
    """A text spelled byte by byte, as ``encode`` would not do it."""
    return tuple(text.encode())


class Library:
    """A tool that answers queries with the documents it was given, and keeps the queries."""

    name = "search"
    description = "Finds documents on its shelves."
    failure: FailureKind = "no_result"
    schema: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}}

    def __init__(self, documents: Mapping[str, Sequence[Document]]) -> None:
        self._documents = documents
        self.batches: list[list[str]] = []

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        self.batches.append([call["query"] for call in calls])
        return [self._answer(call["query"]) for call in calls]

    def _answer(self, query: str) -> ToolResult:
        if query not in self._documents:
            return ToolResult(text=f"no shelf for {query}", failure=self.failure)
        return ToolResult(findings=(Finding(query, tuple(self._documents[query])),))


class Printer:
    """A tool that says the code it is given."""

    name = "python"
    description = "Says the code."
    schema: Mapping[str, Any] = {"type": "object"}

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        return [ToolResult(call["code"]) for call in calls]
