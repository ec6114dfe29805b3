"""DAPO: GRPO without the groups that agree, and with a penalty on overlong answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.arrays import FloatArray
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Growth, Plan
from graphpo_agent.methods.grpo import GroupOfOne, Grpo, group_advantages
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten
from graphpo_agent.methods.rows import trajectory_credit

__all__ = ["Dapo", "overlong_penalty"]

_LONGEST = 2**31
"""Tokens; more than any answer has."""


@dataclass(frozen=True, slots=True)
class Dapo:
    """GRPO's chains and z-scores, of rewards that overlong answers lose from (DAPO, section 3).

    A group of two or more whose rewards *before* shaping all agree has advantage 0 everywhere, so
    that the trainer replaces it (dynamic sampling, section 3.2). verl 0.9.1 keeps a group of one
    (``_dapo_filtered_keys``), and so does this.

    Shaping is that of verl 0.9.1 (``DAPORewardManager``), see ``overlong_penalty``. There right and
    wrong are worth +1 and −1 with DAPO's own verifier; with rewards of 1 and 0 a factor of 0.5
    gives the same advantages.

    Of the method's further parts, clipping at 0.2 and 0.28, the mean over all tokens of a batch and
    the absent KL term are settings of the update.

    Attributes:
        group_size: chains per prompt; 16 in the authors' recipe.
        max_length: L_max, tokens of the longest answer, 20480 in the recipe; None: no shaping.
        overlong_buffer: B, the last tokens before ``max_length``, in which the penalty grows; 4096
            in the recipe. Given exactly when ``max_length`` is.
        overlong_factor: f, the penalty at ``max_length``.
        singleton: as in ``Grpo``.

    Raises:
        ConfigError: one of ``max_length`` and ``overlong_buffer`` without the other, or out of
            range.
    """

    group_size: int = 16
    max_length: int | None = None
    overlong_buffer: int | None = None
    overlong_factor: float = 1.0
    singleton: GroupOfOne = "raw"
    name: str = "dapo"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def __post_init__(self) -> None:
        longest, buffer = self.max_length, self.overlong_buffer
        if (longest is None) != (buffer is None):
            raise ConfigError("dapo: give both max_length and overlong_buffer, or neither")
        if longest is not None and buffer is not None and not 1 <= buffer <= longest:
            raise ConfigError(
                f"dapo: overlong_buffer {buffer} is outside 1 to max_length {longest}"
            )
        if longest is not None and longest > _LONGEST:
            raise ConfigError(f"dapo: max_length {longest} is more than {_LONGEST}")
        if longest is None and self.overlong_factor != 1.0:
            raise ConfigError("dapo: overlong_factor needs max_length and overlong_buffer")
        if not 0 <= self.overlong_factor < float("inf"):
            raise ConfigError(
                f"dapo: overlong_factor {self.overlong_factor} is not a finite number of at least 0"
            )

    def plan(self, growth: Growth) -> Plan:
        """As GRPO's."""
        return Grpo(group_size=self.group_size).plan(growth)

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """Group-relative advantages of the shaped rewards of each graph."""
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        rewards = graph.reward[graph.terminals]
        if len(rewards) > 1 and (rewards == rewards[0]).all():
            return trajectory_credit(graph, np.zeros(len(rewards)))
        if self.max_length is not None and self.overlong_buffer is not None:
            lengths = np.array([graph.num_tokens[graph.path(v)].sum() for v in graph.terminals])
            rewards = rewards + overlong_penalty(
                lengths, self.max_length, self.overlong_buffer, self.overlong_factor
            )
        return trajectory_credit(graph, group_advantages(rewards, singleton=self.singleton))


def overlong_penalty(
    lengths: NDArray[np.int64], max_length: int, buffer: int, factor: float
) -> FloatArray:
    """What answers of these lengths lose: min(−(len − (L_max − B))/B · f, 0) (DAPO, Eq. 13).

    The paper says −1 beyond L_max; verl's formula, this one, goes on falling there.

    Args:
        lengths: [m] tokens of each response, observations included, as verl counts them; an edge of
            which a file tells nothing counts as one token.
        max_length: L_max.
        buffer: B.
        factor: f.
    """
    beyond = lengths - (max_length - buffer)
    return np.minimum(-beyond / buffer * factor, 0.0)
