"""PROS: GRPO from prompts that may already hold the beginning of an earlier right answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Growth, Plan
from graphpo_agent.methods.grpo import GroupOfOne, Grpo
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten
from graphpo_agent.methods.prefix_pool import PoolOptions

__all__ = ["Pros"]


@dataclass(frozen=True, slots=True)
class Pros:
    """GRPO in the group of each prompt, with or without a prefix (PROS, section 2).

    Where a prompt begins is chosen outside, by a ``PrefixPool`` that lives as long as the run. A
    prefix is the end of the root: it has no loss, and neither lengths nor advantages count it. In
    agent mode a prefix is whole turns (``pool.cut`` is ``edge``).

    Its code is not public; it is followed from descriptions of the paper.

    Attributes:
        group_size: chains per prompt; the paper's 8.
        pool: of prefixes.
        normalize: as in ``Grpo``.
        singleton: as in ``Grpo``.
    """

    group_size: int = 8
    pool: PoolOptions = field(default_factory=PoolOptions)
    normalize: Literal["std", "none"] = "std"
    singleton: GroupOfOne = "raw"
    name: str = "pros"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def plan(self, growth: Growth) -> Plan:
        """As GRPO's."""
        return self._grpo().plan(growth)

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """As GRPO's."""
        return self._grpo().assign_credit(graphs, classes)

    def _grpo(self) -> Grpo:
        return Grpo(self.group_size, self.normalize, self.singleton)
