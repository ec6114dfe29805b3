"""Search-R1's dialect: ``<think> <search> <information> <answer>`` in one message."""

from typing import Literal

from graphpo_agent.rollout.dialects.base import (
    Action,
    FinalAnswer,
    InvalidAction,
    Observation,
    ToolCall,
)
from graphpo_agent.rollout.dialects.elements import TagGuard, first_element
from graphpo_agent.rollout.dialects.layouts import lay_out
from graphpo_agent.rollout.path import check_template, fill_template
from graphpo_agent.types import Message, Task, ToolResult

__all__ = ["SEARCH_R1_PROMPT", "SearchR1Dialect"]

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
    """Search-R1's tags; a ``Dialect``.

    A turn's action is the ``search`` or ``answer`` element that closes first, its content taken
    from the last opening tag before that close. Tags are spelled exactly (lower case, no spaces).
    In retrieved text the dialect's own tags are made harmless (``TagGuard``).

    With ``compat="search-r1"`` it reads and writes as Search-R1 does where a checkpoint may depend
    on it: the question gets a question mark where it ends without one, the element that opens
    first goes before one that closes first, its content starts at its first opening tag, and an
    observation that is too long loses its closing tag. Sampling still ends at the first closing
    tag. Search-R1 samples on and cuts its text behind the first ``</search>``, so it runs another
    action only where an ``</answer>`` closes nothing or stands inside an open ``search``.

    Example::

        parse("<think> who? </think> <search> karo venn </search>")
            == ToolCall("search", {"query": "karo venn"})
    """

    tool_names: tuple[str, ...] = ("search",)
    stop: tuple[str, ...] = ("</search>", "</answer>")

    _guard = TagGuard(("think", "search", "information", "answer"))

    def __init__(
        self,
        prompt_template: str | None = None,
        documents: Literal["search_r1", "verl"] = "search_r1",
        compat: Literal["none", "search-r1"] = "none",
    ) -> None:
        """Set up.

        Args:
            prompt_template: with ``{question}``; None: the built-in one.
            documents: how they are listed.
            compat: ``search-r1`` as described above.

        Raises:
            ConfigError: the template has no ``{question}``.
        """
        template = SEARCH_R1_PROMPT if prompt_template is None else prompt_template
        self._prompt_template = check_template(template)
        self._documents: Literal["search_r1", "verl"] = documents
        self._compat = compat == "search-r1"

    def render(self, task: Task) -> list[Message]:
        """One user message: the prompt template with the task's question."""
        question = task.question
        if self._compat:
            question = question.strip()
            question += "" if question.endswith("?") else "?"
        return [{"role": "user", "content": fill_template(self._prompt_template, question)}]

    def parse(self, text: str) -> Action:
        """The action that the class describes, or what is wrong with the turn."""
        if self._compat:
            return _parse_as_search_r1(text)
        search, answer = first_element(text, "search"), first_element(text, "answer")
        if search is not None and (answer is None or search[0] < answer[0]):
            return ToolCall("search", {"query": search[1]})
        return InvalidAction(_INVALID_ACTION) if answer is None else FinalAnswer(answer[1])

    def observation(self, call: ToolCall, result: ToolResult) -> Observation:
        """The documents of a result, or its text where it has none, between information tags."""
        listing = lay_out(result, self._documents)
        pieces = [self._guard.disarm(piece) for piece in listing.pieces]
        opening = f"\n\n<information>{listing.before}"
        closing = f"{listing.after}</information>\n\n"
        if self._compat:  # all of it can be cut
            pieces[-1] += closing
            closing = ""
        return Observation(opening, tuple(pieces), closing, listing.documents)

    def correction(self, invalid: InvalidAction) -> Observation:
        """What was wrong, as text that continues the message."""
        return Observation("", (invalid.reason,), "")


def _parse_as_search_r1(text: str) -> Action:
    """The text cut after the first search, else after the first answer; then its first element."""
    for end in ("</search>", "</answer>"):
        close = text.find(end)
        if close >= 0:
            text = text[: close + len(end)]
            break
    found = {
        tag: text.find(f"<{tag}>")
        for tag in ("search", "answer")
        if first_element(text, tag) is not None
    }
    if not found:
        return InvalidAction(_INVALID_ACTION)
    tag = min(found, key=lambda name: found[name])
    element = first_element(text, tag, opening="first")
    assert element is not None
    if tag == "search":
        return ToolCall("search", {"query": element[1]})
    return FinalAnswer(element[1])
