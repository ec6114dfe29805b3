"""The process-reward baseline: GRPO's chains, judged by a process reward model as well."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError, GraphError
from graphpo_agent.graph.advantages import z_scores
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Growth, Plan
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten
from graphpo_agent.methods.rows import trajectory_credit

__all__ = ["Prm", "Steps"]

Steps = Literal["response", "edges"]


@dataclass(frozen=True, slots=True)
class Prm:
    """Chains whose rewards are a process reward model's scores s and the verifier's R together.

    Both kinds read ``graph.step_scores``. A trajectory that lacks one it needs (the model could not
    be asked, or the answer was too long for it) is not trained and belongs to no group.

    ``steps="response"``, as ReasonFlux-PRM's code trains (``compute_rm_score``): the response is
    one step, whose score stands on the terminal. Its reward is 0.75 s + 0.25 R, and its advantage
    the z-score of that among the graph's trajectories, as in ``Grpo``. The paper's reward of
    weighted step and trajectory scores is not in that code.

    ``steps="edges"``, process supervision with GRPO (DeepSeekMath, section 4.1.3): every edge is a
    step with a score. An edge's reward is its s, but the last one's 0.75 s + 0.25 R: the paper has
    no verifier beside the model. The rewards of all edges of all trajectories, an edge counted once
    for each that runs through it, are normalised together, (r − mean)/(std + 1e-6) with ddof 1, 0
    where they all agree, while a single one stays as it is (as in ``Grpo``); the advantage of an
    edge is the sum of the normalised rewards from it to the end of its trajectory. Of several
    trajectories through an edge it takes the mean; on chains there is one. The paper names neither
    ddof nor 1e-6.

    Attributes:
        group_size: chains per prompt; 6 in ReasonFlux-PRM's script.
        steps: what the model was shown as a step.
        prm_weight: the weight of s, 0 to 1; 0.75 in ReasonFlux-PRM's code.

    Raises:
        ConfigError: ``prm_weight`` outside its range.
    """

    group_size: int = 6
    steps: Steps = "response"
    prm_weight: float = 0.75
    name: str = "prm"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def __post_init__(self) -> None:
        if not 0 <= self.prm_weight <= 1:
            raise ConfigError(f"prm: prm_weight {self.prm_weight} is outside [0, 1]")

    def plan(self, growth: Growth) -> Plan:
        """As GRPO's."""
        return Grpo(group_size=self.group_size).plan(growth)

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """Advantages from step scores and rewards."""
        return [self._credit(graph) for graph in graphs]

    def check_scores(self, graphs: Sequence[RolloutGraph]) -> None:
        """Raise GraphError where trajectories are finished and none of them has its scores."""
        finished = [graph for graph in graphs if len(graph.terminals)]
        if finished and not any(self._scored(graph).any() for graph in finished):
            where = "each edge of a trajectory" if self.steps == "edges" else "the terminals"
            raise GraphError(
                f"graph {finished[0].id!r}: method prm needs the scores of a process reward model "
                f"(field `step_score` of {where})"
            )

    def _paths(self, graph: RolloutGraph) -> list[list[int]]:
        """The nodes that the scores of each finished trajectory stand on."""
        leaves = graph.terminals.tolist()
        return [graph.path(v) if self.steps == "edges" else [v] for v in leaves]

    def _scored(self, graph: RolloutGraph) -> NDArray[np.bool_]:
        """[num_terminals] whether a trajectory has all its scores; one without an edge has none."""
        scores = [graph.step_scores[path] for path in self._paths(graph)]
        return np.array([len(own) > 0 and not np.isnan(own).any() for own in scores], np.bool_)

    def _credit(self, graph: RolloutGraph) -> Credit:
        leaves, paths, scored = graph.terminals, self._paths(graph), self._scored(graph)
        rewards = [graph.step_scores[path] for path in paths]
        for outcome, steps in zip(graph.reward[leaves].tolist(), rewards, strict=True):
            steps[-1:] = self.prm_weight * steps[-1:] + (1 - self.prm_weight) * outcome
        if self.steps == "edges":
            return _edge_credit(graph, leaves[scored], paths, rewards, scored)
        of_trajectory = np.full(len(leaves), np.nan)
        of_trajectory[scored] = z_scores(np.array([steps[-1] for steps in rewards])[scored])
        return trajectory_credit(graph, of_trajectory)


def _edge_credit(
    graph: RolloutGraph,
    rows: NDArray[np.int64],
    paths: Sequence[Sequence[int]],
    rewards: Sequence[NDArray[np.float64]],
    scored: NDArray[np.bool_],
) -> Credit:
    """The credit of normalised rewards that are summed up to the end of each scored path."""
    trained = [i for i, known in enumerate(scored.tolist()) if known]
    group = z_scores(np.concatenate([np.zeros(0), *(rewards[i] for i in trained)]))
    total, count = np.zeros(graph.num_nodes), np.zeros(graph.num_nodes)
    start = 0
    for i in trained:
        own = group[start : start + len(paths[i])]
        total[paths[i]] += own[::-1].cumsum()[::-1]
        count[paths[i]] += 1
        start += len(own)
    advantage = total / np.maximum(count, 1)
    advantage[0] = np.nan
    return Credit(
        classes=np.arange(graph.num_nodes),
        advantages=advantage[None],
        columns={"advantage": advantage},
        rows=rows,
    )
