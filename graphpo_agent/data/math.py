r"""Mathematics: DAPO-Math-17k, MATH, AIME, GSM8K and files with the same fields.

The question is in ``problem``, ``Problem``, ``question``, ``Question``,
``extra_info.raw_problem``, ``extra_info.question`` or ``prompt``, a text or messages; instructions
that stand around it there, as in DAPO's files, or behind it, as in verl's, are left out.

The answer is in ``answer``, ``Answer``, ``expected_answer``, ``final_answer``,
``reward_model.ground_truth`` or ``solution``, the first that is not empty; of a whole solution it
is the content of the last ``\boxed{}``, or what follows ``####`` in its last line.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphpo_agent.data.benchmarks import decrypted
from graphpo_agent.data.source import (
    SourceRow,
    answer_field,
    first_of,
    mapping_field,
    text_field,
    text_of,
)
from graphpo_agent.errors import DataError
from graphpo_agent.math_notation import as_number, plain
from graphpo_agent.math_text import last_boxed

__all__ = ["find_question", "read_row"]

_QUESTIONS = ("problem", "Problem", "question", "Question")
_RAW = ("raw_problem", "question")
_ANSWERS = ("answer", "Answer", "expected_answer", "final_answer")
_IDS = ("unique_id", "id", "ID")
_ANSWER_CHARACTERS = 64
"""Of a solution without a mark; a longer one is a proof."""
_HASHES = re.compile(r"(?<!#)####(?!#)\s*(.*)")
_INSTRUCTION = "Answer:"
"""Paragraphs before and behind a question that both say this are about its form."""
_ASKED_BEHIND = re.compile(
    r"(.*\S)\s+(?:Let['’]s|Please|Remember to|Put|Output|Return|Give|Provide|Present|Write)\b"
    r"[^.?!\n]{0,99}\b(?:answer|response)\b[^.?!\n]{0,40}"
    r"(?:####|\\boxed(?:\{\W*(?i:(?:your )?(?:final )?answer)?\W*\})?)[\"'”’`$]*[.。]?",
    re.DOTALL,
)
"""A question, and one sentence about the form of its answer that ends with an empty mark."""


def read_row(place: str, row: Mapping[str, Any]) -> SourceRow:
    """One row of any of these files.

    Example: ``{"problem": "2 + 2?", "answer": "4", "unique_id": "test/1"}`` gives
    ``SourceRow("2 + 2?", ("4",), source_id="test/1")``.

    Raises:
        DataError: with place and field, for a row that cannot be used.
    """
    if decrypted(place, row) is not row:
        raise DataError(
            f"{place}: the question is encrypted: prepare the file as 'benchmark', not as 'math'"
        )
    extra = _inside(place, row, "extra_info")
    level = first_of(row, "level")
    return SourceRow(
        question=find_question(place, row),
        answers=_answers(place, row),
        source=text_field(place, row, "data_source") if "data_source" in row else None,
        source_id=first_of(row, *_IDS) or first_of(extra, "index"),
        metadata={} if level is None else {"level": level},
    )


def find_question(place: str, row: Mapping[str, Any]) -> str:
    """The bare question of a row.

    Raises:
        DataError: there is none.
    """
    for name in _QUESTIONS:
        if name in row:
            return text_field(place, row, name)
    extra = _inside(place, row, "extra_info")
    for name in _RAW:
        if extra.get(name) is not None:
            return text_of(place, f"extra_info.{name}", extra[name])
    if "prompt" not in row:
        raise DataError(f"{place}: field 'problem' is missing, and so are 'question' and 'prompt'")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return _bare(text_of(place, "prompt", prompt))
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    if not isinstance(last, dict) or "content" not in last:
        raise DataError(
            f"{place}: field 'prompt' must be a text or a list of messages, found {prompt!r:.40}"
        )
    return _bare(text_of(place, "prompt[-1].content", last["content"]))


def _bare(text: str) -> str:
    """Without the paragraphs around a question, or the sentence behind it, about its form."""
    asked = _ASKED_BEHIND.fullmatch(text)
    if asked is not None:
        return asked[1]
    paragraphs = text.split("\n\n")
    wrapped = len(paragraphs) > 2 and all(_INSTRUCTION in paragraphs[end] for end in (0, -1))
    return "\n\n".join(paragraphs[1:-1]).strip() if wrapped else text


def _answers(place: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of the first field that has any; none where all fields are empty."""
    fields = _answers_by_field(place, row)
    first = next(fields, None)
    if first is None:
        raise DataError(
            f"{place}: field 'answer' is missing, and so are 'reward_model.ground_truth' and "
            "'solution'"
        )
    return first or next(filter(None, fields), ())


def _answers_by_field(place: str, row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Those of each field that the row has; no field is read before it is asked for."""
    for name in _ANSWERS:
        if name in row:
            yield _finals(answer_field(place, row, name))
    truth = _inside(place, row, "reward_model")
    if "ground_truth" in truth:
        yield answer_field(f"{place}: in 'reward_model'", truth, "ground_truth")
    if "solution" in row:
        yield _finals(filter(_states, answer_field(place, row, "solution")))


def _states(solution: str) -> bool:
    """Whether a solution says which of it is the answer, or is the answer itself."""
    short = len(solution) <= _ANSWER_CHARACTERS and "\n" not in solution.strip()
    return short or _marked(solution) is not None


def _finals(answers: Iterable[str]) -> tuple[str, ...]:
    """What solutions end with; answers by themselves as they are."""
    marked = ((answer, _marked(answer)) for answer in answers)
    return tuple(filter(None, (answer if said is None else said for answer, said in marked)))


def _marked(text: str) -> str | None:
    """What a text marks as its answer, empty where its marks are; None where it has none."""
    marks = [mark for mark in (last_boxed(text), _behind_hashes(text)) if mark is not None]
    return next(filter(None, marks), "") if marks else None


def _behind_hashes(text: str) -> str | None:
    """What the last line says behind ``####``; a line before it counts if it says a number."""
    lines = list(filter(None, map(str.strip, text.splitlines())))
    for distance, line in enumerate(reversed(lines[-2:])):
        found = _HASHES.search(line)
        if found and (distance == 0 or as_number(plain(found[1])) is not None):
            return found[1]
    return None


def _inside(place: str, row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return mapping_field(place, row, name) if name in row else {}
