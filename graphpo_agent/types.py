"""The records that cross module borders. Standard library only.

Example of one agent-mode edge, ``Step``::

    token_ids  = (12, 40, 41, 13, 90, 91, 92)   # "<search> karo venn </search>" + the observation
    loss_mask  = (1, 1, 1, 1, 0, 0, 0)          # 1: sampled by the policy, 0: the environment's
    logprobs   = (-0.1, -1.2, -0.3, -0.0, nan, nan, nan)
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = [
    "NO_PREFIX",
    "OUTAGES",
    "Completion",
    "Context",
    "Demonstration",
    "Document",
    "FailureKind",
    "Finding",
    "FinishReason",
    "Message",
    "Outcome",
    "PathState",
    "Piece",
    "Prefix",
    "Prompt",
    "SampleRequest",
    "SamplingParams",
    "StateDescription",
    "Step",
    "StepStatus",
    "SteppedResponse",
    "Task",
    "ToolResult",
    "TurnBreak",
    "check_lengths",
]

Message = Mapping[str, str]
"""One chat message: ``{"role": "user", "content": "..."}``."""

Prompt = Sequence[Message] | str
"""What a path starts from: messages for the chat template, or plain text without one."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem to be solved.

    Example::

        Task(id="kb-1f0c", question="mentor of Karo Venn ...", answers=("1987",))
    """

    id: str
    """Unique over all data of a run; derived from the content where the source has none."""
    question: str
    answers: tuple[str, ...]
    """The accepted answers; empty where the reward needs none."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Piece:
    r"""One part of a demonstration: the policy's own words, or an observation.

    Example: ``Piece("<tool_response>\n1987\n</tool_response>", trained=False, role="user")``
    """

    text: str
    trained: bool
    role: str | None = None
    """Whose message it is in the chat template; None: it continues the policy's own message."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One solved task to imitate: a prompt and the pieces that follow it.

    Each piece is tokenised on its own, as it is in a rollout, so that supervised and sampled
    token ids agree. A trained last piece is followed by the end-of-sequence token when ``ends``
    is true.
    """

    id: str
    messages: tuple[Message, ...]
    pieces: tuple[Piece, ...]
    ends: bool = True


@dataclass(frozen=True, slots=True)
class TurnBreak:
    r"""Token ids around a reply that is a message of its own.

    They end the policy's turn and open the reply's message, then end this message and open the
    policy's next turn.

    Example (ChatML): ``<|im_end|>\n<|im_start|>user\n`` and
    ``<|im_end|>\n<|im_start|>assistant\n``.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]


class Context(Protocol):
    """A token prefix that a policy can continue. Opaque; made and understood by one policy only."""

    @property
    def num_tokens(self) -> int:
        """Tokens from the start of the prompt to here."""
        ...


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of an earlier answer, from which new ones go on.

    Example: ``Prefix((12, 40, 41))``.
    """

    token_ids: tuple[int, ...] = ()
    """What follows the prompt, observations included."""
    memory: Any = None
    """What its expander remembers of it (``Expander.recall``), as JSON values."""


NO_PREFIX = Prefix()
"""An answer begins at the prompt."""


FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. ``temperature`` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One continuation to sample.

    ``seed`` alone decides the random numbers of this continuation, whatever else is in the batch.
    ``stop`` are strings: sampling ends with the first token after which the sampled text holds one
    of them, at or after ``min_new_tokens`` (the text before that many tokens cannot stop it).
    """

    context: Context
    seed: int
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request returned. The end-of-sequence token, when sampled, is the last id.

    ``logprobs[i]`` is the natural-log probability of ``token_ids[i]`` under the sampling
    temperature (before top-p truncation); with temperature 0 that of temperature 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    context: Context
    """The prefix after these tokens."""

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a verifier sees of a finished trajectory: the policy's own words only."""

    response: str
    """Every text the policy generated on this path, observations left out."""
    answer: str | None = None
    """The final answer, where the mode marks one (agent mode); None: unanswered or unmarked."""
    turns: tuple[str, ...] = ()
    """The policy's own text of each turn, in order; empty in segment mode."""
    documents: tuple["Document", ...] = ()
    """What the path was shown, each document once."""
    tool_calls: int = 0
    """Asked for on the path."""


