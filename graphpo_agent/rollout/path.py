"""What both modes do with a path: write its prompt, open it, measure the room it has left."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.protocols import PromptOpener, Tokenizer
from graphpo_agent.types import Completion, Context, PathState, Prefix, Prompt, SampleRequest, Task

__all__ = [
    "behind_prefix",
    "check_template",
    "fill_template",
    "limited",
    "open_path",
    "out_of_budget",
    "room_left",
    "text_behind",
]

_NEAR = 4
"""Tokens that are decoded again with those behind them, which then read as inside a text."""

_SLOT = "{question}"


def check_template(template: str) -> str:
    """Return a prompt template unchanged.

    Raises:
        ConfigError: it has no place for the question.
    """
    if _SLOT not in template:
        raise ConfigError(
            f"prompt_template {template[:40]!r} has no {_SLOT}: every task would get the same "
            f"prompt; write {_SLOT} where the question belongs"
        )
    return template


def fill_template(template: str, question: str) -> str:
    r"""The template with every ``{question}`` replaced; all other braces stay as they are.

    Example::

        fill_template(r"{question} Answer in \boxed{}.", "1 + 1?") == r"1 + 1? Answer in \boxed{}."
    """
    return template.replace(_SLOT, question)


def open_path(policy: PromptOpener, task: Task, prompt: Prompt, memory: Any) -> PathState:
    """The root of a graph: the prompt of a task, nothing generated yet.

    Raises:
        DataError: the prompt has no tokens, or leaves no room for a single one in the policy's
            context.
    """
    token_ids = policy.tokenizer.render(prompt)
    if not len(token_ids):
        raise DataError(
            f"task {task.id!r}: the tokenizer makes no tokens of its prompt; remove the task or "
            "use a model whose tokenizer knows its text"
        )
    if len(token_ids) >= policy.max_context_tokens:
        raise DataError(
            f"task {task.id!r}: its prompt has {len(token_ids)} tokens and leaves no room in the "
            f"policy's context of {policy.max_context_tokens}; remove the task, raise "
            "engine.max_context_tokens where that is set, or use a model with a longer context"
        )
    return PathState(
        task=task,
        context=policy.open(token_ids),
        depth=0,
        prompt_ids=tuple(token_ids),
        response="",
        answer=None,
        memory=memory,
    )


def behind_prefix(
    policy: PromptOpener, root: PathState, prefix: Prefix, max_response_tokens: int
) -> PathState:
    """The root of a graph that goes on from an earlier answer; the mode fills in the rest.

    Raises:
        DataError: nothing fits behind the prefix any more.
    """
    context = policy.extend(root.context, prefix.token_ids)
    if room_left(root, context, max_response_tokens, policy.max_context_tokens) < 1:
        raise DataError(
            f"task {root.task.id!r}: {len(prefix.token_ids)} tokens of an earlier answer leave no "
            f"room in a response of {max_response_tokens}; set method.pool.max_prefix_tokens"
        )
    return replace(root, context=context)


def text_behind(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], start: int) -> str:
    """The text of tokens, of which that of the first ``start`` is known.

    Only the last of these are decoded again, together with the new ones, so that the text of a
    path takes no longer to make the longer the path is. Where they alone do not read as they do
    in ``text`` (its last character is incomplete, say), everything is decoded.

    Args:
        tokenizer: decodes.
        text: ``tokenizer.decode(token_ids[:start])``.
        token_ids: of the whole path.
        start: how many of them ``text`` is of.

    Returns:
        ``tokenizer.decode(token_ids)``.
    """
    near = token_ids[max(0, start - _NEAR) : start]
    known = tokenizer.decode(near)
    if known and text.endswith(known) and not known.endswith("\ufffd"):
        joined = tokenizer.decode((*near, *token_ids[start:]))
        if joined.startswith(known):
            return text + joined[len(known) :]
    return tokenizer.decode(token_ids)


def room_left(
    path: PathState, context: Context, max_response_tokens: int, max_context_tokens: int
) -> int:
    """Tokens that may still follow ``context``, which ``path`` or a continuation of it has reached.

    The tighter of the limit on the tokens after the prompt and the limit of the whole context.
    """
    response_tokens = context.num_tokens - path.prompt_tokens
    return min(max_response_tokens - response_tokens, max_context_tokens - context.num_tokens)


def limited(request: SampleRequest, limit: int | None) -> SampleRequest:
    """The request with no more than ``limit`` tokens to sample; None: as it is."""
    if limit is None or limit >= request.max_new_tokens:
        return request
    return replace(request, max_new_tokens=limit)


def out_of_budget(completion: Completion, limit: int | None, full: int) -> bool:
    """Whether ``limit`` ended a completion that might have had ``full`` tokens."""
    if limit is None or completion.finish_reason != "length":
        return False
    return limit < full and len(completion.token_ids) == limit
