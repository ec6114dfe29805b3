"""The Hermes dialect: JSON calls in ``<tool_call>``, replies in ``<tool_response>`` messages.

Qwen's chat templates, WebDancer and Tongyi DeepResearch write this way.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphpo_agent.call_text import FENCE, STRING_OR_CODE, ends_inside_call
from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.dialects.base import (
    Action,
    FinalAnswer,
    InvalidAction,
    Observation,
    ToolCall,
)
from graphpo_agent.rollout.dialects.elements import TagGuard, first_element
from graphpo_agent.rollout.dialects.layouts import Layout, lay_out, lay_out_pages
from graphpo_agent.rollout.path import check_template, fill_template
from graphpo_agent.types import Message, Prompt, Task, ToolResult

__all__ = ["HERMES_PROMPT", "HERMES_SYSTEM_PROMPT", "HermesDialect", "ToolSignature"]

HERMES_SYSTEM_PROMPT = """\
You answer questions by research. Work in turns: reason inside <think> </think>, then call one \
tool and wait for its reply, or give the final answer.

The tools, one JSON signature a line:
<tools>
{tools}
</tools>

A call is a JSON object with the tool's name and its arguments:
<tool_call>
{"name": "the tool", "arguments": {"the argument": "its value"}}
</tool_call>
The reply comes between <tool_response> and </tool_response>. Once the answer is certain, write \
it inside a tag named answer, alone and in a few words."""
"""The default system message."""

HERMES_PROMPT = "{question}"
"""The default user message."""

_TOOLS_SLOT = "{tools}"
_NO_ACTION = (
    "That turn held neither a tool call nor an answer. Write a JSON call inside a tag named "
    "tool_call, or the final answer inside a tag named answer, and close the tag."
)
_NOT_JSON = "That tool call is not valid JSON. Write one object with the keys name and arguments."
_JSON = json.JSONDecoder(strict=False)
_FENCED = re.compile(FENCE)
_LAST_COMMA = re.compile(
    rf'(?P<kept>{STRING_OR_CODE})|(?<=[\w"}}\]])\s*+,(?=\s*+[}}\]])', re.DOTALL
)
"""A comma behind the last value of an object or a list; on the way there, what has none."""


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """What the policy is told of one tool.

    Example: ``ToolSignature("search", "Finds documents.", {"type": "object", ...})``
    """

    name: str
    description: str
    schema: Mapping[str, Any]

    @property
    def line(self) -> str:
        """The signature as one line of JSON, as chat templates list functions."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.schema,
        }
        return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


