"""What every dialect consists of: actions, observations, and how an observation becomes tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from graphpo_agent.errors import ConfigError
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.types import Document, Prompt, Task, ToolResult

__all__ = [
    "Action",
    "Dialect",
    "FinalAnswer",
    "InvalidAction",
    "Observation",
    "ToolCall",
    "encode_observation",
]


_CHARACTERS_PER_TOKEN = 6
"""Of which a text is first taken to have fewer: English has four or five."""
_BOUNDARY_TOKENS = 16
"""At the end of a part of a text that may be others in the whole."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The policy asks for a tool: ``ToolCall("search", {"query": "capital of France"})``."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The policy ends the path: ``FinalAnswer("Paris")``."""

    text: str


@dataclass(frozen=True, slots=True)
class InvalidAction:
    """The turn holds nothing that can be done; ``reason`` is what the policy is told.

    Example: ``InvalidAction("That turn held no action.")``
    """

    reason: str
    unfinished: bool = False
    """The text ends inside a call, so that a stop string at its end is a part of that call."""


Action = ToolCall | FinalAnswer | InvalidAction


@dataclass(frozen=True, slots=True)
class Observation:
    r"""What the environment writes after a turn, in pieces: the body can be cut, the tags stay.

    Example::

        Observation("<information>", ("Doc 1(Title: A) a\n", "Doc 2(Title: B) b"), "</...>")
    """

    opening: str
    pieces: tuple[str, ...]
    """The body: one piece per document, in order, or the whole text where there are none."""
    closing: str
    documents: tuple[Document, ...] = ()
    """Those that the first pieces show, one each; a document may occur again."""
    role: str | None = None
    """Whose message it is in the chat template; None: it continues the policy's own message."""

    @property
    def body(self) -> str:
        """All that lies between opening and closing."""
        return "".join(self.pieces)

    @property
    def text(self) -> str:
        """The observation uncut."""
        return self.opening + self.body + self.closing


class Dialect(Protocol):
    """The written form of a ReAct turn and of the reply to it."""

    tool_names: tuple[str, ...]
    """Every tool that ``parse`` can name."""
    stop: tuple[str, ...]
    """Strings that complete an action: no token is sampled after one of them that does."""

    def render(self, task: Task) -> Prompt:
        """The prompt of a task, tool schemas included."""
        ...

    def parse(self, text: str) -> Action:
        """The first complete action of a turn's text. Total, in linear time."""
        ...

    def observation(self, call: ToolCall, result: ToolResult) -> Observation:
        """A call's result, one piece per document; nothing in it can be read as an action."""
        ...

    def correction(self, invalid: InvalidAction) -> Observation:
        """The reply to a turn without an action that can be done."""
        ...


def encode_observation(
    tokenizer: Tokenizer, observation: Observation, max_tokens: int, after_eos: int | None = None
) -> tuple[tuple[int, ...], int]:
    """Token ids of an observation, its body cut so that at most ``max_tokens`` remain.

    Opening, closing and, where it is a message of its own, the chat template's tokens around it
    are always there. No character and no backslash escape is cut in two.

    Args:
        tokenizer: the policy's.
        observation: the reply.
        max_tokens: most token ids.
        after_eos: the end-of-sequence token that the policy ended its turn with, if it did; the
            chat template does not repeat it.

    Returns:
        The token ids, and how many of the observation's pieces they show, if only in part.

    Raises:
        ConfigError: ``max_tokens`` cannot hold what is always there.
    """
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    if observation.role is not None:
        around = tokenizer.turn_break(observation.role)
        before, after = around.opening, around.closing
        if after_eos is not None and before[:1] == (after_eos,):
            before = before[1:]
    room = max_tokens - len(before) - len(after)
    shown, num_pieces = _encode_text(tokenizer, observation, room, max_tokens)
    return (*before, *shown, *after), num_pieces


def _encode_text(
    tokenizer: Tokenizer, observation: Observation, room: int, max_tokens: int
) -> tuple[list[int], int]:
    beginning = _beginning(tokenizer, observation.body, room)
    if beginning is None:
        whole = tokenizer.encode(observation.text)
        if len(whole) <= room:
            return whole, len(observation.pieces)
        beginning = tokenizer.encode(observation.body)
    opening, closing = tokenizer.encode(observation.opening), tokenizer.encode(observation.closing)
    body_room = room - len(opening) - len(closing)
    if body_room < 0:
        raise ConfigError(
            f"max_observation_tokens {max_tokens} cannot hold an observation's own tags "
            f"({max_tokens - body_room} tokens); raise it"
        )
    body, text = _cut_cleanly(tokenizer, beginning[:body_room])
    starts = accumulate((len(piece) for piece in observation.pieces[:-1]), initial=0)
    return [*opening, *body, *closing], sum(start < len(text) for start in starts)


def _beginning(tokenizer: Tokenizer, body: str, room: int) -> list[int] | None:
    """The first tokens of a body that has more than ``room``, or None: it may have fewer.

    No more of it is looked at than that takes: pages are long, and little of them is shown.
    """
    length = _CHARACTERS_PER_TOKEN * room
    while len(body) > length // 2 and room > 0:
        token_ids = tokenizer.encode(body[:length])
        if len(token_ids) >= room + _BOUNDARY_TOKENS:
            return token_ids[:room]
        if length >= len(body):
            break
        length *= 2
    return None


def _cut_cleanly(tokenizer: Tokenizer, token_ids: list[int]) -> tuple[list[int], str]:
    """Drop last tokens that hold only a part of a character (at most 3) or of an escape."""
    text = tokenizer.decode(token_ids)
    for _ in range(3):
        if not text.endswith("\ufffd"):
            break
        token_ids = token_ids[:-1]
        text = tokenizer.decode(token_ids)
    while (len(text) - len(text.rstrip("\\"))) % 2:
        token_ids = token_ids[:-1]
        text = tokenizer.decode(token_ids)
    return token_ids, text
