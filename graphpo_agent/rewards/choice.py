r"""Multiple choice: the letter that a response chooses, and whether it is the right one.

A configuration names the reward as ``{class: graphpo_agent.rewards.choice:ChoiceReward}``.
"""

import re
import threading
from collections.abc import Mapping

from graphpo_agent.math_text import final_answer
from graphpo_agent.rewards.qa import accepted
from graphpo_agent.types import Outcome, Task

__all__ = ["ChoiceReward", "chosen_letter"]

_COMMAND = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mathsf|textsf) ?\{([^{}]*)\}")
_BEGINS = r"[\s*_$`(\[{\\]*+"
_ENDS = r"(?=[\s*_$`)\]}]*(?:[.:,;)\n–—-]|\(|because\b|since\b|$))"
_STATED = re.compile(rf"{_BEGINS}(?:option|choice)?{_BEGINS}([A-J])(?![A-Za-z]){_ENDS}", re.I)
"""Of an answer: ``B``, ``(b)``, ``C) 5 mol``, ``Option D because …``."""
_ALONE = re.compile(rf"{_BEGINS}[A-J][\s*_$`)\]}}.]*", re.I)
_SENTENCE = re.compile(
    r"\b(?i:answer|choice|option)(?:\s+\w+){0,3}?\s+(?:is|be|are)(?:\s*:)?"
    rf"(?:\s+(?i:option|choice))?{_BEGINS}([A-J])(?![A-Za-z]){_ENDS}"
    rf"|\b(?i:option|choice|answer){_BEGINS}([A-J])[\s*_$`)\]}}]*\s+is\s+(?:the\s+)?"
    r"(?:correct|right|best|answer)\b"
)
"""``The correct answer is **C. 5 mol**``, ``Option D is correct``; the letter is upper case."""


class ChoiceReward:
    r"""1 for the accepted letter, else 0; a ``RewardFn``.

    The letter is ``chosen_letter`` of the response, in agent mode of the marked answer.

    Example::

        ChoiceReward()(Task("a", "Many?\n\nA) 1\nB) 2", ("B",)), Outcome("Answer: (B) 2"))  # 1.0
    """

    def __init__(self) -> None:
        self._unanswered = 0
        self._lock = threading.Lock()

    @property
    def counts(self) -> Mapping[str, int]:
        """Responses so far that choose no letter."""
        return {"choice/unanswered": self._unanswered}

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """1 or 0.

        Raises:
            DataError: the task has no accepted answer.
        """
        golds = accepted(task)
        text = outcome.response if outcome.answer is None else outcome.answer
        letter = chosen_letter(text)
        with self._lock:
            self._unanswered += letter is None
        return float(letter in golds)


def chosen_letter(response: str) -> str | None:
    r"""The choice that a response ends with, from A to J; None where it chooses none.

    That is the letter that its last ``\boxed{}`` or line ``Answer: …`` says (``final_answer``),
    else the last that a sentence calls the answer; a last line may be the letter alone. What stands
    before ``</think>`` does not count.

    Example: ``chosen_letter("The correct answer is **C. 5 mol**.")`` and
    ``chosen_letter(r"\boxed{\text{C}}")`` are ``"C"``, ``chosen_letter("Answer: A proton")`` is
    None.
    """
    text = response.rpartition("</think>")[2]
    stated = final_answer(text)
    lines = text.strip().splitlines()
    if stated is None and lines and (len(lines) == 1 or _ALONE.fullmatch(lines[-1])):
        stated = lines[-1]
    letter = None if stated is None else _STATED.match(_plain(stated))
    if letter is not None:
        return letter[1].upper()
    sentences = list(_SENTENCE.finditer(_plain(text)))
    return (sentences[-1][1] or sentences[-1][2]) if sentences else None


def _plain(text: str) -> str:
    return _COMMAND.sub(r"\1", text)
