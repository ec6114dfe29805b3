"""Question answering: what the policy's own final answer is worth, and the comparisons behind it.

The rules are SQuAD's, as Search-R1 uses them: lower case, no ASCII punctuation, no articles,
single spaces. Only ``outcome.answer`` is judged: nothing that a prompt or a document says can be
taken for an answer.

A configuration names a reward as ``graphpo_agent.rewards.qa:token_f1``.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.protocols import Counting, RewardFn
from graphpo_agent.types import Outcome, Task

__all__ = [
    "Binarize",
    "Unit",
    "accepted",
    "answer_contains",
    "answer_equals",
    "answer_f1",
    "check_unit",
    "exact_match",
    "normalize_answer",
    "substring_match",
    "token_f1",
]

Unit = Annotated[float, Field(ge=0, le=1)]
"""A share; ``--dry-run`` reads the bounds."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_ALL_OR_NOTHING = frozenset(("yes", "no", "noanswer"))


def normalize_answer(text: str) -> str:
    """The form in which answers are compared.

    Example: ``normalize_answer(" The Jean-Luc  Picard.")`` is ``"jeanluc picard"``.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def answer_equals(answer: str, golds: Sequence[str]) -> bool:
    """Whether the answer equals any accepted answer after normalisation; an empty one never does.

    Of a text that is nothing but articles these count, and of one without words all characters.

    Example: ``answer_equals("the", ("The",))`` is true, ``answer_equals("a", ("The",))`` is not.
    """
    form = _form(answer)
    return form != "" and any(form == _form(gold) for gold in golds)


def answer_contains(answer: str, golds: Sequence[str]) -> bool:
    """Whether any accepted answer is a substring of the answer, both normalised.

    An accepted answer of which normalisation leaves nothing is contained in an answer that equals
    it only.

    Example: ``answer_contains("in 1987, or so", ("1987",))`` is true.
    """
    normal = normalize_answer(answer)
    return answer_equals(answer, golds) or any(
        gold in normal for gold in map(normalize_answer, golds) if gold
    )


def answer_f1(answer: str, golds: Sequence[str]) -> float:
    """The highest F1 of the answer's words with any accepted answer's, in [0, 1].

    Words count as often as they occur; what they are in a text of nothing but articles,
    ``answer_equals`` says. An answer or accepted answer ``yes``, ``no`` or ``noanswer`` counts only
    if the two are equal.

    Example: ``answer_f1("born 1987", ("1987",))`` has precision 1/2, recall 1 and F1 2/3.
    """
    form = _form(answer)
    return max((_f1(form, _form(gold)) for gold in golds), default=0.0)


def _form(text: str) -> str:
    """The normal form, or where nothing is left of it what is left with articles, or at all."""
    lower = text.lower()
    words = lower.translate(_NO_PUNCTUATION)
    return normalize_answer(text) or " ".join(words.split()) or lower.strip()


def _f1(answer: str, gold: str) -> float:
    if not answer:
        return 0.0
    if answer == gold:
        return 1.0
    if {answer, gold} & _ALL_OR_NOTHING:
        return 0.0
    answer_words, gold_words = answer.split(), gold.split()
    common = (Counter(answer_words) & Counter(gold_words)).total()
    return 2 * common / (len(answer_words) + len(gold_words))


def accepted(task: Task) -> tuple[str, ...]:
    """The answers that a task accepts; none where it is ``unanswerable`` by design.

    Raises:
        DataError: it accepts none otherwise, so that whatever is answered would be wrong.
    """
    if not task.answers and not task.metadata.get("unanswerable"):
        raise DataError(f"task {task.id}: has no answer to compare with")
    return task.answers


def exact_match(task: Task, outcome: Outcome) -> float:
    """1 if the answer equals any accepted answer after normalisation, else 0; unanswered: 0."""
    golds = accepted(task)
    return float(outcome.answer is not None and answer_equals(outcome.answer, golds))


def substring_match(task: Task, outcome: Outcome) -> float:
    """1 if the answer contains any accepted answer after normalisation, else 0; unanswered: 0."""
    golds = accepted(task)
    return float(outcome.answer is not None and answer_contains(outcome.answer, golds))


def token_f1(task: Task, outcome: Outcome) -> float:
    """``answer_f1`` of the final answer; unanswered: 0."""
    golds = accepted(task)
    return 0.0 if outcome.answer is None else answer_f1(outcome.answer, golds)


def check_unit(name: str, value: float) -> None:
    """Check a setting of a reward that a configuration gives.

    Raises:
        ConfigError: it is no number in [0, 1].
    """
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number in [0, 1], found {value!r:.40}")


class Binarize:
    """1 where another reward reaches a threshold, else 0; a ``RewardFn``.

    Example::

        Binarize(token_f1, threshold=0.6)(task, outcome)  # 1.0 for "born 1987" against "1987"
    """

    def __init__(self, reward: RewardFn, threshold: Annotated[float, Field(gt=0, le=1)]) -> None:
        """Wrap a reward.

        Args:
            reward: any reward in [0, 1].
            threshold: in (0, 1]; a reward equal to it counts as 1.

        Raises:
            ConfigError: the reward cannot be called, or the threshold is outside (0, 1].
        """
        if not callable(reward):
            raise ConfigError(f"Binarize: reward must be a reward function, found {reward!r:.60}")
        check_unit("Binarize: threshold", threshold)
        if threshold == 0:
            raise ConfigError("Binarize: threshold must be above 0, or every reward would be 1")
        self._reward = reward
        self._threshold = threshold

    @property
    def counts(self) -> Mapping[str, int]:
        """Those of the wrapped reward (``Counting``), such as a judge's."""
        return self._reward.counts if isinstance(self._reward, Counting) else {}

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """1 or 0."""
        return float(self._reward(task, outcome) >= self._threshold)
