"""Question answering: exact match and token F1 of the policy's own final answer.

The rules are SQuAD's, as Search-R1 uses them: lower case, no ASCII punctuation, no articles,
single spaces. Only ``outcome.answer`` is judged: nothing that a prompt or a document says can be
taken for an answer.
"""

import string
from collections import Counter

from graphpo_agent.types import Outcome, Task

__all__ = ["exact_match", "normalize_answer", "token_f1"]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset(("a", "an", "the"))
_ALL_OR_NOTHING = frozenset(("yes", "no", "noanswer"))


def normalize_answer(text: str) -> str:
    """The form in which answers are compared.

    Example: ``normalize_answer(" The Jean-Luc  Picard.")`` is ``"jeanluc picard"``.
    """
    words = text.lower().translate(_NO_PUNCTUATION).split()
    return " ".join(word for word in words if word not in _ARTICLES)


def exact_match(task: Task, outcome: Outcome) -> float:
    """1 if the answer equals any accepted answer after normalisation, else 0; unanswered: 0."""
    if outcome.answer is None:
        return 0.0
    answer = normalize_answer(outcome.answer)
    return float(any(answer == normalize_answer(gold) for gold in task.answers))


def token_f1(task: Task, outcome: Outcome) -> float:
    """The highest F1 of the answer's words with any accepted answer's, in [0, 1]; unanswered: 0.

    Words count as often as they occur. An answer or accepted answer ``yes``, ``no`` or
    ``noanswer`` counts only if the two are equal.

    Example: ``"born 1987"`` against ``"1987"`` has precision 1/2, recall 1 and F1 2/3.
    """
    if outcome.answer is None:
        return 0.0
    answer = normalize_answer(outcome.answer)
    return max((_f1(answer, normalize_answer(gold)) for gold in task.answers), default=0.0)


def _f1(answer: str, gold: str) -> float:
    if answer == gold:
        return 1.0
    if {answer, gold} & _ALL_OR_NOTHING:
        return 0.0
    answer_words, gold_words = answer.split(), gold.split()
    common = (Counter(answer_words) & Counter(gold_words)).total()
    return 2 * common / (len(answer_words) + len(gold_words))
