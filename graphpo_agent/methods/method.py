"""What a method is: how to grow a graph and how to credit it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.budget import Allocation
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = ["Credit", "Method"]


@dataclass(frozen=True, slots=True)
class Credit:
    """What a method says each edge of one graph is worth.

    Attributes:
        classes: [n] int64, the smallest member (position) of each node's equivalence class.
        advantages: [num_terms, n] float64, NaN at the root; what the trainer uses.
        columns: per-node values to show, by the names of the score file, root included.
        trajectory_advantages: [num_terminals] in leaf order, for methods whose advantage belongs
            to a trajectory; None for methods with edge advantages.
    """

    classes: NDArray[np.int64]
    advantages: NDArray[np.float64]
    columns: Mapping[str, NDArray[np.float64]] = field(
        default_factory=dict[str, NDArray[np.float64]]
    )
    trajectory_advantages: NDArray[np.float64] | None = None

    @property
    def has_signal(self) -> bool:
        """Whether any edge has an advantage other than 0."""
        return bool(np.any(np.nan_to_num(self.advantages) != 0.0))


class Method(Protocol):
    """An expansion policy and a credit; the trainer knows no more of a method than this."""

    @property
    def name(self) -> str:
        """As in configurations and score files."""
        ...

    @property
    def merging(self) -> MergeOptions:
        """Which states are taken as the same, while growing and when crediting."""
        ...

    @property
    def needs_states(self) -> bool:
        """Whether growing or crediting looks at the nodes' states at all."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """Policy tokens per prompt after which no further layer is grown."""
        ...

    def allocate(
        self,
        graph: RolloutGraph,
        classes: NDArray[np.int64],
        active: NDArray[np.int64],
        layer: int,
        carried: int,
    ) -> Allocation:
        """Continuations of each active node in ``layer`` (1 is the first below the root)."""
        ...

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """The advantages of a batch of graphs."""
        ...
