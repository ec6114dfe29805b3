"""The verifier of the toy world *reach*, and the state keys of both toy worlds.

A *reach* response is text, ``+3 = 10 ; *2 = 20 ; +3 = 23``: one operation and its result a line,
the lines divided by semicolons, nothing after the last result. The tasks are made by
``graphpo_agent.data.toy_reach``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphpo_agent.errors import DataError
from graphpo_agent.rewards.qa import normalize_answer
from graphpo_agent.types import Outcome, PathState, Task

__all__ = ["ReachProgress", "facts_key", "reach_key", "reach_progress", "reach_reward"]

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


def facts_key(state: PathState) -> str:
    """The state key of a search path: which of the task's gold documents it found, and its answer.

    Documents that do not lie on the question's chains change nothing about what remains to be
    found, so they are left out: paths merge that differ in useless searches and in the order of
    the useful ones.

    Example: ``'["when: Karo Venner mentor born", ["12", "7"], null]'``

    Raises:
        DataError: the task's metadata has no ``gold_documents``.
    """
    gold = set(_metadata(state.task, "gold_documents"))
    found = sorted(gold.intersection(document.id for document in state.memory.documents_found))
    answer = None if state.answer is None else normalize_answer(state.answer)
    return json.dumps([state.task.question, found, answer], ensure_ascii=False)


def _metadata(task: Task, name: str) -> Any:
    if name not in task.metadata:
        raise DataError(f"task {task.id}: field 'metadata.{name}' is missing")
    return task.metadata[name]


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


_APPLY: Mapping[str, Any] = {
    "+": lambda number, operand: number + operand,
    "-": lambda number, operand: number - operand,
    "*": lambda number, operand: number * operand,
}
