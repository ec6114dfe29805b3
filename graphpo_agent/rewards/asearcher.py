"""ASearcher's reward: set-based F1 or exact match, alias answers, a format check of every turn."""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.rewards.qa import accepted, answer_equals
from graphpo_agent.types import Outcome, Task

__all__ = ["ASearcherReward", "is_well_formed_turn", "set_f1"]

_ALIAS_WEIGHT = 0.3
_REFUSAL_WORDS = ("question", "invalid", "appropriate", "valid")
_ACTIONS = ("search", "access", "answer")
_SPACED = str.maketrans(dict.fromkeys(string.punctuation, " "))
_CHINESE = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002ebef]"  # ideographs
)
_CHINESE_TOKEN = re.compile(r"\d+|[^\s\d，。]")
_BOOLEANS = {"True": "yes", "False": "no"}


class ASearcherReward:
    """ASearcher's rule; a ``RewardFn``.

    The score is the highest over the accepted answers. Where ``task.metadata["aug_answers"]``
    lists aliases, it is ``0.7 · score + 0.3 · max(score, highest over the aliases)``. The reward is

    * 0 for an unanswered path, and where any turn of it is not ``is_well_formed_turn``;
    * 0 for an answer that calls the question invalid, that is, holds ``question``, ``invalid``,
      ``appropriate`` or ``valid`` though no accepted answer or alias does, in whatever case.
      Upstream gives -0.5, but node scores need rewards of at least 0. Tasks marked
      ``metadata["unanswerable"]`` are exempt;
    * the score otherwise.

    Example: ``"Lyon"`` against ``("Paris",)`` with the alias ``"Lyon"`` is worth 0.3.
    """

    def __init__(self, metric: Literal["f1", "em"] = "f1") -> None:
        """Choose how one answer is compared with one accepted answer.

        Args:
            metric: ``f1``, ``set_f1``; ``em``, exact match after SQuAD's normalisation.

        Raises:
            ConfigError: another metric.
        """
        if metric not in _METRICS:
            raise ConfigError(f"ASearcherReward: metric must be f1 or em, found {metric!r}")
        self._metric = _METRICS[metric]

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """In [0, 1].

        Raises:
            DataError: the task has no answer, or its ``metadata.aug_answers`` is not a list of
                strings.
        """
        golds, aliases = accepted(task), _aliases(task)
        answer = outcome.answer
        if answer is None or not all(map(is_well_formed_turn, outcome.turns)):
            return 0.0
        if _refuses(answer, task, aliases):
            return 0.0
        score = self._best(answer, golds)
        if not aliases:
            return score
        return (1 - _ALIAS_WEIGHT) * score + _ALIAS_WEIGHT * max(score, self._best(answer, aliases))

    def _best(self, answer: str, golds: Sequence[str]) -> float:
        spoken = _BOOLEANS.get(answer, answer)
        compared = (self._metric(spoken, _BOOLEANS.get(gold, gold)) for gold in golds)
        return max(compared, default=0.0)


def is_well_formed_turn(text: str) -> bool:
    """ASearcher's check of one turn.

    The tags of search, access and answer are balanced, one action at most, one ``</think>`` at
    most, and neither ``Assistant`` nor ``assistant``, which the prompt's own dialogue uses.
    """
    balanced = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in _ACTIONS)
    actions = sum(text.count(f"<{tag}>") for tag in _ACTIONS)
    impostor = "Assistant" in text or "assistant" in text
    return balanced and actions <= 1 and text.count("</think>") <= 1 and not impostor


def set_f1(answer: str, gold: str) -> float:
    """F1 of two sets of words, lower case, ASCII punctuation read as spaces; in [0, 1].

    Where the accepted answer holds a Chinese character, every character is a word and so is every
    run of digits. No words on either side: 0.

    Example: ``set_f1("Jean-Luc Luc", "jean luc")`` is 1; ``set_f1("1987年", "1987年5月")`` is 2/3.
    """
    words = _CHINESE_TOKEN.findall if _CHINESE.search(gold) else str.split
    answer_words = set(words(answer.translate(_SPACED).lower()))
    gold_words = set(words(gold.translate(_SPACED).lower()))
    if not answer_words or not gold_words:
        return 0.0
    return 2 * len(answer_words & gold_words) / (len(answer_words) + len(gold_words))


def _exact(answer: str, gold: str) -> float:
    return float(answer_equals(answer, (gold,)))


_METRICS: Mapping[str, Callable[[str, str], float]] = {"f1": set_f1, "em": _exact}


def _aliases(task: Task) -> tuple[str, ...]:
    if "aug_answers" not in task.metadata:
        return ()
    aliases = task.metadata["aug_answers"]
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise DataError(f"task {task.id}: field 'metadata.aug_answers' must be a list of strings")
    return tuple(aliases)


def _refuses(answer: str, task: Task, aliases: Sequence[str]) -> bool:
    if task.metadata.get("unanswerable"):
        return False
    accepted = "\n".join((*task.answers, *aliases)).lower()
    return any(word in answer and word not in accepted for word in _REFUSAL_WORDS)
