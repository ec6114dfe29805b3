"""What the parts ask of each other. Nothing here imports an implementation."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.types import (
    NO_PREFIX,
    Completion,
    Context,
    Demonstration,
    Document,
    Message,
    Outcome,
    PathState,
    Prefix,
    Prompt,
    SampleRequest,
    SamplingParams,
    StateDescription,
    Step,
    SteppedResponse,
    Task,
    ToolResult,
    TurnBreak,
)

__all__ = [
    "ChatModel",
    "Counting",
    "Embedder",
    "Engine",
    "Expander",
    "PageReader",
    "Policy",
    "PromptOpener",
    "Retriever",
    "RewardFn",
    "Scheduler",
    "StateDescriber",
    "StepScorer",
    "Tokenizer",
    "Tool",
    "Tracker",
]

S = TypeVar("S")
T = TypeVar("T")


class Tokenizer(Protocol):
    """Text to token ids and back. Text never becomes a special token, whoever wrote it."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a response."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special-token spellings inside it stay plain text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, end-of-sequence and other special tokens left out."""
        ...

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of messages in the chat template, up to where the policy answers; or of text.

        Special-token spellings inside contents and text stay plain text.
        """
        ...

    def turn_break(self, role: str) -> TurnBreak:
        """What the chat template puts around a message that replies to the policy."""
        ...


class PromptOpener(Protocol):
    """What begins a path: a policy, or what stands for it before its weights are loaded."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's own."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Tokens a context may hold, prompt included."""
        ...

    def open(self, token_ids: Sequence[int]) -> Context:
        """A context that holds a prompt; nothing is computed yet."""
        ...

    def extend(self, context: Context, token_ids: Sequence[int]) -> Context:
        """``context`` followed by tokens that the policy did not sample (an observation)."""
        ...


class Policy(PromptOpener, Protocol):
    """The model being trained, as a sampler that continues from any prefix it has seen."""

    def cut(self, context: Context, num_tokens: int, last: int) -> Context:
        """The first ``num_tokens`` tokens of ``context``, the ``last`` of them one it sampled.

        Nothing is computed again but that last token.
        """
        ...

    def submit(self, request: SampleRequest, sampling: SamplingParams) -> int:
        """Queue one continuation and return its ticket; nothing is computed yet."""
        ...

    def advance(self) -> list[tuple[int, Completion]]:
        """Compute a little, one more token of every running continuation; return what ended.

        Continuations of all prompts and layers run together, and a place that becomes free is
        filled at once. No prefix token is computed twice. May return nothing; with nothing
        queued it does nothing.
        """
        ...

    def take_prefilled_tokens(self) -> int:
        """Prompt and observation tokens computed since the last call."""
        ...

    def release(self) -> None:
        """Forget every context and unfinished continuation.

        To be called when a rollout is over and before the weights change.
        """
        ...


class Engine(Protocol):
    """Owns the weights: samples with them, learns, saves and loads."""

    @property
    def policy(self) -> Policy:
        """The weights as a sampler."""
        ...

    def update(
        self,
        samples: Sequence[Any],
        step: int,
        learned: Callable[[float], object] = lambda share: None,
    ) -> dict[str, float]:
        """One PPO update (Algorithm 1, stage 4) from ``TrainingSample``s; returns metrics.

        ``learned`` is told the share of it that is done, now and then.
        """
        ...

    def imitate(self, demonstrations: Sequence[Demonstration]) -> dict[str, float]:
        """One supervised step on the trained pieces of demonstrations; returns metrics."""
        ...

    def save_model(self, directory: Path) -> None:
        """Write the weights and the tokenizer in the Hugging Face layout."""
        ...

    def save_checkpoint(self, directory: Path) -> None:
        """Write weights (Hugging Face layout, tokenizer included) and optimiser state."""
        ...

    def load_checkpoint(self, directory: Path) -> None:
        """Continue from what ``save_checkpoint`` wrote, bit for bit."""
        ...


class Scheduler(Protocol):
    """What a growing path waits for; meanwhile the others go on."""

    policy: Policy

    async def sample(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingParams,
        drawn: Callable[[int, Completion], object] | None = None,
    ) -> list[Completion]:
        """What the policy draws for each, once it has drawn all of them.

        ``drawn`` is told of each request's place and completion as soon as that one is there.
        """
        ...

    def call(
        self, tool: "Tool", arguments: Mapping[str, Any]
    ) -> tuple[Awaitable[ToolResult], bool]:
        """A tool's result to come, and whether a call is made for it (equal ones are made once)."""
        ...

    async def together(
        self, function: Callable[[list[Any]], Any], items: Sequence[Any], most: float = inf
    ) -> Sequence[Any]:
        """``function(items)``, on the items of all who ask at one moment, ``most`` in one call."""
        ...

    async def each(self, function: Callable[[S], T], items: Sequence[S]) -> list[T]:
        """``function(item)`` of each item, beside the sampling; none waits long for another."""
        ...


