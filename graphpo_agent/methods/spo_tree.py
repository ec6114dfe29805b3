"""SPO-tree: every segment is worth what it adds to the value of its state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.advantages import Singleton, inherit_advantages
from graphpo_agent.graph.arrays import BoolArray, FloatArray
from graphpo_agent.graph.budget import check_schedule
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.differences import settled
from graphpo_agent.methods.growth import Growth, Plan
from graphpo_agent.methods.layered import layer_plan, nested_means
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten

__all__ = ["SpoTree"]

_EPSILON = 1e-8  # added to the siblings' standard deviation before dividing by it


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

    In the authors' trees the last layer goes on to the end of the answer as one edge. Here it goes
    on edge by edge, and V is the same along edges that have no siblings: with ``singleton`` at
    "inherit" they have the A of the edge that they go on from, which makes all of them one edge.

    Not part of this: the replay buffer, which hands the trainer at most 32 edges of a question in
    an iteration and drops edges after 8 iterations. Here a batch trains all edges of its trees.

    Attributes:
        schedule: continuations of a state by layer, one beyond; 6,6,6 in most of the authors'
            configurations.
        normalize: "std" divides A by (standard deviation of the siblings' V + 1e-8).
        singleton: A of an edge without siblings that have a value: 0, what its V says, or that of
            the edge before it (0 below a root).
        drop_zero: edges with A = 0 carry no loss.
        max_probability: tokens whose behaviour probability is at least this carry no loss; None:
            all tokens do. A token whose log-probability is not recorded is not masked.

    Raises:
        ConfigError: a bad schedule, or a probability outside (0, 1].
    """

    schedule: tuple[int, ...] = (6, 6, 6)
    normalize: Literal["none", "std"] = "none"
    singleton: Singleton = "inherit"
    drop_zero: bool = True
    max_probability: float | None = 0.9
    name: str = "spo_tree"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

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
        advantage = _differences(graph, value, self.normalize, self.singleton)
        dropped = np.isnan(advantage)
        if self.drop_zero:
            dropped |= advantage == 0.0
        return Credit(
            classes=np.arange(graph.num_nodes),
            advantages=advantage[None],
            columns={"score": value, "advantage": advantage},
            untrained=self._untrained(graph, dropped),
            dropped=dropped,
        )

    def _untrained(self, graph: RolloutGraph, dropped: BoolArray) -> BoolArray:
        """[num_tokens] tokens without loss."""
        untrained = np.repeat(dropped, np.diff(graph.offsets))
        if self.max_probability is not None:
            untrained |= np.exp(graph.logprobs) >= np.float32(self.max_probability)
        return untrained


def _differences(
    graph: RolloutGraph,
    value: FloatArray,
    normalize: Literal["none", "std"],
    singleton: Singleton,
) -> FloatArray:
    """[n] A of the edge to each node; NaN at the root and where V is undefined."""
    above = graph.parent[1:]
    differences = settled(value - value[graph.parent])
    differences[0] = np.nan
    known = ~np.isnan(value[1:])
    siblings = np.bincount(above, known, graph.num_nodes)
    if normalize == "std":
        # The parent's V is the mean over the siblings, so their deviations are the differences.
        squares = np.where(known, differences[1:] ** 2, 0.0)
        variance = np.bincount(above, squares, graph.num_nodes) / np.maximum(siblings, 1)
        differences[1:] /= np.sqrt(variance)[above] + _EPSILON
    if singleton == "inherit":
        lone = 1 + np.flatnonzero(known & (siblings[above] == 1))
        inherit_advantages(differences, graph.parent, lone)
    return differences
