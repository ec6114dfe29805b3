"""SPO-tree: every segment is worth what it adds to the value of its state."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.arrays import BoolArray, FloatArray
from graphpo_agent.graph.budget import check_schedule
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Growth, Plan
from graphpo_agent.methods.layered import layer_plan, nested_means
from graphpo_agent.methods.method import Credit, Whiten

__all__ = ["SpoTree"]

_EPSILON = 1e-8  # added to the siblings' standard deviation before dividing by it
_NO_DIFFERENCE = 1e-12  # values this close are the same


@dataclass(frozen=True, slots=True)
class SpoTree:
    """SPO with tree-based estimation (arXiv 2505.23564; AIFrameResearch/SPO at b9fc6a2).

    V of a leaf is its reward, V of a state the mean of V over its children (nested, not the mean
    over leaves), and the edge to v has A = V(v) − V(parent). The authors' code calls this "rloo",
    but leaves nothing out. Each edge is trained once, with its prefix as context.

    Where the authors' code differs from their paper, this follows the code: edges with A = 0 are
    not trained, the division by the siblings' standard deviation (n in the denominator) adds 1e-8,
    and the trainer whitens (``whiten="batch"``) over the tokens that it trains. The code compares
    A with 0 exactly; here differences up to 1e-12, which are rounding, count as 0.

    An edge below which no path ended has no advantage (NaN) and is not trained.

    Not part of this: the replay buffer, which hands the trainer at most 32 edges of a question in
    an iteration and drops edges after 8 iterations. Here a batch trains all edges of its trees.

    Attributes:
        schedule: continuations of a state by layer, one beyond; 6,6,6 in most of the authors'
            configurations.
        normalize: "std" divides A by (standard deviation of the siblings' V + 1e-8).
        drop_zero: edges with A = 0 carry no loss.
        max_probability: tokens whose behaviour probability is at least this carry no loss; None:
            all tokens do. A token whose log-probability is not recorded is not masked.

    Raises:
        ConfigError: a bad schedule, or a probability outside (0, 1].
    """

    schedule: tuple[int, ...] = (6, 6, 6)
    normalize: Literal["none", "std"] = "none"
    drop_zero: bool = True
    max_probability: float | None = 0.9
    name: str = "spo_tree"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = field(default_factory=lambda: MergeOptions(merge="none"))

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        if self.max_probability is not None and not 0 < self.max_probability <= 1:
            raise ConfigError(
                f"spo_tree: max_probability {self.max_probability} is outside (0, 1]; "
                "none trains all tokens"
            )

    def plan(self, growth: Growth) -> Plan:
        """Layers by schedule, then one continuation of each path."""
        return layer_plan(growth, self.schedule)

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """What each edge adds to the value of its state; ``score`` is V."""
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        value = nested_means(graph)
        advantage = _differences(graph, value, self.normalize)
        return Credit(
            classes=np.arange(graph.num_nodes),
            advantages=advantage[None],
            columns={"score": value, "advantage": advantage},
            untrained=self._untrained(graph, advantage),
        )

    def _untrained(self, graph: RolloutGraph, advantage: FloatArray) -> BoolArray:
        """[num_tokens] tokens without loss."""
        without = np.isnan(advantage)
        if self.drop_zero:
            without |= advantage == 0.0
        untrained = np.repeat(without, np.diff(graph.offsets))
        if self.max_probability is not None:
            untrained |= np.exp(graph.logprobs) >= np.float32(self.max_probability)
        return untrained


def _differences(
    graph: RolloutGraph, value: FloatArray, normalize: Literal["none", "std"]
) -> FloatArray:
    """[n] A of the edge to each node; NaN at the root and where V is undefined."""
    above = graph.parent[1:]
    differences = value - value[graph.parent]
    differences[0] = np.nan
    differences[np.abs(differences) <= _NO_DIFFERENCE] = 0.0
    if normalize == "std":
        # The parent's V is the mean over the siblings, so their deviations are the differences.
        known = ~np.isnan(value[1:])
        squares = np.where(known, differences[1:] ** 2, 0.0)
        siblings = np.bincount(above, known, graph.num_nodes)
        variance = np.bincount(above, squares, graph.num_nodes) / np.maximum(siblings, 1)
        differences[1:] /= np.sqrt(variance)[above] + _EPSILON
    return differences
