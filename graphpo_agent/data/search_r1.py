"""Search-R1's data: its training parquet, verl's flavour of it, and plain question files.

Training rows have ``data_source``, ``prompt`` (messages), ``reward_model.ground_truth.target`` (a
list or one string) and ``extra_info``; plain rows ``question`` and ``golden_answers``, as in
FlashRAG. The question is the field ``question``, else ``extra_info.question``, else what follows
the last ``Question:`` of the prompt. verl's rows have ``searchR1_`` before the ``data_source``.
"""

from collections.abc import Mapping
from typing import Any

from graphpo_agent.data.source import (
    SourceRow,
    answer_field,
    first_of,
    mapping_field,
    text_field,
    text_of,
)
from graphpo_agent.data.verl_parquet import VERL_PREFIX
from graphpo_agent.errors import DataError
from graphpo_agent.types import Message

__all__ = ["find_question", "read_row"]

_QUESTION = "Question:"


def read_row(place: str, row: Mapping[str, Any]) -> SourceRow:
    """One row of a parquet file or of JSON lines.

    Example: ``{"question": "capital of France?", "golden_answers": ["Paris"], "id": "test_3"}``
    gives ``SourceRow("capital of France?", ("Paris",), source_id="test_3")``.

    Raises:
        DataError: with place and field, for a row that cannot be used.
    """
    source = text_field(place, row, "data_source") if "data_source" in row else None
    return SourceRow(
        question=find_question(place, row),
        answers=_answers(place, row),
        source=None if source is None else source.removeprefix(VERL_PREFIX),
        source_id=first_of(row, "id"),
        prompt=_messages(place, row.get("prompt")),
        prompt_has_tools=source is not None and source.startswith(VERL_PREFIX),
    )


def find_question(place: str, row: Mapping[str, Any]) -> str:
    """The question of a row, wherever its flavour has it.

    Raises:
        DataError: there is none.
    """
    if "question" in row:
        return text_field(place, row, "question")
    extra = mapping_field(place, row, "extra_info") if "extra_info" in row else {}
    if extra.get("question") is not None:  # where some rows have it, parquet gives all the field
        return text_of(place, "extra_info.question", extra["question"])
    if "prompt" not in row:
        raise DataError(f"{place}: field 'question' is missing, and so is 'prompt'")
    return _asked_in(place, row["prompt"])


def _asked_in(place: str, prompt: Any) -> str:
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if not isinstance(last, dict) or "content" not in last:
        raise DataError(f"{place}: field 'prompt' must be a list of messages, found {prompt!r:.40}")
    content = text_of(place, "prompt[-1].content", last["content"])
    _, marker, question = content.rpartition(_QUESTION)
    if not marker:
        raise DataError(f"{place}: field 'prompt' has no '{_QUESTION}', and there is no 'question'")
    return text_of(place, f"prompt[-1].content after '{_QUESTION}'", question)


def _messages(place: str, prompt: Any) -> tuple[Message, ...]:
    """The prompt as it is; a field of that name that holds no messages is somebody's own."""
    if not isinstance(prompt, list):
        return ()
    messages: list[Message] = []
    for number, message in enumerate(prompt):
        fields = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{place}: field 'prompt[{number}]' must have the texts role and content"
            )
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _answers(place: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    if "reward_model" not in row:
        return answer_field(place, row, "golden_answers")
    reward_model = mapping_field(place, row, "reward_model")
    inside = f"{place}: in 'reward_model'"
    truth = mapping_field(inside, reward_model, "ground_truth")
    return answer_field(f"{inside}.ground_truth", truth, "target")
