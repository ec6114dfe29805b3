"""The rules of Search-R1, Tree-GRPO and verl on a whole decoded transcript, to the letter.

They look for answers in the prompt and in what retrieval returned, too, because the originals do:
for comparing numbers with theirs. Training uses the rewards of ``qa``, ``search_r1`` and
``tree_grpo``, which judge the policy's own turns.

``golds`` is a string or several. The structure check of the originals forgets that a string is
not a list: it then looks for the string's characters in the documents, one by one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpo_agent.rewards.qa import answer_f1, normalize_answer
from graphpo_agent.rewards.search_r1 import tag_letters

__all__ = [
    "FormatScores",
    "TranscriptScore",
    "search_r1_em",
    "search_r1_em_format",
    "tree_grpo_f1",
    "verl_search_r1_em",
]

_ASSISTANT = "<|im_start|>assistant"
_STRUCTURE = re.compile("Tx?t(?:Sx?sIx?iTx?t)*Ax?a")
_MANY_TAGS = 10


@dataclass(frozen=True, slots=True)
class FormatScores:
    """What an answer earns for its form; the originals' defaults are 0.

    Attributes:
        structure: a well formed transcript with a wrong answer; taken off a right answer in an
            ill formed one.
        final_format: an ill formed transcript with a wrong answer.
        retrieval: added to ``structure`` where a document shows an accepted answer.
        format: a wrong answer, for the rules that do not look at the structure.
    """

    structure: float = 0.0
    final_format: float = 0.0
    retrieval: float = 0.0
    format: float = 0.0


@dataclass(frozen=True, slots=True)
class TranscriptScore:
    """What a rule says of a transcript.

    Example: ``TranscriptScore(score=0.8, extracted="Paris", detail={"correct": True,
    "well_formed": False, "retrieved": False})``
    """

    score: float
    extracted: str | None
    """The answer that was judged; None: the rule found none."""
    detail: Mapping[str, Any]


def search_r1_em(text: str, golds: str | Sequence[str], scores: FormatScores) -> TranscriptScore:
    """Search-R1's exact match: the last of at least two answers in the text.

    Its prompt holds two answer elements; with none of the policy's own, the second of these is
    judged, and so is an answer element that a document brings.
    """
    answers = _elements(text, "answer")
    if len(answers) < 2:
        return TranscriptScore(0.0, None, {"answers": len(answers), "correct": False})
    correct = _equals(answers[-1], golds)
    detail = {"answers": len(answers), "correct": correct}
    return TranscriptScore(1.0 if correct else scores.format, answers[-1], detail)


def search_r1_em_format(
    text: str, golds: str | Sequence[str], scores: FormatScores
) -> TranscriptScore:
    """Search-R1's exact match with format terms; the answer is that of ``search_r1_em``."""
    form = _form(text, golds)
    answers = _elements(text, "answer")
    if len(answers) < 2:
        detail = {"correct": False, **form}
        return TranscriptScore(_form_score(form, scores, otherwise=0.0), None, detail)
    correct = _equals(answers[-1], golds)
    if correct:
        score = 1.0 if form["well_formed"] else 1.0 - scores.structure
    else:
        score = _form_score(form, scores, otherwise=scores.final_format)
    return TranscriptScore(score, answers[-1], {"correct": correct, **form})


def tree_grpo_f1(text: str, golds: str | Sequence[str], scores: FormatScores) -> TranscriptScore:
    """Tree-GRPO's token F1 with format terms; the answer is that of ``search_r1_em``.

    A partly right answer in an ill formed transcript can be worth less than 0.
    """
    form = _form(text, golds)
    answers = _elements(text, "answer")
    if len(answers) < 2:
        detail = {"f1": 0.0, **form}
        return TranscriptScore(_form_score(form, scores, otherwise=0.0), None, detail)
    f1 = answer_f1(answers[-1], _several(golds)) if normalize_answer(answers[-1]) else 0.0
    if f1 > 0:
        score = f1 if form["well_formed"] else f1 - scores.structure
    else:
        score = _form_score(form, scores, otherwise=0.0)
    return TranscriptScore(score, answers[-1], {"f1": f1, **form})


def verl_search_r1_em(
    text: str, golds: str | Sequence[str], scores: FormatScores
) -> TranscriptScore:
    """The exact match of verl for search: the last answer in the text.

    A right answer among more than ten answer tags of a kind is worth a quarter.

    verl hands its rule the response alone: leave the prompt out for its numbers.
    """
    answers = _elements(text, "answer")
    tags = max(text.count("<answer>"), text.count("</answer>"))
    if not answers:
        return TranscriptScore(0.0, None, {"answer_tags": tags, "correct": False})
    correct = _equals(answers[-1], golds)
    right = 0.25 if tags > _MANY_TAGS else 1.0
    detail = {"answer_tags": tags, "correct": correct}
    return TranscriptScore(right if correct else scores.format, answers[-1], detail)


def _equals(answer: str, golds: str | Sequence[str]) -> bool:
    """As the originals have it: texts of nothing but articles are all equal."""
    return normalize_answer(answer) in map(normalize_answer, _several(golds))


def _several(golds: str | Sequence[str]) -> Sequence[str]:
    return (golds,) if isinstance(golds, str) else golds


def _elements(text: str, tag: str) -> list[str]:
    """The stripped contents of a tag's elements: from each opening tag to the next closing one."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    contents: list[str] = []
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start)
        if end < 0:
            break
        contents.append(text[start + len(opening) : end].strip())
        start = text.find(opening, end)
    return contents


def _form(text: str, golds: str | Sequence[str]) -> dict[str, bool]:
    """Whether the assistant's part is well formed, and if so, whether a document shows a gold."""
    _, assistant, content = text.partition(_ASSISTANT)
    well_formed = bool(assistant) and _STRUCTURE.fullmatch(tag_letters(content)) is not None
    return {"well_formed": well_formed, "retrieved": well_formed and _is_shown(text, golds)}


def _is_shown(text: str, golds: str | Sequence[str]) -> bool:
    blocks = [normalize_answer(block) for block in _elements(text, "information")]
    wanted = [normalize_answer(gold) for gold in golds]  # the characters of a string
    return any(gold in block for block in blocks for gold in wanted)


def _form_score(form: Mapping[str, bool], scores: FormatScores, otherwise: float) -> float:
    if not form["well_formed"]:
        return otherwise
    return scores.structure + scores.retrieval if form["retrieved"] else scores.structure