@dataclass(frozen=True, slots=True)
class StateDescription:
    """What two nodes are compared by. ``key``: the canonical state; ``text``: to be embedded."""

    key: str | None = None
    text: str | None = None
    summary_tokens: int = 0
    """Tokens that the policy spent on the text."""


@dataclass(frozen=True, slots=True)
class PathState:
    """Where one path has got to: enough to continue it, to describe it and to judge it.

    Immutable: siblings share it. ``memory`` belongs to the mode (segment mode: the sampled ids;
    agent mode: the documents and actions so far).
    """

    task: Task
    context: Context
    depth: int
    prompt_ids: tuple[int, ...]
    """The rendered prompt."""
    response: str
    """Every text the policy generated on this path, observations left out."""
    answer: str | None
    memory: Any = None
    outages: int = 0
    """Tool calls on this path that failed for a reason outside the policy."""
    unjudged: bool = False
    """Whether the verifier failed for such a reason."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt, observations included."""
        return self.context.num_tokens - self.prompt_tokens


StepStatus = Literal[
    "ok",
    "answered",
    "invalid_action",
    "tool_error",
    "tool_outage",
    "out_of_length",
    "out_of_turns",
    "out_of_budget",
]


@dataclass(frozen=True, slots=True)
class Step:
    """One new edge and the state it reaches. Lengths of the three token fields agree."""

    state: PathState
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1: sampled by the policy; 0: observation."""
    logprobs: tuple[float, ...]
    """NaN on observation tokens."""
    terminal: bool
    status: StepStatus
    tool_calls: int = 0

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.loss_mask) == len(self.logprobs)


@dataclass(frozen=True, slots=True)
class SteppedResponse:
    """An answer in steps, as a process reward model reads it.

    Example: ``SteppedResponse("What is 2 + 2 + 2?", ("2 + 2 is 4.", "4 + 2 is 6."))``
    """

    question: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One retrieved document; ``contents`` as in Search-R1: a quoted title, then the text."""

    id: str
    contents: str
    score: float | None = None
    url: str | None = None

    @property
    def title(self) -> str:
        """The first line, its surrounding double quotes kept as in Search-R1."""
        return self.contents.split("\n", 1)[0]

    @property
    def text(self) -> str:
        """All but the first line."""
        return self.contents.split("\n", 1)[1] if "\n" in self.contents else ""


FailureKind = Literal["bad_arguments", "no_result", "rate_limit", "transient"]
"""Why a call failed. The first two answer what the policy asked for; the last two are outages of
the outside world, which mark the trajectory. Quota and configuration errors are exceptions."""

OUTAGES: frozenset[FailureKind] = frozenset(("rate_limit", "transient"))


@dataclass(frozen=True, slots=True)
class Finding:
    """What one query (or one address) of a tool call found, best first; perhaps nothing."""

    query: str
    documents: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call returned: ``findings`` where it found documents, else ``text``.

    A failed call is data, not an exception: ``failure`` says of which kind, ``text`` why.

    Example::

        ToolResult(findings=(Finding("karo venn", (doc_7, doc_3)),))
        ToolResult(text="search failed: the server is busy", failure="rate_limit")
    """

    text: str = ""
    findings: tuple[Finding, ...] = ()
    failure: FailureKind | None = None

    @property
    def documents(self) -> tuple[Document, ...]:
        """All that was found, each document once, in order."""
        unique = {doc.id: doc for finding in self.findings for doc in finding.documents}
        return tuple(unique.values())


def check_lengths(**fields: Sized) -> None:
    """Raise ValueError unless all sequences have the same length."""
    lengths = {name: len(value) for name, value in fields.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"lengths disagree: {lengths}")
