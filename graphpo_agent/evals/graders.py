"""The kinds of ``graphpo grade``: each a rule from a transcript to its grade."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from graphpo_agent.errors import ConfigError
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.program_tests import ProgramTests
from graphpo_agent.rewards.asearcher import ASearcherReward
from graphpo_agent.rewards.choice import chosen_letter
from graphpo_agent.rewards.code import CodeReward, last_program
from graphpo_agent.rewards.dapo_math import VerlVersion, dapo_answer, dapo_equal
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
    "JUDGED",
    "KINDS",
    "Grade",
    "GradeOptions",
    "GradeStatus",
    "Grader",
    "Transcript",
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

    tests: ProgramTests | None = None
    """What a program is run on."""

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
    verl_version: VerlVersion = "0.9.0"


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
_MARKS = r"[ \t*_>#]*+"
_FINAL_LINES: Mapping[str, re.Pattern[str] | None] = {
    "browsecomp": re.compile(rf"^{_MARKS}exact answer{_MARKS}[:：]{_MARKS}(\S.*)$", re.I | re.M),
    "webwalker": None,
    "xbench": re.compile(rf"最终答案{_MARKS}[:：]{_MARKS}(\S.*)$", re.M),
}
"""How the benchmarks that a judge decides ask for an answer; where no line is so, the judge is
shown the whole response."""
_CONFIDENCE = re.compile(
    rf"^{_MARKS}confidence{_MARKS}[:：]{_MARKS}(\d+(?:\.\d+)?)[ \t]*%", re.I | re.M
)
_JUDGE_OPTIONS = frozenset({"bare", "judge_url", "judge_model", "judge_key_env"})
_FORMAT_OPTIONS = frozenset(
    {"structure_score", "final_format_score", "retrieval_score", "format_score"}
)
_TAKES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("em", "subem", "f1"), frozenset({"bare"})),
    **dict.fromkeys(_RULES, _FORMAT_OPTIONS),
    "asearcher": frozenset(),
    **dict.fromkeys(("judge", *_FINAL_LINES), _JUDGE_OPTIONS),
    "gaia": frozenset({"bare"}),
    "math": frozenset({"bare"}),
    "math_dapo": frozenset({"verl_version"}),
    "gpqa": frozenset({"bare"}),
    "code": frozenset({"bare"}),
}
"""The options of every kind."""
KINDS = tuple(_TAKES)
"""Every KIND of ``graphpo grade``."""
JUDGED = frozenset(("judge", *_FINAL_LINES))
"""Those that ask a judge."""

_ANSWER_TAG = re.compile("(</?answer>)")
_INFORMATION = re.compile("<information>.*?</information>", re.DOTALL)


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
        judge = _judge(kind, options)
        return lambda transcript: _by_judge(
            transcript, judge, _given_answer(transcript, options.bare)
        )
    if kind in _FINAL_LINES:
        judge = _judge(kind, options)
        return lambda transcript: _by_benchmark(transcript, judge, kind, options.bare)
    if kind == "math":
        reward = MathReward()
        return lambda transcript: _by_math(transcript, reward, options.bare)
    if kind == "math_dapo":
        return lambda transcript: _by_dapo(transcript, options.verl_version)
    if kind == "gpqa":
        return lambda transcript: _by_choice(transcript, options.bare)
    if kind == "code":
        programs = CodeReward()
        return lambda transcript: _by_tests(transcript, programs, options.bare)
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


def _judge(kind: str, options: GradeOptions) -> Judge:
    if options.judge_url is None or options.judge_model is None:
        raise ConfigError(f"{kind} needs --judge-url and --judge-model")
    chat = OpenAIChat(options.judge_url, options.judge_model, api_key_env=options.judge_key_env)
    return Judge(chat)


def _by_asearcher(transcript: Transcript) -> Grade:
    """ASearcher's reward with F1; turns are the row's, or what stands between its information."""
    answer = _marked(transcript)
    turns = transcript.turns or tuple(_INFORMATION.split(transcript.response))
    task = Task(str(transcript.id), "", transcript.golds, transcript.metadata)
    score = ASearcherReward()(task, Outcome(transcript.response, answer, turns))
    return Grade(score, answer, "no_answer" if answer is None else "ok", {"turns": len(turns)})


def _by_benchmark(transcript: Transcript, judge: Judge, kind: str, bare: bool) -> Grade:
    """The judge's verdict of what a benchmark takes for the answer; xbench's equal one needs none.

    BrowseComp's ``detail`` has the confidence that the response states, in percent.
    """
    response = transcript.response.rpartition("</think>")[2].strip()
    answer, line = _given_answer(transcript, bare), _FINAL_LINES[kind]
    if answer is None and not (transcript.turns and transcript.marked):
        lines = [] if line is None else line.findall(response)
        answer = lines[-1].strip() if lines else response or None
    if kind == "xbench" and answer in transcript.golds:
        return Grade(1.0, answer, "ok", {"verdict": "equal"})
    grade = _by_judge(transcript, judge, answer)
    if kind != "browsecomp":
        return grade
    stated = _CONFIDENCE.findall(response)
    return replace(
        grade, detail={**grade.detail, "confidence": float(stated[-1]) if stated else None}
    )


def _by_judge(transcript: Transcript, judge: Judge, answer: str | None) -> Grade:
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
    answer = transcript.response if bare else _marked(transcript)
    verdict = reward.verdict(stated(Outcome(transcript.response, answer)), transcript.golds)
    named: dict[str, GradeStatus] = {"unanswered": "no_answer", "timeout": "timeout"}
    status = named.get(verdict.status, "ok")
    return Grade(float(verdict.status == "correct"), verdict.answer, status, {})


def _by_dapo(transcript: Transcript, version: VerlVersion) -> Grade:
    score = float(dapo_equal(transcript.response, transcript.golds, version))
    answer = dapo_answer(transcript.response, version)
    return Grade(score, answer, "no_answer" if answer is None else "ok", {})


def _by_choice(transcript: Transcript, bare: bool) -> Grade:
    letter = chosen_letter(_stated_text(transcript, bare))
    status = "no_answer" if letter is None else "ok"
    return Grade(float(letter in transcript.golds), letter, status, {})


def _by_tests(transcript: Transcript, reward: CodeReward, bare: bool) -> Grade:
    text = _stated_text(transcript, bare)
    assert transcript.tests is not None
    found = reward.status(f"```\n{text}\n```" if bare else text, transcript.tests)
    named: dict[str, GradeStatus] = {"no_program": "no_answer", "timeout": "timeout"}
    program = text if bare else last_program(text)
    return Grade(float(found == "passed"), program, named.get(found, "ok"), {"tests": found})


def _stated_text(transcript: Transcript, bare: bool) -> str:
    """Where to look: in a marked answer alone, else in all of the response."""
    marked = _marked(transcript)
    return transcript.response if bare or marked is None else marked


def _marked(transcript: Transcript) -> str | None:
    """What an evaluation took for the answer, or the last element of the response."""
    return transcript.marked[0] if transcript.marked else _last_answer(transcript.response)


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
