"""ASearcher's data: the Base and the LRM training file, and the test sets.

Base rows have ``question``, ``answer`` (a list), ``aug_answer`` (a list, perhaps empty),
``source`` and ``qid``; LRM rows ``question``, ``answer`` (a string), ``id``, ``idx`` and perhaps
``source``; test rows ``question`` and ``answer`` or ``gt``.
"""

from collections.abc import Mapping
from typing import Any

from graphpo_agent.data.source import SourceRow, answer_field, first_of, text_field

__all__ = ["read_row"]

_UNANSWERABLE = "compose_chain_qa_invalid"
_ID_FIELDS = ("qid", "query_id", "id", "idx")


def read_row(place: str, row: Mapping[str, Any]) -> SourceRow:
    """One row of any of these files.

    Example: ``{"question": "…?", "answer": ["1987"], "aug_answer": ["in 1987"], "source":
    "compose_chain_qa", "qid": 5}`` gives ``SourceRow("…?", ("1987",), "compose_chain_qa", "5",
    ("in 1987",))``. Rows of the source ``compose_chain_qa_invalid`` are unanswerable.

    Raises:
        DataError: with place and field, for a row that cannot be used.
    """
    source = text_field(place, row, "source") if "source" in row else None
    gold = "gt" if "gt" in row and "answer" not in row else "answer"
    return SourceRow(
        question=text_field(place, row, "question"),
        answers=answer_field(place, row, gold),
        source=source,
        source_id=first_of(row, *_ID_FIELDS),
        aug_answers=answer_field(place, row, "aug_answer") if "aug_answer" in row else (),
        unanswerable=source is not None and source.rpartition(":")[2] == _UNANSWERABLE,
    )
