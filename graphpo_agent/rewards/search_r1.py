"""Search-R1's exact match with format terms, on the policy's own turns.

A path is *well formed* where every turn is one ``<think>`` element and one action element,
``<search>`` in all turns but the last and ``<answer>`` in the last, with only white space between.
In the Hermes dialect the action of those turns is a ``<tool_call>`` element, and tags in a call's
strings and code are plain text.
``graphpo_agent.rewards.transcripts`` has the authors' rule on a whole transcript instead.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from graphpo_agent.call_text import without_call_text
from graphpo_agent.errors import ConfigError
from graphpo_agent.rewards.qa import (
    Unit,
    accepted,
    answer_equals,
    check_unit,
    normalize_answer,
)
from graphpo_agent.types import Outcome, Task

__all__ = [
    "CallTag",
    "SearchR1Reward",
    "check_terms",
    "is_retrieved",
    "is_well_formed",
    "tag_letters",
]

CallTag = Literal["search", "tool_call"]
"""The element that is an action and no answer: ``tool_call`` in the Hermes dialect."""

_LETTERS = {"think": "T", "search": "S", "information": "I", "answer": "A"}
_HERMES_LETTERS = {"think": "T", "tool_call": "S", "tool_response": "I", "answer": "A"}
_SEARCH_TURN = re.compile("Tx?tSx?s")
_ANSWER_TURN = re.compile("Tx?tAx?a")


def tag_letters(text: str) -> str:
    """The skeleton of a text: a letter per tag, in order, and ``x`` for text that is not blank.

    Opening tags are the capitals ``T S I A`` of think, search, information and answer, closing
    tags the small letters.

    Example: ``tag_letters("<think> who? </think> <search>karo</search>")`` is ``"TxtSxs"``.
    """
    return _letters(text, _LETTERS)


def _letters(text: str, capitals: Mapping[str, str]) -> str:
    """``tag_letters``, of the tags that ``capitals`` has letters for."""
    letter_of = {f"<{name}>": capital for name, capital in capitals.items()}
    letter_of |= {f"</{name}>": capital.lower() for name, capital in capitals.items()}
    parts = re.split(f"(</?(?:{'|'.join(capitals)})>)", text)
    return "".join(letter_of.get(part, "x") for part in parts if part.strip())


def is_well_formed(turns: Sequence[str], call_tag: CallTag = "search") -> bool:
    """Whether the policy's turns follow Search-R1's format from the first to the answer."""
    if not turns:
        return False
    if call_tag == "tool_call":
        *searches, last = (_letters(without_call_text(turn), _HERMES_LETTERS) for turn in turns)
    else:
        *searches, last = map(tag_letters, turns)
    return _ANSWER_TURN.fullmatch(last) is not None and all(map(_SEARCH_TURN.fullmatch, searches))


def check_terms(structure_format_score: float, retrieval_score: float, call_tag: str) -> None:
    """Check the settings that both rewards with format terms have.

    Raises:
        ConfigError: a term outside [0, 1], both above 1 together, or no ``CallTag``.
    """
    if call_tag not in get_args(CallTag):
        known = " or ".join(get_args(CallTag))
        raise ConfigError(f"call_tag must be {known}, found {call_tag!r:.40}")
    check_unit("structure_format_score", structure_format_score)
    check_unit("retrieval_score", retrieval_score)
    check_unit("structure_format_score + retrieval_score", structure_format_score + retrieval_score)


def is_retrieved(task: Task, outcome: Outcome) -> bool:
    """Whether a document that the path was shown contains an accepted answer, both normalised."""
    golds = [gold for gold in map(normalize_answer, task.answers) if gold]
    texts = [normalize_answer(document.contents) for document in outcome.documents] if golds else []
    return any(gold in text for text in texts for gold in golds)


class SearchR1Reward:
    """Exact match with Search-R1's format terms; a ``RewardFn``.

    ====================  ===========================  ===================
    answer                well formed                  not well formed
    ====================  ===========================  ===================
    right                 1                            1 - structure
    wrong                 structure (+ retrieval)      final
    none                  0                            0
    ====================  ===========================  ===================

    Retrieval is added where ``is_retrieved``: a document shows an accepted answer, whatever the
    policy made of it. It is 0 by default, as everything is: exact match.

    Example: with structure 0.2, a right answer without a ``<think>`` element is worth 0.8.
    """

    def __init__(
        self,
        structure_format_score: Unit = 0.0,
        final_format_score: Unit = 0.0,
        retrieval_score: Unit = 0.0,
        call_tag: CallTag = "search",
    ) -> None:
        """Set the terms; Search-R1's published runs with format terms use 0.2, 0.1 and 0.

        Args:
            structure_format_score: as in the table.
            final_format_score: as in the table.
            retrieval_score: as in the table.
            call_tag: the action element of well formed turns; ``tool_call`` for Hermes.

        Raises:
            ConfigError: a term outside [0, 1], structure and retrieval above 1 together, or
                another tag.
        """
        check_terms(structure_format_score, retrieval_score, call_tag)
        check_unit("final_format_score", final_format_score)
        self._structure = structure_format_score
        self._final = final_format_score
        self._retrieval = retrieval_score
        self._call_tag: CallTag = call_tag

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """In [0, 1], by the table above."""
        golds = accepted(task)
        if outcome.answer is None:
            return 0.0
        well_formed = is_well_formed(outcome.turns, self._call_tag)
        if answer_equals(outcome.answer, golds):
            return 1.0 if well_formed else 1.0 - self._structure
        if not well_formed:
            return self._final
        return self._structure + self._retrieval * is_retrieved(task, outcome)
