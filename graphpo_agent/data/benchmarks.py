"""Evaluations of search agents: GAIA, WebWalkerQA, BrowseComp, xbench-DeepSearch, as published.

The question is in ``question``, ``Question``, ``problem``, ``query`` or ``prompt``, the answer in
``answer``, ``Answer``, ``Final answer`` or ``gt``; the level in ``Level``, ``level``,
``difficulty_level`` or ``Difficulty_Level``, also inside ``info`` or ``Info``. Rows of BrowseComp
and xbench are encrypted with the ``canary`` that stands in them, so that no crawler reads them by
chance; a task keeps its canary, so that whatever is published of it can be recognised.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from graphpo_agent.data.source import SourceRow, answer_field, first_of, mapping_field, text_field
from graphpo_agent.errors import DataError

__all__ = ["decrypted", "question_field", "read_row"]

_QUESTION_FIELDS = ("question", "Question", "problem", "query", "prompt")
_ANSWER_FIELDS = ("answer", "Answer", "Final answer", "gt")
_LEVEL_FIELDS = ("Level", "level", "difficulty_level", "Difficulty_Level")
_INFO_FIELDS = ("info", "Info")
_ID_FIELDS = ("task_id", "id", "ID")

_HIDDEN = "?"
"""GAIA's answer to a question of its test set."""
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_LONGEST_WORD = 40
"""Characters; a longer question in one piece is encrypted."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_row(place: str, row: Mapping[str, Any]) -> SourceRow:
    """One row of any of these files.

    Example: ``{"Question": "Who?", "Final answer": "Ada", "Level": "2", "task_id": "c61d"}`` gives
    ``SourceRow("Who?", ("Ada",), source_id="c61d", metadata={"level": "2"})``. A row whose question
    is about a file that comes with it is left out, as its ``left_out`` says.

    Raises:
        DataError: with place and field, for a row that cannot be used.
    """
    plain = decrypted(place, row)
    name = question_field(plain) or _QUESTION_FIELDS[0]
    answers = answer_field(place, plain, _first(plain, _ANSWER_FIELDS) or _ANSWER_FIELDS[0])
    info = _first(plain, _INFO_FIELDS)
    inside = mapping_field(place, plain, info) if info else {}
    canary = plain.get("canary")
    found = {
        "level": first_of({**inside, **plain}, *_LEVEL_FIELDS),
        "canary": canary if isinstance(canary, str) else None,
    }
    return SourceRow(
        question=text_field(place, plain, name),
        answers=tuple(answer for answer in answers if answer != _HIDDEN),
        source_id=first_of(plain, *_ID_FIELDS),
        left_out="comes with a file" if plain.get("file_name") else None,
        metadata={name: value for name, value in found.items() if value},
    )


def question_field(row: Mapping[str, Any]) -> str | None:
    """The name under which a row has its question; None where it has none."""
    return _first(row, _QUESTION_FIELDS)


def _first(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in row), None)


def decrypted(place: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with question and answer in plain text; one that is not encrypted as it is.

    BrowseComp hashes the canary (SHA-256), xbench takes it as it is; texts are XORed with the
    repeated key and written in base64, in one line or several.

    Raises:
        DataError: the question is encrypted in another way or without a canary, or the answer is
            not encrypted as the question is.
    """
    name = question_field(row)
    if name is None or not _is_base64(row[name]):
        return row
    canary = row.get("canary")
    if not isinstance(canary, str) or not canary:
        if len(row[name]) <= _LONGEST_WORD:
            return row
        raise DataError(
            f"{place}: field '{name}' is encrypted, and the row has no 'canary' to decrypt it "
            "with: add it, or give a decrypted copy"
        )
    for key in (hashlib.sha256(canary.encode()).digest(), canary.encode()):
        question = _plain(row[name], key)
        if question is not None:
            return {**row, **_answer(place, row, key), name: question}
    raise DataError(
        f"{place}: field '{name}' is encrypted, and not with the row's canary: "
        "give a decrypted copy"
    )


def _answer(place: str, row: Mapping[str, Any], key: bytes) -> dict[str, str]:
    """The answer of a row whose question is encrypted, by its field."""
    name = _first(row, _ANSWER_FIELDS)
    if name is None or not isinstance(row[name], str):
        return {}
    answer = _plain(row[name], key)
    if answer is None:
        raise DataError(
            f"{place}: field '{name}' is not encrypted with the row's canary, as its question is: "
            "give a decrypted copy"
        )
    return {name: answer}


def _is_base64(value: Any) -> bool:
    return isinstance(value, str) and bool(_BASE64.fullmatch(_in_one_line(value)))


def _in_one_line(text: str) -> str:
    """Spaces inside a line stay: they tell words from base64."""
    return "".join(line.strip() for line in text.splitlines())


def _plain(text: str, key: bytes) -> str | None:
    """None: the key is another one."""
    try:
        data = base64.b64decode(_in_one_line(text), validate=True)
        found = bytes(a ^ b for a, b in zip(data, cycle(key), strict=False)).decode()
    except ValueError:
        return None
    return None if _CONTROL.search(found) else found