class HermesDialect:
    r"""JSON tool calls and replies that are messages of the user; a ``Dialect``.

    A turn's action is the ``tool_call`` or ``answer`` element that closes first, its content taken
    from the last opening tag before that close; in a string or the code of a call an answer's tags
    are plain text. A call is a JSON object with ``name`` and ``arguments``; code for a tool that
    takes some may follow it inside ``<code>`` and becomes the argument ``code``. The arguments may
    also be that object as a string of JSON; a fence around the call (three backticks) and a comma
    behind a last value are passed over. Replies are messages of the user in the chat template.

    Example::

        parse('<tool_call>\n{"name": "search", "arguments": {"query": "karo"}}\n</tool_call>')
            == ToolCall("search", {"query": "karo"})
    """

    stop: tuple[str, ...] = ("</tool_call>", "</answer>")

    _guard = TagGuard(("think", "tools", "tool_call", "tool_response", "code", "answer"))

    def __init__(
        self,
        tools: Mapping[str, ToolSignature],
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        documents: Layout = "web",
    ) -> None:
        """Set up.

        Args:
            tools: what can be called, by name.
            system_prompt: with or without ``{tools}``; None: the built-in one; empty: no such
                message, for a policy that knows its tools.
            prompt_template: the user's message, with ``{question}`` and perhaps ``{tools}``.
            documents: how they are listed.

        Raises:
            ConfigError: the template has no ``{question}``, or nothing has ``{tools}``.
        """
        self.tool_names = tuple(tools)
        system = HERMES_SYSTEM_PROMPT if system_prompt is None else system_prompt
        template = HERMES_PROMPT if prompt_template is None else prompt_template
        check_template(template)
        if system and _TOOLS_SLOT not in system + template:
            raise ConfigError(
                "neither system_prompt nor prompt_template has {tools}: the policy would not know "
                "what it can call; write {tools} where the signatures belong"
            )
        listed = "\n".join(signature.line for signature in tools.values())
        self._system = system.replace(_TOOLS_SLOT, listed)
        self._template = template.replace(_TOOLS_SLOT, listed)
        self._documents: Layout = documents

    def render(self, task: Task) -> Prompt:
        """A system message with the tools' signatures and a user message with the question."""
        user: Message = {"role": "user", "content": fill_template(self._template, task.question)}
        return [{"role": "system", "content": self._system}, user] if self._system else [user]

    def parse(self, text: str) -> Action:
        """The action whose closing tag comes first, or what is wrong with the turn."""
        call, answer = first_element(text, "tool_call"), first_element(text, "answer")
        if answer is not None and ends_inside_call(text[: answer[0]]):
            answer = None
        if call is not None and (answer is None or call[0] < answer[0]):
            return self._parse_call(call[1])
        if answer is not None:
            return FinalAnswer(answer[1])
        return InvalidAction(_NO_ACTION, unfinished=ends_inside_call(text))

    def observation(self, call: ToolCall, result: ToolResult) -> Observation:
        """The documents of a result, or its text where it has none, as a user's message.

        What was asked for by ``url`` are pages, which the layout ``web`` shows with their goal.
        """
        if self._documents == "web" and "url" in call.arguments:
            goal = call.arguments.get("goal")
            listing = lay_out_pages(result, goal.strip() if isinstance(goal, str) else "")
        else:
            listing = lay_out(result, self._documents)
        return Observation(
            opening=f"<tool_response>\n{listing.before}",
            pieces=tuple(self._guard.disarm(piece) for piece in listing.pieces),
            closing=f"{listing.after}\n</tool_response>",
            documents=listing.documents,
            role="user",
        )

    def correction(self, invalid: InvalidAction) -> Observation:
        """What was wrong, as a user's message."""
        reason = (invalid.reason,)
        return Observation("<tool_response>\n", reason, "\n</tool_response>", role="user")

    def _parse_call(self, content: str) -> Action:
        fence = _FENCED.match(content)
        try:
            value, rest = _json_and_rest(content[fence.end() :] if fence else content)
        except (ValueError, RecursionError):
            return InvalidAction(_NOT_JSON)
        before, _, code = rest.partition("<code>")
        if before.strip() not in ("", "```" if fence else ""):
            return InvalidAction(_NOT_JSON)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return InvalidAction("A tool call needs the key name, which names a tool.")
        name, arguments = value["name"], _arguments(value)
        if name not in self.tool_names:
            return InvalidAction(
                f"There is no tool {self._guard.disarm(name)[:80]!r}. The tools are: "
                f"{', '.join(self.tool_names)}."
            )
        if arguments is None:
            return InvalidAction("The key arguments of a tool call must hold a JSON object.")
        if code:
            within, closed, _ = code.rpartition("</code>")
            arguments = {**arguments, "code": (within if closed else code).strip("\n")}
        return ToolCall(name, arguments)


def _json_and_rest(text: str) -> tuple[Any, str]:
    """The JSON value that a text begins with, and what is behind it.

    Raises:
        ValueError, RecursionError: there is none.
    """
    try:
        value, end = _JSON.raw_decode(text)
    except ValueError:
        text = _LAST_COMMA.sub(r"\g<kept>", text)
        value, end = _JSON.raw_decode(text)
    return value, text[end:]


def _arguments(call: Mapping[str, Any]) -> dict[str, Any] | None:
    """Those of a call, also where they are written as a string of JSON; None: no object."""
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            value, rest = _json_and_rest(arguments.strip())
        except (ValueError, RecursionError):
            return None
        arguments = None if rest else value
    return arguments if isinstance(arguments, dict) else None
