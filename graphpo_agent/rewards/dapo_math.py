r"""DAPO's own rule of mathematics, ``math_dapo`` in verl's ``reward_score``: it compares letters.

The answer is the rest of the last ``Answer: …`` in the last 300 characters; of it and of the
accepted one units, dollar signs, blanks and some LaTeX are taken away, and what remains must be the
same text: ``34.0`` is not ``34``. verl 0.9.1 takes a ``\boxed{}`` of the last 100 characters where
there is no such line; its earlier releases, and those that papers before 2026 trained with, do not.

A configuration names the reward as ``{class: graphpo_agent.rewards.dapo_math:DapoMathReward}``.
"""

import re
from collections.abc import Sequence
from typing import Literal

from graphpo_agent.rewards.qa import accepted
from graphpo_agent.types import Outcome, Task

__all__ = ["DapoMathReward", "VerlVersion", "dapo_answer", "dapo_equal", "dapo_form"]

VerlVersion = Literal["0.9.0", "0.9.1"]

_READ = 300
_BOX_READ = 100
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_MISSING = "[INVALID]"
"""What stands for an answer where there is none; an accepted answer may be called so."""

_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    *(r"\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
    *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *(r"\text{s}", r"\text{.}"),
    *("\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""One after the other, as each may make the next."""
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


class DapoMathReward:
    r"""1 for the letters that verl's ``math_dapo`` takes for an accepted answer, else 0.

    verl gives 1 and −1, and so does DAPO's recipe; here a reward lies in [0, 1].

    Example::

        DapoMathReward()(Task("a", "2 + 2?", ("4",)), Outcome("It is\nAnswer: $4$"))  # 1.0
    """

    def __init__(self, *, verl_version: VerlVersion = "0.9.0") -> None:
        r"""Args: verl_version: 0.9.1 reads a ``\boxed{}``, too; 0.9.0 and others before do not."""
        self._version: VerlVersion = verl_version

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """1 or 0.

        Raises:
            DataError: the task has no accepted answer.
        """
        return float(dapo_equal(outcome.response, accepted(task), self._version))


def dapo_equal(response: str, golds: Sequence[str], version: VerlVersion) -> bool:
    """Whether a response states one of the accepted answers.

    Example: ``dapo_equal("Answer: x = 1,234 dollars", ("1234",), "0.9.0")`` is true.
    """
    boxed = _box(response, version)
    if boxed is not None:
        return boxed in golds
    form = dapo_form(_line(response) or _MISSING)
    return any(form == dapo_form(gold) for gold in golds)


def dapo_answer(response: str, version: VerlVersion) -> str | None:
    r"""The answer that is compared, in its form; of a box as it stands. None: there is none.

    Example: ``dapo_answer("Answer: $\\frac12$ km", "0.9.0")`` is ``"\\frac{1}{2}"``.
    """
    boxed = _box(response, version)
    if boxed is not None:
        return boxed
    line = _line(response)
    return None if line is None else dapo_form(line)


def dapo_form(answer: str) -> str:
    r"""What remains of an answer.

    Example: ``dapo_form("x = 1,234 dollars")`` is ``"1234"``, ``dapo_form("$9^\\circ$")`` ``"9"``.
    """
    form = answer.rpartition("=")[2]
    for before, after in (*_REPLACED, *((each, "") for each in _REMOVED)):
        form = form.replace(before, after)
    for pattern, kept in _REWRITTEN:
        form = pattern.sub(kept, form)
    form = form.replace("$", "")
    digits = form.replace(",", "")
    return (digits if digits.isdigit() else form).strip()


def _line(response: str) -> str | None:
    stated = _LINE.findall(response[-_READ:])
    return stated[-1] if stated else None


def _box(response: str, version: VerlVersion) -> str | None:
    """The last box, where it counts; one that is not closed is none."""
    line = _line(response)
    if version == "0.9.0" or (line is not None and dapo_form(line) != _MISSING):
        return None
    _, begins, rest = response[-_BOX_READ:].rpartition(r"\boxed{")
    depth = 1
    for place, character in enumerate(rest if begins else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place]
    return None
