"""What the parts ask of each other. Nothing here imports an implementation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.types import (
    Completion,
    Context,
    Demonstration,
    Document,
    Message,
    Outcome,
    PathState,
    SampleRequest,
    SamplingParams,
    StateDescription,
    Step,
    Task,
    ToolResult,
)

__all__ = [
    "Embedder",
    "Engine",
    "Expander",
    "Policy",
    "Retriever",
    "RewardFn",
    "StateDescriber",
    "Tokenizer",
    "Tool",
]


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

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the chat template, up to where the policy answers.

        Special-token spellings inside the messages' contents stay plain text.
        """
        ...


class Policy(Protocol):
    """The model being trained, as a sampler that continues from any prefix it has seen."""

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

    def sample(
        self, requests: Sequence[SampleRequest], sampling: SamplingParams
    ) -> list[Completion]:
        """One completion per request, in order. No prefix token is computed twice."""
        ...

    def take_prefilled_tokens(self) -> int:
        """Prefix tokens computed since the last call (the ledger's ``tokens prefilled``)."""
        ...

    def release(self) -> None:
        """Forget every context; call it when a rollout is over and before the weights change."""
        ...


class Engine(Protocol):
    """Owns the weights: samples with them, learns, saves and loads."""

    @property
    def policy(self) -> Policy:
        """The weights as a sampler."""
        ...

    def update(self, samples: Sequence[Any], step: int) -> dict[str, float]:
        """One PPO update (Algorithm 1, stage 4) from ``TrainingSample``s; returns metrics."""
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


class Expander(Protocol):
    """How an edge is made: the only place where segment mode and agent mode differ."""

    max_layers: int

    def start(self, policy: Policy, task: Task) -> PathState:
        """The root: the rendered prompt of a task."""
        ...

    def expand(
        self,
        policy: Policy,
        states: Sequence[PathState],
        seeds: Sequence[int],
        sampling: SamplingParams,
    ) -> list[Step]:
        """One new edge from each state, in order (a state may occur several times)."""
        ...


class StateDescriber(Protocol):
    """What the compared state of a path is: a canonical key, a text, or both."""

    def describe(self, policy: Policy, states: Sequence[PathState]) -> list[StateDescription]:
        """One description per state, in order."""
        ...

    def take_summary_tokens(self) -> list[int]:
        """Tokens the policy spent on each description of the last ``describe`` call."""
        ...


class Embedder(Protocol):
    """Text to vectors."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[num_texts, dimension]; a row of zeros is similar to nothing."""
        ...


class RewardFn(Protocol):
    """The verifier of a finished trajectory."""

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """A reward in [0, 1]."""
        ...


@runtime_checkable
class Retriever(Protocol):
    """Documents for queries."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query at most ``topk`` documents, best first."""
        ...


@runtime_checkable
class Tool(Protocol):
    """Something an agent can call."""

    name: str
    schema: Mapping[str, Any]
    """The JSON schema of the arguments."""

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        """The results of several calls, in order. A failed call is a result with ``error``."""
        ...
