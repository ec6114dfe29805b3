"""``graphpo grade``: a reward or grader on the transcripts of a file, as a dry run.

A row is ``{"id", "response": str, "gold": str|[str], "prompt": str}``, ``prompt`` perhaps absent
and other fields ignored; ``judge`` wants ``question``, too, and ``asearcher`` takes ``aug_answers``
(a list of strings), in the row or its ``metadata``; where ``unanswerable`` is true there, ``gold``
may be empty. Of the rows of ``graphpo eval``, which have ``turns``, all but the rules on whole
transcripts take the ``answer`` that was marked, ``asearcher`` the ``turns``, and one whose reward
is null for a tool's outage has no score. It becomes
``{"id", "score": float|null, "extracted": str|null, "status", "detail": {}}``.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from graphpo_agent.data.jsonl import read_rows, write_rows
from graphpo_agent.errors import ConfigError, DataError, ToolError
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.parallel import in_threads
from graphpo_agent.outputs import check_apart, check_parent, check_place
from graphpo_agent.rewards.asearcher import ASearcherReward
from graphpo_agent.rewards.gaia import gaia_equals
from graphpo_agent.rewards.judge import Judge
from graphpo_agent.rewards.math import MathReward, stated
from graphpo_agent.rewards.qa import answer_contains, answer_equals, answer_f1
from graphpo_agent.rewards.transcripts import (
    FormatScores,
    TranscriptScore,
    search_r1_em,
    search_r1_em_format,
    tree_grpo_f1,
    verl_search_r1_em,
)
from graphpo_agent.types import Outcome, Task

__all__ = [
    "KINDS",
    "Grade",
    "GradeOptions",
    "GradeStatus",
    "GradeSummary",
    "Transcript",
    "grade_file",
    "grader",
]

GradeStatus = Literal["ok", "no_answer", "timeout", "error", "unjudged", "outage"]


@dataclass(frozen=True, slots=True)
class Transcript:
    """One row to be graded.

    Example::

        Transcript("a", prompt="", response="<answer>Paris</answer>", gold=("Paris",))
    """

    id: str | int
    prompt: str
    """Empty where the row has none."""
    response: str
    gold: str | tuple[str, ...]
    """As the row has it: the originals treat a string and a list differently."""

    question: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Those of the task that the row has: ``aug_answers``, ``unanswerable``."""

    marked: tuple[str | None, ...] = ()
    """What ``graphpo eval`` took for the answer; empty in other rows."""

    turns: tuple[str, ...] = ()
    """The policy's own text of each turn, where the row has them."""

    left_out: bool = False
    """An evaluation did not count it, for an outage."""

    @property
    def golds(self) -> tuple[str, ...]:
        """All accepted answers."""
        return (self.gold,) if isinstance(self.gold, str) else self.gold


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader says of a transcript; ``score`` None: it could not say."""

    score: float | None
    extracted: str | None
    status: GradeStatus
    detail: Mapping[str, Any]


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


@dataclass(frozen=True, slots=True)
class GradeOptions:
    """The flags of ``graphpo grade``, by name."""

    bare: bool = False
    structure_score: float = 0.0
    final_format_score: float = 0.0
    retrieval_score: float = 0.0
    format_score: float = 0.0
    judge_url: str | None = None
    judge_model: str | None = None
    judge_key_env: str | None = None


Grader = Callable[[Transcript], Grade]
_Answers = Callable[[str, tuple[str, ...]], float]
_Rule = Callable[[str, str | tuple[str, ...], FormatScores], TranscriptScore]

_ANSWERS: Mapping[str, _Answers] = {
    "em": answer_equals,
    "subem": answer_contains,
    "f1": answer_f1,
    "gaia": lambda answer, golds: any(gaia_equals(answer, gold) for gold in golds),
}
_RULES: Mapping[str, _Rule] = {
    "search_r1_em": search_r1_em,
    "search_r1_em_format": search_r1_em_format,
    "tree_grpo_f1": tree_grpo_f1,
    "verl_search_r1_em": verl_search_r1_em,
}
_FORMAT_OPTIONS = frozenset(
    {"structure_score", "final_format_score", "retrieval_score", "format_score"}
)
_TAKES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("em", "subem", "f1"), frozenset({"bare"})),
    **dict.fromkeys(_RULES, _FORMAT_OPTIONS),
    "asearcher": frozenset(),
    "judge": frozenset({"bare", "judge_url", "judge_model", "judge_key_env"}),
    "gaia": frozenset({"bare"}),
    "math": frozenset({"bare"}),
}
"""The options of every kind."""
KINDS = tuple(_TAKES)
"""Every KIND of ``graphpo grade``."""

_METADATA = ("aug_answers", "unanswerable")
_ANSWER_TAG = re.compile("(</?answer>)")
_INFORMATION = re.compile("<information>.*?</information>", re.DOTALL)
_AT_ONCE = 16
"""Transcripts in memory, and requests to a judge."""


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
    transcripts = _transcripts(Path(path), asked=kind == "judge")
    tally = _Tally()
    write_rows(target, _rows(transcripts, grade, _AT_ONCE if kind == "judge" else 1, tally))
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


def grader(kind: str, options: GradeOptions) -> Grader:
    """The grader of a name, as the flags set it.

    Raises:
        ConfigError: an option that the kind does not take or misses, or a score that is not finite.
    """
    defaults = asdict(GradeOptions())
    for name, value in asdict(options).items():
        flag = f"--{name.replace('_', '-')}"
        if value != defaults[name] and name not in _TAKES[kind]:
            raise ConfigError(f"{flag} is not a setting of {kind}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{flag} must be a finite number, found {value}")
    if kind in _ANSWERS:
        compare = _ANSWERS[kind]
        return lambda transcript: _by_answer(transcript, compare, options.bare)
    if kind == "asearcher":
        return _by_asearcher
    if kind == "judge":
        judge = _judge(options)
        return lambda transcript: _by_judge(transcript, judge, options.bare)
    if kind == "math":
        reward = MathReward()
        return lambda transcript: _by_math(transcript, reward, options.bare)
    rule, scores = _RULES[kind], _format_scores(options)
    return lambda transcript: _by_rule(transcript, rule, scores)


def _format_scores(options: GradeOptions) -> FormatScores:
    return FormatScores(
        structure=options.structure_score,
        final_format=options.final_format_score,
        retrieval=options.retrieval_score,
        format=options.format_score,
    )


def _by_answer(transcript: Transcript, compare: _Answers, bare: bool) -> Grade:
    answer = _given_answer(transcript, bare)
    if answer is None:
        return Grade(0.0, None, "no_answer", {})
    scores = [float(compare(answer, (gold,))) for gold in transcript.golds]
    best = max(scores, default=0.0)
    nearest = transcript.golds[scores.index(best)] if best > 0 else None
    return Grade(best, answer, "ok", {"gold": nearest})


def _judge(options: GradeOptions) -> Judge:
    if options.judge_url is None or options.judge_model is None:
        raise ConfigError("judge needs --judge-url and --judge-model")
    chat = OpenAIChat(options.judge_url, options.judge_model, api_key_env=options.judge_key_env)
    return Judge(chat)


def _by_asearcher(transcript: Transcript) -> Grade:
    """ASearcher's reward with F1; turns are the row's, or what stands between its information."""
    (answer,) = transcript.marked or (_last_answer(transcript.response),)
    turns = transcript.turns or tuple(_INFORMATION.split(transcript.response))
    task = Task(str(transcript.id), "", transcript.golds, transcript.metadata)
    score = ASearcherReward()(task, Outcome(transcript.response, answer, turns))
    return Grade(score, answer, "no_answer" if answer is None else "ok", {"turns": len(turns)})


def _by_judge(transcript: Transcript, judge: Judge, bare: bool) -> Grade:
    answer = _given_answer(transcript, bare)
    if answer is None:
        return Grade(0.0, None, "no_answer", {})
    try:
        verdict = judge.verdict(transcript.question or "", transcript.golds, answer)
    except CallFailed as failure:
        return Grade(None, answer, "error", {"reason": str(failure)})
    if verdict == "unjudged":
        return Grade(None, answer, "unjudged", {"verdict": verdict})
    return Grade(float(verdict == "correct"), answer, "ok", {"verdict": verdict})


def _by_math(transcript: Transcript, reward: MathReward, bare: bool) -> Grade:
    (marked,) = transcript.marked or (_last_answer(transcript.response),)
    answer = transcript.response if bare else marked
    verdict = reward.verdict(stated(Outcome(transcript.response, answer)), transcript.golds)
    named: dict[str, GradeStatus] = {"unanswered": "no_answer", "timeout": "timeout"}
    status = named.get(verdict.status, "ok")
    return Grade(float(verdict.status == "correct"), verdict.answer, status, {})


def _given_answer(transcript: Transcript, bare: bool) -> str | None:
    """A bare response, what an evaluation took for the answer of turns, or the last element."""
    if bare:
        return transcript.response.strip()
    if transcript.turns and transcript.marked:
        return transcript.marked[0]
    return _last_answer(transcript.response)


def _last_answer(response: str) -> str | None:
    """The stripped content of the last complete answer element; None without one.

    An element is complete where no other answer tag stands between its two.
    """
    parts = _ANSWER_TAG.split(response)
    for i in range(len(parts) - 2, 1, -2):
        if parts[i - 2] == "<answer>" and parts[i] == "</answer>":
            return parts[i - 1].strip()
    return None


def _by_rule(transcript: Transcript, rule: _Rule, scores: FormatScores) -> Grade:
    judged = rule(transcript.prompt + transcript.response, transcript.gold, scores)
    status = "no_answer" if judged.extracted is None else "ok"
    return Grade(judged.score, judged.extracted, status, judged.detail)


def _transcripts(path: Path, asked: bool) -> Iterator[Transcript]:
    empty = True
    for place, row in read_rows(path):
        empty = False
        if asked and "question" not in row:
            raise DataError(f"{place}: field 'question' is missing")
        yield _transcript(place, row)
    if empty:
        raise DataError(f"{path}: holds no transcripts")


def _transcript(place: str, row: Mapping[str, Any]) -> Transcript:
    identifier = _field(place, row, "id", "a string or whole number", str, int)
    gold = _field(place, row, "gold", "a string or a list of strings", str, list)
    about = _field(place, {"metadata": {}, **row}, "metadata", "an object", dict) | row
    metadata = {name: about[name] for name in _METADATA if about.get(name) is not None}
    if not gold and isinstance(gold, list) and not metadata.get("unanswerable"):
        raise DataError(f"{place}: field 'gold' must not be empty")
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