class Expander(Protocol):
    """How an edge is made: the only place where segment mode and agent mode differ."""

    max_layers: int
    edge_tokens: int
    """What the policy samples for one edge at most."""
    path_tokens: int
    """What it samples for one path at most."""

    def start(self, policy: PromptOpener, task: Task, prefix: Prefix = NO_PREFIX) -> PathState:
        """The root: the rendered prompt of a task, and the beginning of an answer behind it.

        Raises:
            DataError: the prompt does not fit into the policy's context, or the prefix leaves no
                room in the response.
        """
        ...

    def tokens_left(self, policy: Policy, state: PathState) -> int:
        """What the policy can still sample behind a state at most."""
        ...

    def recall(self, state: PathState) -> Any:
        """What ``start`` needs beside its tokens to go on from a state, as JSON values."""
        ...

    async def expand(
        self,
        scheduler: Scheduler,
        states: Sequence[PathState],
        seeds: Sequence[int],
        sampling: SamplingParams,
        limit: int | None = None,
    ) -> list[Step]:
        """One new edge from each state, which may be named more than once.

        With a ``limit`` the policy samples no more tokens than that for an edge; where the edge
        would have gone on, the path ends, ``out_of_budget``.
        """
        ...

    def cut(
        self, policy: Policy, before: PathState, after: PathState, num_tokens: int
    ) -> PathState:
        """The state inside an edge, after ``num_tokens`` of its tokens.

        Args:
            policy: made the contexts.
            before: where the edge begins.
            after: where it ends.
            num_tokens: of the edge, to the cut; sampled by the policy on both sides of it.

        Raises:
            ConfigError: this mode's edges are whole.
        """
        ...

    def outcome(self, state: PathState) -> Outcome:
        """What the verifier sees of a finished path."""
        ...


class StateDescriber(Protocol):
    """What the compared state of a path is: a canonical key, a text, or both."""

    async def describe(
        self, scheduler: Scheduler, states: Sequence[PathState]
    ) -> list[StateDescription]:
        """One description per state, in order."""
        ...


class Embedder(Protocol):
    """Text to vectors."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[num_texts, dimension], finite; a row of zeros is similar to nothing."""
        ...


@runtime_checkable
class StepScorer(Protocol):
    """A process reward model: how good the steps of an answer are."""

    def score(self, responses: Sequence[SteppedResponse]) -> list[list[float]]:
        """For each response one score in [0, 1] per step; NaN for a step that has none.

        Raises:
            ToolError: no response can be scored at any time: wrong address, key or model.
        """
        ...


class RewardFn(Protocol):
    """The verifier of a finished trajectory."""

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """A reward in [0, 1].

        Raises:
            CallFailed: it cannot be said this time; an outage marks the trajectory as a tool's
                does (``graphpo_agent.net.failures``).
        """
        ...


@runtime_checkable
class Retriever(Protocol):
    """Documents for queries."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query at most ``topk`` documents, best first."""
        ...


@runtime_checkable
class Counting(Protocol):
    """A verifier, state description, embedder or step scorer that keeps count for the metrics."""

    @property
    def counts(self) -> Mapping[str, int]:
        """So far, by the name of the metric, e.g. ``{"judge/unjudged": 2}``."""
        ...


@runtime_checkable
class PageReader(Protocol):
    """Pages for addresses."""

    def read(self, url: str) -> Document:
        """The page as readable text; its id and url are the address as asked for.

        Raises:
            CallFailed: this page cannot be had (``graphpo_agent.net.failures``).
            ToolError: no page can be had: wrong key, used-up quota.
        """
        ...


@runtime_checkable
class ChatModel(Protocol):
    """A language model other than the policy: judge, summariser, extractor."""

    def reply(self, messages: Sequence[Message], max_tokens: int) -> str:
        """Its answer to a conversation, drawn at temperature 0.

        Raises:
            CallFailed: no answer this time (``graphpo_agent.net.failures``).
            ToolError: none at any time: wrong key, used-up quota, unknown model.
        """
        ...


@runtime_checkable
class Tool(Protocol):
    """Something an agent can call."""

    name: str
    description: str
    """What it does, in a sentence or two that an agent reads."""
    schema: Mapping[str, Any]
    """The JSON schema of the arguments."""

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        """The results of several calls, in order. A failed call is a result with ``failure``.

        May run in several threads at once. Within one rollout equal calls share their result.
        """
        ...


@runtime_checkable
class Tracker(Protocol):
    """Shows a run's metrics elsewhere; what ``log`` and ``finish`` raise stops nothing."""

    def start(self, run: Path, config: Mapping[str, Any], resumed: bool) -> str:
        """Begin with a run's directory and configuration; returns a line that says where to look.

        A ``resumed`` run's ``log`` is told the rows that it has kept once more.
        """
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of ``metrics.jsonl``; steps rise."""
        ...

    def finish(self, complete: bool) -> None:
        """The run ended: as it should, or by an error or interrupt."""
        ...
