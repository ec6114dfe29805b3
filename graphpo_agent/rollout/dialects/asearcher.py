"""ASearcher's dialect: ``<search> <access> <answer>`` in a plain text without chat template."""

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
from graphpo_agent.types import Prompt, Task, ToolResult

__all__ = ["ASEARCHER_PROMPT", "ASearcherDialect"]

ASEARCHER_PROMPT = """\
A conversation between User and Assistant. The user has a question that takes research, and the \
assistant finds the answer with two tools: a search engine and a reader of web pages.
In each turn the assistant reasons inside <think> </think> and then does one of three things. \
<search> query </search> lists pages for a query; <access> address </access> opens one of them. \
Both are answered between <information> and </information>. Once the answer is certain, it is \
written inside a tag named answer, alone and in a few words.

User: {question}

Assistant:\x20
<think>
"""
"""The default prompt, up to where the first turn goes on thinking."""

_NEXT_TURN = "\n<think>\n"
_PAGE_CHARACTERS = 25_000
_INVALID_ACTION = (
    "\n<information>\nThat turn held no action. Write a query inside a tag named search, an "
    "address inside a tag named access, or the final answer inside a tag named answer, and close "
    "the tag.\n</information>\n"
)
_ELEMENTS = {"search": ("search", "query"), "access": ("access", "url")}


class ASearcherDialect:
    r"""ASearcher's tags; a ``Dialect``.

    The prompt is plain text that ends inside the first thought, and after every observation
    ``\n<think>\n`` begins the next one, so a turn's own words start inside a thought. A turn's
    action is the element that closes first. A page is shown in parts of 25,000 characters, each
    headed ``>>>> Page n >>>>``.

    Example::

        parse("the city. </think>\n<access> https://a.org/x </access>")
            == ToolCall("access", {"url": "https://a.org/x"})
    """

    tool_names: tuple[str, ...] = ("search", "access")
    stop: tuple[str, ...] = ("</search>", "</access>", "</answer>")

    _guard = TagGuard(("think", "search", "access", "information", "answer"))

    def __init__(self, prompt_template: str | None = None) -> None:
        """Use a prompt template, or the built-in one where it is None.

        Raises:
            ConfigError: the template has no ``{question}``.
        """
        template = ASEARCHER_PROMPT if prompt_template is None else prompt_template
        self._prompt_template = check_template(template)

    def render(self, task: Task) -> Prompt:
        """The prompt template with the task's question, as plain text."""
        return fill_template(self._prompt_template, task.question)

    def parse(self, text: str) -> Action:
        """The action whose closing tag comes first, or what is wrong with the turn."""
        found = {tag: first_element(text, tag) for tag in ("search", "access", "answer")}
        complete = {tag: element for tag, element in found.items() if element is not None}
        if not complete:
            return InvalidAction(_INVALID_ACTION)
        tag = min(complete, key=lambda name: complete[name][0])
        content = complete[tag][1]
        if tag == "answer":
            return FinalAnswer(content)
        tool, argument = _ELEMENTS[tag]
        return ToolCall(tool, {argument: content})

    def observation(self, call: ToolCall, result: ToolResult) -> Observation:
        """What a search or an access returned, between information tags."""
        if call.tool == "access" and result.documents:
            pieces, documents = _parts(result.documents[0].contents), result.documents[:1]
        else:
            listing = lay_out(result, "asearcher")
            pieces, documents = listing.pieces, listing.documents
        return Observation(
            opening="\n<information>\n",
            pieces=tuple(self._guard.disarm(piece) for piece in pieces),
            closing=f"\n</information>\n{_NEXT_TURN}",
            documents=documents,
        )

    def correction(self, invalid: InvalidAction) -> Observation:
        """What was wrong, between information tags."""
        return Observation("", (invalid.reason,), _NEXT_TURN)


def _parts(page: str) -> tuple[str, ...]:
    starts = range(0, max(1, len(page)), _PAGE_CHARACTERS)
    return tuple(
        f"{chr(10) if number > 1 else ''}>>>> Page {number} >>>>\n\n"
        f"{page[start : start + _PAGE_CHARACTERS]}"
        for number, start in enumerate(starts, start=1)
    )
