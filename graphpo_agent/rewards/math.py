r"""Mathematics: the final answer of a response, and whether it is the accepted one.

Whether two expressions are equal is math-verify's to say, in a process that is killed when it takes
too long (``rewards.math_worker``): an answer such as ``9^{9^{9^9}}`` would keep it busy for ever.

A configuration names the reward as ``{class: graphpo_agent.rewards.math:MathReward}``.
"""

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from graphpo_agent.math_text import final_answer
from graphpo_agent.net.checks import check_counts, check_seconds
from graphpo_agent.net.processes import ProcessPool
from graphpo_agent.rewards.qa import accepted
from graphpo_agent.types import Outcome, Task

__all__ = ["MathReward", "MathVerdict", "stated"]

_WORKER = Path(__file__).with_name("math_worker.py")
_LONGEST = 512
"""Characters of an answer; a longer one is wrong."""

_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-", "∞": r"\infty ", "²": "^2", "³": "^3"})
_ROOTS = re.compile(r"√(?:(\d+|[a-z])|\((\d+|[a-z])\))")
_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox)\{([^{}]*)\}")
_LISTED = re.compile(r",\s+")
_MARKS = re.compile(r"(?<!\\)(?:\$\$?|\\[()\[\]])")
_GROUPS = re.compile(r"(?<=\d)(?:,?\s*\\!\s*|\\[,;: ]|\{,\}|\\text\{,\}|~)(?=\d{3})")
_SPACES = re.compile(r"(?:(?<!\\)\\[,!;: ]|\s|~)+")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d{1,50})\}\{(\d{1,50})\}")
_LETTERS = re.compile(r"[A-Z]{3,}")
"""A word or an order of things; as a product its letters could change places."""
_NUMBER = re.compile(r"[-+]?(?:\d{1,50}(?:\.\d{0,50})?|\.\d{1,50}|\d{1,50}/\d{1,50})")


@dataclass(frozen=True, slots=True)
class MathVerdict:
    """What is said of a response.

    Example: ``MathVerdict("correct", "34")``
    """

    status: Literal["correct", "incorrect", "unanswered", "timeout"]
    answer: str | None
    """As it stands in the response; None where it has none."""


class MathReward:
    r"""1 for a final answer that equals an accepted one, else 0; a ``RewardFn``.

    The answer is ``final_answer`` of the response; in agent mode of the marked answer, or all of
    it. Equal are the same numbers and, by math-verify, the same expressions, sets, intervals and
    matrices: ``\frac{1}{2}`` and ``0.5``, ``2\sqrt{3}`` and ``\sqrt{12}``, ``x = 34`` and ``34``.
    Three or more capital letters are a word: ``TFT`` is not ``TTF``.

    Example::

        MathReward()(Task("a", "2 + 2?", ("4",)), Outcome(r"So it is \boxed{4}."))  # 1.0
    """

    def __init__(
        self,
        *,
        seconds: Annotated[float, Field(gt=0)] = 5.0,
        processes: Annotated[int, Field(ge=1)] = 2,
    ) -> None:
        """Set the limits; a process starts when it is first needed.

        Args:
            seconds: that one comparison may take; an answer that takes longer is wrong, and
                counted.
            processes: that compare at once.

        Raises:
            ToolError: a limit that is not above 0.
        """
        check_seconds("MathReward", seconds=seconds)
        check_counts("MathReward", processes=processes)
        self._seconds = seconds
        self._pool = ProcessPool(
            _WORKER,
            processes,
            purpose="mathematical answers cannot be compared",
            needs="'math-verify[antlr4-9-3]'",
        )
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Mapping[str, int]:
        """Responses so far without an answer, and those whose answer took too long."""
        return {f"math/{status}": self._counts[status] for status in ("unanswered", "timeout")}

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """1 or 0.

        Raises:
            DataError: the task has no accepted answer.
            ToolError: no process can be started.
        """
        verdict = self.verdict(stated(outcome), accepted(task))
        with self._lock:
            self._counts[verdict.status] += 1
        return float(verdict.status == "correct")

    def verdict(self, answer: str | None, golds: Sequence[str]) -> MathVerdict:
        """What is said of an answer, which may be missing; not counted.

        Raises:
            ToolError: no process can be started.
        """
        if answer is None or not answer.strip():
            return MathVerdict("unanswered", None)
        found = [self._equal(_plain(gold), _plain(answer)) for gold in golds]
        if True in found:
            return MathVerdict("correct", answer)
        return MathVerdict("timeout" if None in found else "incorrect", answer)

    def _equal(self, gold: str, answer: str) -> bool | None:
        """None: it took too long to say."""
        if _words(gold) == _words(answer):
            return True
        if len(answer) > _LONGEST:
            return False
        numbers = _number(gold), _number(answer)
        if None not in numbers:
            if numbers[0] == numbers[1]:
                return True
            if all(number is not None and number.denominator == 1 for number in numbers):
                return False
        if _LETTERS.fullmatch(_words(gold)) and _LETTERS.fullmatch(_words(answer)):
            return False
        reply = self._pool.ask({"gold": gold, "answer": answer}, self._seconds)
        return None if reply is None else reply["equal"]


def stated(outcome: Outcome) -> str | None:
    """The answer of a response, ``MathReward`` says which; None where it has none."""
    if outcome.answer is None:
        return final_answer(outcome.response)
    return final_answer(outcome.answer) or outcome.answer


def _plain(text: str) -> str:
    """Without marks of mathematics, the full stop behind it, and spacing commands; signs as LaTeX.

    The marks of a single formula among words stay: it is what the words speak of.
    """
    text = _ROOTS.sub(r"\\sqrt{\1\2}", text.translate(_SIGNS))
    text = text.replace(r"\$", "").strip().rstrip("。.").strip()
    text = _MARKS.sub("$", text)
    if text.count("$") > 2 or (text.startswith("$") and text.endswith("$")):
        text = text.replace("$", "")  # several formulas are one list
    return _SPACES.sub(" ", _GROUPS.sub("", text)).strip()


def _words(text: str) -> str:
    """What is written, blanks behind commas and commands for plain text apart."""
    return _LISTED.sub(",", _TEXT.sub(r"\1", text))


def _number(text: str) -> Fraction | None:
    """An integer, decimal number or fraction, exactly; None: it is something else."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        text = fraction.expand(r"\1\2/\3")
    if not _NUMBER.fullmatch(text):
        return None
    top, _, bottom = text.partition("/")
    return Fraction(top) / int(bottom or 1) if int(bottom or 1) else None
