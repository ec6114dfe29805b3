"""TreeRPO: every step is compared with its siblings by the reward expected after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.advantages import Singleton, correctness_advantage
from graphpo_agent.graph.budget import check_schedule
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Growth, Plan
from graphpo_agent.methods.layered import layer_plan, nested_means
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten

__all__ = ["TreeRpo"]


@dataclass(frozen=True, slots=True)
class TreeRpo:
    """Tree Relative Policy Optimization (arXiv 2506.05183), from descriptions of the paper.

    An N-ary tree of steps; a leaf is worth its verified reward, a state the mean over its children;
    the children of one state are a group, and GRPO's advantage compares their values: A =
    (V − mean)/(std + 1e-6), std with ddof 1, 0 in a group of one or of equal values. Each edge is
    trained once. An edge below which no path ended has no advantage (NaN) and is not trained.

    Not verified, since the authors' code is not public and the paper's details were not at hand:
    N and the depth (the default here makes 64 leaves), the step length, the normaliser of a group
    (the paper treats values between 0 and 1 apart from 0/1 rewards), the ε, what a group of one
    gets, and which groups are pruned. Compare no number of the paper with this.

    Attributes:
        schedule: N of each layer, one beyond.
        normalize: "none" centres only.
        singleton: A in a group of one: 0, or that of the edge before (0 below a root), which makes
            edges without siblings one step with the edge that they go on from.

    Raises:
        ConfigError: a bad schedule.
    """

    schedule: tuple[int, ...] = (4, 4, 4)
    normalize: Literal["std", "none"] = "std"
    singleton: Singleton = "inherit"
    name: str = "treerpo"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def __post_init__(self) -> None:
        check_schedule(self.schedule)

    def plan(self, growth: Growth) -> Plan:
        """Layers by schedule, then one continuation of each path."""
        return layer_plan(growth, self.schedule)

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """Advantages among siblings; ``score`` is V."""
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        value = nested_means(graph)
        own_class = np.arange(graph.num_nodes)
        advantage = correctness_advantage(
            graph.parent,
            own_class,
            np.where(graph.parent >= 0, value, np.nan),
            np.zeros(graph.num_nodes, np.int64),
            singleton=self.singleton,
            normalize=self.normalize,
        )
        advantage[np.isnan(value)] = np.nan
        return Credit(
            classes=own_class,
            advantages=advantage[None],
            columns={"score": value, "advantage": advantage},
            untrained=np.repeat(np.isnan(advantage), np.diff(graph.offsets)),
        )
