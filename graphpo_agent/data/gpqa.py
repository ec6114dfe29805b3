"""GPQA: a question with four choices becomes one whose answer is a letter.

The choices stand in an order that the question alone decides, so that a file is the same whoever
prepares it, and each letter is right about as often as any other.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from graphpo_agent.data.source import SourceRow, first_of, text_field

__all__ = ["read_row", "without_choices"]

_RIGHT = "Correct Answer"
_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_LETTERS = "ABCD"
_CHOICES = "\n\nA) "
"""What stands between a question and its first choice."""


def read_row(place: str, row: Mapping[str, Any]) -> SourceRow:
    """One row of a GPQA file.

    Example: ``{"Question": "How many?", "Correct Answer": "2", "Incorrect Answer 1": "1", …,
    "High-level domain": "Physics"}`` gives a question that ends with lines such as ``A) 1`` and
    ``B) 2``, the answer ``B``, and ``metadata={"level": "Physics"}``.

    Raises:
        DataError: with place and field, for a row that cannot be used.
    """
    question = text_field(place, row, "Question")
    right = text_field(place, row, _RIGHT)
    domain = row.get("High-level domain")
    choices = [right, *(text_field(place, row, name) for name in _WRONG)]
    choices.sort(key=lambda choice: hashlib.sha256(f"{question}\n{choice}".encode()).digest())
    lines = (f"{letter}) {choice}" for letter, choice in zip(_LETTERS, choices, strict=True))
    return SourceRow(
        question="\n".join((question, "", *lines)),
        answers=(_LETTERS[choices.index(right)],),
        source_id=first_of(row, "Record ID"),
        left_out="has its right choice twice" if choices.count(right) > 1 else None,
        metadata={"level": domain} if isinstance(domain, str) else {},
    )


def without_choices(question: str) -> str:
    r"""A question without the choices that ``read_row`` writes below it.

    Example: ``without_choices("How many?\n\nA) 1\nB) 2")`` is ``"How many?"``.
    """
    return question.partition(_CHOICES)[0]
