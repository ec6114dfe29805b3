"""How an agent and its environment write to each other: prompt, actions, observations."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from graphpo_agent.errors import ConfigError
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.rollout.path import check_template, fill_template
from graphpo_agent.types import Document, Message, Task, ToolResult

__all__ = [
    "SEARCH_R1_PROMPT",
    "Action",
    "Dialect",
    "FinalAnswer",
    "Observation",
    "SearchR1Dialect",
    "ToolCall",
    "encode_observation",
]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The policy asks for a tool: ``ToolCall("search", {"query": "capital of France"})``."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The policy ends the path: ``FinalAnswer("Paris")``."""

    text: str


Action = ToolCall | FinalAnswer


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
    """Strings that complete an action: no token is sampled after one of them."""
    invalid_action: Observation
    """The reply to a turn without a complete action."""

    def render(self, task: Task) -> list[Message]:
        """The prompt of a task."""
        ...

    def parse(self, text: str) -> Action | None:
        """The first complete action of a turn's text; None without one. Total, in linear time."""
        ...

    def observation(self, result: ToolResult) -> Observation:
        """A tool's result, one piece per document; nothing in it can be read as an action."""
        ...


def encode_observation(
    tokenizer: Tokenizer, observation: Observation, max_tokens: int
) -> tuple[tuple[int, ...], int]:
    """Token ids of an observation, its body cut so that at most ``max_tokens`` remain.

    The closing is always there, and no character is cut in two.

    Returns:
        The token ids, and how many of the observation's pieces they show, if only in part.

    Raises:
        ConfigError: ``max_tokens`` cannot hold the opening and the closing.
    """
    whole = tokenizer.encode(observation.text)
    if len(whole) <= max_tokens:
        return tuple(whole), len(observation.pieces)
    opening, closing = tokenizer.encode(observation.opening), tokenizer.encode(observation.closing)
    room = max_tokens - len(opening) - len(closing)
    if room < 0:
        raise ConfigError(
            f"max_observation_tokens {max_tokens} cannot hold an observation's own tags "
            f"({len(opening) + len(closing)} tokens); raise it"
        )
    body, shown_text = _cut_at_character(tokenizer, tokenizer.encode(observation.body)[:room])
    starts = accumulate((len(piece) for piece in observation.pieces[:-1]), initial=0)
    shown = sum(start < len(shown_text) for start in starts)
    return (*opening, *body, *closing), shown


def _cut_at_character(tokenizer: Tokenizer, token_ids: list[int]) -> tuple[list[int], str]:
    """Drop the last tokens (at most 3, as UTF-8 allows) that hold only a part of a character."""
    text = tokenizer.decode(token_ids)
    for _ in range(3):
        if not text.endswith("\ufffd"):
            break
        token_ids = token_ids[:-1]
        text = tokenizer.decode(token_ids)
    return token_ids, text


SEARCH_R1_PROMPT = """\
Find the answer to the question at the end. You can look things up in a document collection.
Work in turns. In each turn, first reason inside <think> </think> about what you know and what is \
still missing. Then do one of two things:
- To look something up, write <search> your query </search>. The best matching documents are then \
shown to you between <information> and </information>, and your next turn begins.
- Once nothing is missing, write the answer in the same way, inside a tag named answer. Give the \
answer alone, in a few words.
You may search as often as you need.
Question: {question}
"""
"""The default prompt; it holds no answer tag that a scorer of whole transcripts could take."""

_INVALID_ACTION = (
    "\nThat turn held neither a search nor an answer. Write a query inside a tag named search, "
    "or the final answer inside a tag named answer, and close the tag.\n"
)


class SearchR1Dialect:
    """Search-R1's tags: ``<think> <search> <information> <answer>``; a ``Dialect``.

    A turn's action is the ``search`` or ``answer`` element that closes first, its content taken
    from the last opening tag before that close. Tags are spelled exactly (lower case, no spaces).
    Documents are shown as ``Doc 1(Title: "T") text``. In retrieved text the ``<`` of every
    think, search, information or answer tag, opening or closing, in any case and spacing and with
    attributes or none, becomes ``‹`` (U+2039).

    Example::

        parse("<think> who? </think> <search> karo venn </search>")
            == ToolCall("search", {"query": "karo venn"})
    """

    tool_names: tuple[str, ...] = ("search",)
    stop: tuple[str, ...] = ("</search>", "</answer>")
    invalid_action = Observation("", (_INVALID_ACTION,), "")

    _tags = re.compile(
        r"<(?=\s*+(?:/\s*+)?(?:think|search|information|answer)\b)", flags=re.IGNORECASE
    )

    def __init__(self, prompt_template: str | None = None) -> None:
        """Use a prompt template, or the built-in one where it is None.

        Raises:
            ConfigError: the template has no ``{question}``.
        """
        template = SEARCH_R1_PROMPT if prompt_template is None else prompt_template
        self._prompt_template = check_template(template)

    def render(self, task: Task) -> list[Message]:
        """One user message: the prompt template with the task's question."""
        return [{"role": "user", "content": fill_template(self._prompt_template, task.question)}]

    def parse(self, text: str) -> Action | None:
        """The action whose closing tag comes first; None if no action is complete."""
        search, answer = _first_element(text, "search"), _first_element(text, "answer")
        if search is not None and (answer is None or search[0] < answer[0]):
            return ToolCall("search", {"query": search[1]})
        return None if answer is None else FinalAnswer(answer[1])

    def observation(self, result: ToolResult) -> Observation:
        """The documents of a result, or its text where it has none, between information tags."""
        pieces = [_show_document(i, doc) for i, doc in enumerate(result.documents, start=1)]
        pieces = pieces or [result.text.lstrip()]
        pieces[-1] = pieces[-1].rstrip()
        return Observation(
            opening="\n\n<information>",
            pieces=tuple(self._tags.sub("‹", piece) for piece in pieces),
            closing="</information>\n\n",
        )


def _show_document(number: int, document: Document) -> str:
    return f"Doc {number}(Title: {document.title}) {document.text}\n"


def _first_element(text: str, tag: str) -> tuple[int, str] | None:
    """Where the first complete element of a tag closes, and its stripped content."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    first = text.find(opening)
    if first < 0:
        return None
    close = text.find(closing, first + len(opening))
    if close < 0:
        return None
    start = text.rfind(opening, first, close) + len(opening)
    return close, text[start:close].strip()
