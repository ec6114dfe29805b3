"""``graphpo grade``: a reward or grader on the transcripts of a file, as a dry run.

A row is ``{"id", "response": str, "gold": str|[str], "prompt": str}``, ``prompt`` perhaps absent
and other fields ignored. What asks a judge wants ``question``, too; ``asearcher`` takes
``aug_answers`` (a list of strings), in the row or its ``metadata``, and where ``unanswerable`` is
true there, ``gold`` may be empty; ``code`` wants ``tests`` there, as ``data prepare livecodebench``
writes them, and no ``gold``.

Of the rows of ``graphpo eval``, which have ``turns``, all but the rules on whole transcripts take
the ``answer`` that was marked, ``asearcher`` the ``turns``, and one whose reward is null for a
tool's outage has no score.

A row becomes ``{"id", "score": float|null, "extracted": str|null, "status", "detail": {}}``.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from graphpo_agent.data.jsonl import read_rows, write_rows
from graphpo_agent.errors import DataError, ToolError
from graphpo_agent.evals.graders import (
    JUDGED,
    Grade,
    GradeOptions,
    Grader,
    GradeStatus,
    Transcript,
    grader,
)
from graphpo_agent.net.parallel import in_threads
from graphpo_agent.outputs import check_apart, check_parent, check_place
from graphpo_agent.program_tests import ProgramTests

__all__ = ["GradeSummary", "grade_file"]


@dataclass(frozen=True, slots=True)
class GradeSummary:
    """All grades of a file in short.

    Example: ``GradeSummary(mean=0.5, scored=2, statuses={"ok": 2, "unjudged": 1})``

    Attributes:
        mean: score over the transcripts that have one; NaN where none has.
        scored: how many those are.
        statuses: transcripts by status, those that occur.
    """

    mean: float
    scored: int
    statuses: Mapping[GradeStatus, int]


_METADATA = ("aug_answers", "unanswerable")
_AT_ONCE = 16
"""Transcripts in memory, requests to a judge, programs that wait for their turn."""


def grade_file(kind: str, path: str, out: str, options: GradeOptions) -> GradeSummary:
    """Grade a file of transcripts and write one JSON line per row; whole or not at all.

    Raises:
        ConfigError: an option that the kind does not take or misses, or a score that is not finite.
        DataError: the input cannot be read, a row is malformed (file, line and field in the
            message), there is none, or the output cannot be written.
        ToolError: the judge refuses every request (wrong key, used-up quota), or could be asked
            about none of the transcripts.
    """
    grade = grader(kind, options)
    target = Path(out)
    check_place(target)
    check_parent(target, DataError)
    check_apart([target], [Path(path)])
    transcripts = _transcripts(kind, Path(path))
    tally = _Tally()
    write_rows(
        target, _rows(transcripts, grade, _AT_ONCE if kind in JUDGED | {"code"} else 1, tally)
    )
    return tally.summary()


class _Tally:
    """What the grades so far come to."""

    def __init__(self) -> None:
        self._scores: list[float] = []
        self._statuses: Counter[GradeStatus] = Counter()

    def add(self, grade: Grade) -> None:
        self._statuses[grade.status] += 1
        if grade.score is not None:
            self._scores.append(grade.score)

    @property
    def none_asked(self) -> bool:
        """Whether a judge was asked, and never once answered."""
        answered = self._statuses["ok"] + self._statuses["unjudged"]
        return self._statuses["error"] > 0 and not answered

    def summary(self) -> GradeSummary:
        mean = math.fsum(self._scores) / len(self._scores) if self._scores else math.nan
        return GradeSummary(mean, len(self._scores), dict(self._statuses))


def _rows(
    transcripts: Iterator[Transcript], grade: Grader, threads: int, tally: _Tally
) -> Iterator[dict[str, Any]]:
    def graded(one: Transcript) -> Grade:
        return Grade(None, None, "outage", {}) if one.left_out else grade(one)

    while some := list(islice(transcripts, _AT_ONCE)):
        for one, found in zip(some, in_threads(graded, some, threads), strict=True):
            tally.add(found)
            yield _row(one.id, found)
    if tally.none_asked:
        raise ToolError("the judge could be asked about none of the transcripts: see that it runs")


def _transcripts(kind: str, path: Path) -> Iterator[Transcript]:
    empty = True
    for place, row in read_rows(path):
        empty = False
        if kind in JUDGED and "question" not in row:
            raise DataError(f"{place}: field 'question' is missing")
        if kind == "code":
            transcript = _transcript(place, {"gold": [], **row})
            yield replace(transcript, tests=_tests(place, row))
            continue
        transcript = _transcript(place, row)
        if transcript.gold == () and not transcript.metadata.get("unanswerable"):
            raise DataError(f"{place}: field 'gold' must not be empty")
        yield transcript
    if empty:
        raise DataError(f"{path}: holds no transcripts")


def _transcript(place: str, row: Mapping[str, Any]) -> Transcript:
    identifier = _field(place, row, "id", "a string or whole number", str, int)
    gold = _field(place, row, "gold", "a string or a list of strings", str, list)
    about = _about(place, row)
    metadata = {name: about[name] for name in _METADATA if about.get(name) is not None}
    for one in gold if isinstance(gold, list) else ():
        if not isinstance(one, str):
            raise DataError(f"{place}: field 'gold' must hold strings, found {one!r:.40}")
    # Elsewhere an answer may be the one that is asked for.
    evaluated = "turns" in row and isinstance(row.get("answer", 0), str | None)
    return Transcript(
        id=identifier,
        prompt=_field(place, {"prompt": "", **row}, "prompt", "a string", str),
        response=_field(place, row, "response", "a string", str),
        gold=gold if isinstance(gold, str) else tuple(gold),
        question=_field(place, row, "question", "a string", str) if "question" in row else None,
        metadata=metadata,
        marked=(row["answer"],) if evaluated else (),
        turns=_turns(place, row),
        left_out=bool(row.get("outages")) and row.get("reward", 0.0) is None,
    )


def _about(place: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the row says of the task, in its ``metadata`` or beside it."""
    return _field(place, {"metadata": {}, **row}, "metadata", "an object", dict) | row


def _tests(place: str, row: Mapping[str, Any]) -> ProgramTests:
    packed = _about(place, row).get("tests")
    if packed is None:
        raise DataError(f"{place}: field 'metadata.tests' is missing")
    if not isinstance(packed, str):
        raise DataError(f"{place}: field 'metadata.tests' must be a string, found {packed!r:.40}")
    try:
        return ProgramTests.unpacked(packed)
    except DataError as error:
        raise DataError(f"{place}: field 'metadata.tests': {error}") from None


def _turns(place: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    turns = _field(place, {"turns": [], **row}, "turns", "a list of strings", list)
    if not all(isinstance(turn, str) for turn in turns):
        raise DataError(f"{place}: field 'turns' must be a list of strings")
    return tuple(turns)


def _field(place: str, row: Mapping[str, Any], name: str, wanted: str, *kinds: type) -> Any:
    if name not in row:
        raise DataError(f"{place}: field '{name}' is missing")
    value = row[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise DataError(f"{place}: field '{name}' must be {wanted}, found {value!r:.40}")
    return value


def _row(identifier: str | int, grade: Grade) -> dict[str, Any]:
    return {
        "id": identifier,
        "score": grade.score,
        "extracted": grade.extracted,
        "status": grade.status,
        "detail": dict(grade.detail),
    }
