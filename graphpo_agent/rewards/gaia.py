"""GAIA's own scorer: exact match by the kind of the accepted answer, as its leaderboard has it.

Its peculiarities are kept, as numbers are compared with it: there is no tolerance and no unit, an
accepted answer with a comma is a list (``1,000`` is ``1`` and ``000``), and where a number is
accepted, whatever cannot be read as one is infinite.
"""

import math
import re
import string

from graphpo_agent.rewards.qa import accepted
from graphpo_agent.types import Outcome, Task

__all__ = ["gaia_equals", "gaia_match"]

_SEPARATORS = re.compile("[,;]")
_NO_UNITS = str.maketrans("", "", "$%,")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def gaia_match(task: Task, outcome: Outcome) -> float:
    """1 if the final answer equals an accepted one by GAIA's rule, else 0; unanswered: 0."""
    answer, golds = outcome.answer, accepted(task)
    return float(answer is not None and any(gaia_equals(answer, gold) for gold in golds))


def gaia_equals(answer: str, gold: str) -> bool:
    """Whether GAIA's scorer takes an answer.

    * A number is accepted: the answer without ``$``, ``%`` and ``,`` is the same number.
    * A list, separated by commas or semicolons, is accepted: as many elements in the same order,
      each by the rule of numbers or the same text, punctuation included.
    * A text is accepted: the same one without ASCII punctuation.

    Case and white space never count.

    Example: ``gaia_equals("$ 1,234", "1234")`` and ``gaia_equals("ada; 3.0", "Ada, 3")`` are true.
    """
    if _number(gold) is not None:
        return _same_number(answer, gold)
    if not _SEPARATORS.search(gold):
        return _letters(answer).translate(_NO_PUNCTUATION) == (
            _letters(gold).translate(_NO_PUNCTUATION)
        )
    answers, golds = _SEPARATORS.split(answer), _SEPARATORS.split(gold)
    return len(answers) == len(golds) and all(map(_same_element, answers, golds))


def _same_element(answer: str, gold: str) -> bool:
    if _number(gold) is not None:
        return _same_number(answer, gold)
    return _letters(answer) == _letters(gold)


def _same_number(answer: str, gold: str) -> bool:
    found = _number(answer.translate(_NO_UNITS))
    return (math.inf if found is None else found) == _number(gold)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _letters(text: str) -> str:
    return "".join(text.split()).lower()
