"""Tree-GRPO's token F1 with format terms, on the policy's own turns.

Tree-GRPO rewards its question answering sets by exact match (``SearchR1Reward``) and everything
else, web agents among it, by this. ``graphpo_agent.rewards.transcripts`` has the authors' rule on
a whole transcript instead.
"""

from graphpo_agent.rewards.qa import Unit, accepted, answer_f1
from graphpo_agent.rewards.search_r1 import (
    CallTag,
    check_terms,
    is_retrieved,
    is_well_formed,
)
from graphpo_agent.types import Outcome, Task

__all__ = ["TreeGrpoReward"]


class TreeGrpoReward:
    """Token F1 with format terms; a ``RewardFn``.

    ====================  ===========================  ============================
    F1 of the answer      well formed                  not well formed
    ====================  ===========================  ============================
    above 0               F1                           max(0, F1 - structure)
    0                     structure (+ retrieval)      0
    no answer             0                            0
    ====================  ===========================  ============================

    Well formed and retrieved are those of ``SearchR1Reward``. Upstream lets F1 - structure become
    negative; node scores need rewards of at least 0, so it is cut off there.

    Example: with structure 0.2 and no ``<think>`` element, an F1 of 2/3 is worth 0.467.
    """

    def __init__(
        self,
        structure_format_score: Unit = 0.0,
        retrieval_score: Unit = 0.0,
        call_tag: CallTag = "search",
    ) -> None:
        """Set the terms; Tree-GRPO's published runs use 0.2 and 0.

        Args:
            structure_format_score: as in the table.
            retrieval_score: as in the table.
            call_tag: the action element of well formed turns; ``tool_call`` for Hermes.

        Raises:
            ConfigError: a term outside [0, 1], both above 1 together, or another tag.
        """
        check_terms(structure_format_score, retrieval_score, call_tag)
        self._structure = structure_format_score
        self._retrieval = retrieval_score
        self._call_tag: CallTag = call_tag

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """In [0, 1], by the table above."""
        golds = accepted(task)
        if outcome.answer is None:
            return 0.0
        well_formed = is_well_formed(outcome.turns, self._call_tag)
        f1 = answer_f1(outcome.answer, golds)
        if f1 > 0:
            return f1 if well_formed else max(0.0, f1 - self._structure)
        if not well_formed:
            return 0.0
        return self._structure + self._retrieval * is_retrieved(task, outcome)
