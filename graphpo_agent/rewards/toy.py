"""The verifiers of the toy worlds *reach* and *trace*, and the state keys of all toy worlds.

A *reach* or *trace* response is text, ``+3 = 10 ; *2 = 20 ; +3 = 23``: one operation and its result
a line, the lines divided by semicolons, nothing after the last result. The tasks are made by
``graphpo_agent.data.toy_reach`` and its neighbours.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from graphpo_agent.errors import DataError
from graphpo_agent.rewards.qa import normalize_answer
from graphpo_agent.types import Outcome, PathState, Task

__all__ = [
    "ReachProgress",
    "TraceProgress",
    "facts_key",
    "hops_key",
    "reach_key",
    "reach_progress",
    "reach_reward",
    "trace_key",
    "trace_progress",
    "trace_reward",
]

_LINE = re.compile(r"\s*([+\-*][0-9]{1,4})\s+=\s+([0-9]{1,4})\s*")


@dataclass(frozen=True, slots=True)
class ReachProgress:
    """Where a *reach* response has got to.

    Example: for a task that starts at 7, ``" +3 = 10 ; *2 = 20 ; +3"`` gives
    ``ReachProgress(number=20, legal=True, pending="+3")``.

    Attributes:
        number: the last stated result, or the start; None after a line that is not one.
        legal: every line so far has an offered operation, the right result and a number in range.
        pending: the unfinished last line; empty after a semicolon.
    """

    number: int | None
    legal: bool
    pending: str


@dataclass(frozen=True, slots=True)
class TraceProgress:
    """Where a *trace* response has got to.

    Example: for a task that starts at 7 with ``+1 *2 -2``, ``" +1 = 9 ; *2 = 18 ; -2"`` gives
    ``TraceProgress(lines=2, number=18, pending="-2")``: that 9 is wrong is not held against the
    lines behind it.

    Attributes:
        lines: how many are finished.
        number: the last stated result, or the start; None once a line was not the next operation
            of the task with a number in range.
        pending: the unfinished last line; empty after a semicolon.
    """

    lines: int
    number: int | None
    pending: str


def reach_progress(task: Task, response: str) -> ReachProgress:
    """Follow a response, finished or not, line by line.

    Raises:
        DataError: the task is not one of the *reach* world.
    """
    start, limit = _metadata(task, "start"), _metadata(task, "limit")
    operations = _metadata(task, "operations")
    *lines, pending = response.split(";")
    progress = ReachProgress(start, True, "")
    for line in lines:
        progress = _follow(progress, line, operations, limit)
    return ReachProgress(progress.number, progress.legal, pending.strip())


def reach_reward(task: Task, outcome: Outcome) -> float:
    """1 if every line is legal and right and the last result is the target, else 0.

    A response that ends with a semicolon, or in the middle of a line, has not answered: 0.

    Raises:
        DataError: the task is not one of the *reach* world.
    """
    last = _complete(task, reach_progress(task, outcome.response))
    return float(last == ReachProgress(_metadata(task, "target"), True, ""))


def reach_key(state: PathState) -> str:
    """The state key of a *reach* path: its number, whether all was legal, the unfinished line.

    Paths with equal keys can be continued alike, and answers with equal keys give the same number.
    An illegal path can no longer be rewarded, but its key still says what was written.

    Example: ``"20 legal"``; with an unfinished line ``"20 legal +3"``; with a last line that lacks
    only its semicolon, which an answer does, ``"23 legal ."``; after nonsense ``"None illegal"``.
    """
    progress = reach_progress(state.task, state.response)
    complete = _complete(state.task, progress)
    shown, end = (progress, progress.pending) if complete is None else (complete, ".")
    legality = "legal" if shown.legal else "illegal"
    return f"{shown.number} {legality} {end}".rstrip()


def trace_progress(task: Task, response: str) -> TraceProgress:
    """Follow a response, finished or not, line by line.

    Raises:
        DataError: the task is not one of the *trace* world.
    """
    progress = TraceProgress(0, _metadata(task, "start"), "")
    *lines, pending = response.split(";")
    for line in lines:
        progress = _state_next(task, progress, line)
    return TraceProgress(progress.lines, progress.number, pending.strip())


def trace_reward(task: Task, outcome: Outcome) -> float:
    """1 if the response has all lines of the task and the last result is right, else 0.

    Wrong results on the way that cancel each other cost nothing: what can still be earned depends
    on the number of lines and the last number alone. A response that ends with a semicolon, or in
    the middle of a line, has not answered: 0.

    Raises:
        DataError: the task is not one of the *trace* world.
    """
    progress = trace_progress(task, outcome.response)
    if _LINE.fullmatch(progress.pending) is None:
        return 0.0
    last = _state_next(task, progress, progress.pending)
    if not task.answers or not task.answers[0].isdecimal():
        raise DataError(
            f"task {task.id}: field 'answers' must hold a whole number, found "
            f"{list(task.answers)!r:.40}"
        )
    right = int(task.answers[0])
    return float(last == TraceProgress(len(_metadata(task, "operations")), right, ""))


def trace_key(state: PathState) -> str:
    """The state key of a *trace* path: its lines, its number, the unfinished line.

    Paths with equal keys have the same lines to go from the same number.

    Example: ``"2 18"``; with an unfinished line ``"2 18 -2"``; with a last line that lacks only its
    semicolon, which an answer does, ``"3 16 ."``; after nonsense ``"2 None"``.
    """
    progress = trace_progress(state.task, state.response)
    if _LINE.fullmatch(progress.pending) is None:
        return f"{progress.lines} {progress.number} {progress.pending}".rstrip()
    last = _state_next(state.task, progress, progress.pending)
    return f"{last.lines} {last.number} ."


def facts_key(state: PathState) -> str:
    """The state key of a search path: which of the task's gold documents it found, and its answer.

    Documents that do not lie on the question's chains change nothing about what remains to be
    found, so they are left out: paths merge that differ in useless searches and in the order of
    the useful ones.

    Example: ``'["when: Karo Venner mentor born", ["12", "7"], null]'``

    Raises:
        DataError: the task's metadata has no ``gold_documents``, or not a list of ids.
    """
    gold = set(_metadata(state.task, "gold_documents"))
    found = sorted(gold.intersection(document.id for document in state.memory.documents_found))
    answer = None if state.answer is None else normalize_answer(state.answer)
    return json.dumps([state.task.question, found, answer], ensure_ascii=False)


def hops_key(state: PathState) -> str:
    """The state key of a *hops* path: hops known, whether the next was asked for, the last turn.

    A hop is known once its present document was found and those of all hops before it. The next hop
    was asked for, though it is not known, where its outdated document was found. The last turn
    stands for the last observation, since equal turns get equal replies; at the end it holds the
    answer.

    Example: ``'["who: Karo Venner mentor rival", 1, true, "<search> Lita Bosdal rival</search>"]'``

    Raises:
        DataError: the task is not one of the *hops* world.
    """
    gold, outdated = _metadata(state.task, "gold_documents"), _metadata(state.task, "outdated")
    if len(outdated) != len(gold):
        raise DataError(
            f"task {state.task.id}: field 'metadata.outdated' must hold an id or null for each of "
            f"the {len(gold)} gold_documents, found {len(outdated)}"
        )
    found = {document.id for document in state.memory.documents_found}
    known = next((hop for hop, id_ in enumerate(gold) if id_ not in found), len(gold))
    asked = known < len(gold) and outdated[known] in found
    last = state.memory.turns[-1].strip() if state.memory.turns else None
    return json.dumps([state.task.question, known, asked, last], ensure_ascii=False)


def _metadata(task: Task, name: str) -> Any:
    if name not in task.metadata:
        raise DataError(f"task {task.id}: field 'metadata.{name}' is missing")
    value = task.metadata[name]
    kind, fits = _KINDS[name]
    if not fits(value):
        raise DataError(
            f"task {task.id}: field 'metadata.{name}' must be {kind}, found {value!r:.40}"
        )
    return value


def _complete(task: Task, progress: ReachProgress) -> ReachProgress | None:
    """The progress after its unfinished line, if that lacks only the semicolon; else None."""
    if _LINE.fullmatch(progress.pending) is None:
        return None
    operations, limit = _metadata(task, "operations"), _metadata(task, "limit")
    return _follow(progress, progress.pending, operations, limit)


def _follow(progress: ReachProgress, line: str, operations: list[str], limit: int) -> ReachProgress:
    """The progress after one line."""
    match = _LINE.fullmatch(line)
    if match is None:
        return ReachProgress(None, False, "")
    operation, result = match[1], int(match[2])
    right = (
        progress.number is not None
        and operation in operations
        and result < limit
        and result == _APPLY[operation[0]](progress.number, int(operation[1:]))
    )
    return ReachProgress(result, progress.legal and right, "")


def _state_next(task: Task, progress: TraceProgress, line: str) -> TraceProgress:
    """The progress after one line of a *trace* response."""
    operations, limit = _metadata(task, "operations"), _metadata(task, "limit")
    match = _LINE.fullmatch(line)
    due = operations[progress.lines : progress.lines + 1]
    if match is None or progress.number is None or [match[1]] != due or int(match[2]) >= limit:
        return TraceProgress(progress.lines + 1, None, "")
    return TraceProgress(progress.lines + 1, int(match[2]), "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("start", "target", "limit"), ("a whole number", _is_number)),
    **dict.fromkeys(("operations", "gold_documents"), ("a list of strings", _are_strings)),
    "outdated": (
        "a list of strings and nulls",
        lambda value: (
            isinstance(value, list) and _are_strings([each for each in value if each is not None])
        ),
    ),
}
"""What the metadata of the toy worlds' tasks hold, by field."""

_APPLY: Mapping[str, Any] = {
    "+": lambda number, operand: number + operand,
    "-": lambda number, operand: number - operand,
    "*": lambda number, operand: number * operand,
}
