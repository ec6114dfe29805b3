r"""Mathematics: the final answer of a response, and whether it is the accepted one.

Whether two expressions are equal is math-verify's to say, in a process that is killed when it takes
too long (``rewards.math_worker``): an answer such as ``9^{9^{9^9}}`` would keep it busy for ever.

A configuration names the reward as ``{class: graphpo_agent.rewards.math:MathReward}``.
"""

import operator
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from graphpo_agent.math_notation import as_number, plain
from graphpo_agent.math_text import final_answer
from graphpo_agent.net.checks import check_counts, check_seconds
from graphpo_agent.net.processes import ProcessPool
from graphpo_agent.rewards.qa import accepted
from graphpo_agent.types import Outcome, Task

__all__ = ["MathReward", "MathVerdict", "stated"]

_WORKER = Path(__file__).with_name("math_worker.py")
_LONGEST = 512
"""Characters of an answer; a longer one is wrong."""

_TEXT = re.compile(r"\\(?:text|mathrm|textrm|mbox)\{([^{}]*)\}")
_LISTED = re.compile(r",\s+")
_WORD = re.compile(r"[A-Za-z]{2,}(?: [A-Za-z]+)*")
"""A word or an order of things; as a product its letters could change places."""
_SET = re.compile(r"(?:\\left ?)?\\\{.*\\\}")
_TUPLE = re.compile(r"(?:\\left ?)?\([^()]*\)")
_UNREAD = re.compile(
    r"\\[lc]?dots|\.\.\.|…"  # it goes on
    r"|\b(?:if|for|when|where)\b"  # it depends
    r"|(?:^|=) ?[-+]?[\d.]+ ?\\approx"  # a number that is about another
    r"|(?:^|=) ?[-+]?[\d.]+(?:[ '\"]+[\d.]+| ?\([\d.]+\))+$"  # numbers side by side
    r"|[\d})] ?\\(?:text|math|m)(?:bf|it|rm|box)?\{(?! ?(?:and)? ?\})"  # a number, words, and
    r"(?:[^\d=^]|\^\{?+[-+]?+\d*+)*+\d"  # one more that is no exponent
)
"""What math-verify reads a part of, or as something else: it equals the same text alone."""


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
    Letters alone are a word: ``TFT`` is not ``TTF``.

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
        found = [self._equal(gold, answer) for gold in golds]
        if True in found:
            return MathVerdict("correct", answer)
        return MathVerdict("timeout" if None in found else "incorrect", answer)

    def _equal(self, gold: str, answer: str) -> bool | None:
        """None: it took too long to say."""
        if gold == answer:
            return True
        if len(answer) > _LONGEST:
            return False
        gold, answer = plain(gold), plain(answer)
        told = _told(gold, answer)
        if told is not None:
            return told
        pair = {"gold": gold.removesuffix("%"), "answer": answer.removesuffix("%")}
        reply = self._pool.ask(pair, self._seconds)
        return None if reply is None else reply["equal"]


def stated(outcome: Outcome) -> str | None:
    """The answer of a response, ``MathReward`` says which; None where it has none."""
    if outcome.answer is None:
        return final_answer(outcome.response)
    return final_answer(outcome.answer) or outcome.answer


def _told(gold: str, answer: str) -> bool | None:
    """Whether they are equal, where no expressions need be compared; else None."""
    texts = gold, answer
    words = [_words(text) for text in texts]
    if words[0] == words[1]:
        return True
    numbers = [(as_number(text), as_number(text.removesuffix("%"))) for text in texts]
    if None not in numbers[0] + numbers[1]:
        return any(map(operator.eq, *numbers))
    if all(map(_WORD.fullmatch, words)):
        return operator.eq(*(word.replace(" ", "").casefold() for word in words))
    shapes = {shape for text in texts for shape in (_SET, _TUPLE) if shape.fullmatch(text)}
    return False if len(shapes) > 1 or any(map(_UNREAD.search, texts)) else None


def _words(text: str) -> str:
    """What is written, blanks behind commas and commands for plain text apart."""
    return _LISTED.sub(",", _TEXT.sub(r"\1", text))
