"""TreePO: a tree of segments of limited width, each leaf compared within all its subtrees."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.advantages import own_counts
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.differences import settled
from graphpo_agent.methods.growth import Branch, Growth, Plan, onward, steady_chains
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten, check_sizes
from graphpo_agent.methods.rows import trajectory_credit

__all__ = ["TreePO"]


@dataclass(frozen=True, slots=True)
class TreePO:
    """TreePO (multimodal-art-projection/TreePO at f055523).

    Growth, ``generate_sequences_tree_deepth_first_vanilla_mode``: every path is continued
    ``divergence`` times per segment, up to ``width`` paths in all. A path that ends leaves its
    share to the others. Where all paths have ended before the width is reached, finished ones are
    taken up again at a random earlier state, the prompt included; where none is finished, the
    prompt is. Two things are meant otherwise than they work in that code, and are here as meant:
    it records such a path as cut at the drawn state, but lets the engine go on from the last state
    before the end; and its settings for a first divergence of 2 to 8 and for a window of places to
    take a path up again have no effect or stop the run, so they are left out. A path is finished
    here where it has a reward; the code can also ask for an answer before the end of its text.

    Credit, ``compute_tree_reinforce_plus_plus_baseline_outcome_advantage``: for every state on the
    way to a leaf, from the prompt (d = 0) to the leaf's parent, R − the mean reward of the leaves
    below that state. Below the prompt, states with one leaf are left out; a prompt with one leaf
    gives the raw reward (its mean counts as 0). A is the mean of these terms, on all tokens of the
    leaf's row. The trainer that the authors' script runs makes the whole prompt the group of d = 0;
    the other one in the repository, through a missing separator, the first segment. Whitening over
    all tokens of the batch follows in the code (``whiten="batch"``).

    Attributes:
        width: paths per prompt.
        divergence: continuations of each path per segment.
        aggregate: the plain mean of the terms (the script), or their mean weighted with the number
            of leaves of each state (the function's default).

    Raises:
        ConfigError: a number out of range.
    """

    width: int = 16
    divergence: int = 2
    aggregate: Literal["average", "group_size"] = "average"
    name: str = "treepo"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def __post_init__(self) -> None:
        check_sizes("treepo", width=self.width, divergence=self.divergence)

    def plan(self, growth: Growth) -> Plan:
        """Divide the width that is left among the active paths, or fall back.

        The memory says whether the width is reached and the rest of a budget is being filled.
        """
        if growth.layer == 1:
            return Plan((Branch(0, min(self.divergence, self.width)),))
        if growth.memory:
            return steady_chains(growth, 0, memory=True)
        active = growth.active.tolist()
        room = self.width - (len(growth.graph.leaves) - len(active))
        if active:
            plan = onward(growth)
            if room <= len(active):
                return plan
            wanted = self.divergence * len(growth.reached)  # ended paths hand on their share
            each, rest = divmod(max(len(active), min(room, wanted)), len(active))
            going = [branch.node for branch in plan.branches]
            branches = [Branch(v, each + (rest if v == active[-1] else 0)) for v in going]
            return Plan(branches, waiting=plan.waiting)
        return Plan(self._fall_back(growth, room)) if room > 0 else steady_chains(growth, 0, True)

    def _fall_back(self, growth: Growth, room: int) -> list[Branch]:
        """From earlier states of finished paths, in random order, until the width is reached."""
        branches: list[Branch] = []
        rng = np.random.default_rng(growth.seed)
        for leaf in rng.permutation(growth.graph.terminals).tolist():
            earlier = [0, *growth.graph.path(leaf)[:-1]]
            if room > 0:
                node = earlier[rng.integers(len(earlier))]
                branches.append(Branch(node, min(self.divergence, room)))
                room -= branches[-1].count
        return branches or [Branch(0, min(self.divergence, room))]

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """One advantage per leaf, before whitening."""
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        correct, total = own_counts(graph.parent, graph.depth, graph.terminal, graph.reward)
        baseline = np.divide(correct, total, out=np.zeros(graph.num_nodes), where=total > 1)
        advantages = np.zeros(len(graph.terminals))
        for i, leaf in enumerate(graph.terminals.tolist()):
            above = np.array([0, *graph.path(leaf)[:-1]])
            above = above[(total[above] > 1) | (above == 0)]
            weights = total[above] if self.aggregate == "group_size" else None
            advantages[i] = np.average(graph.reward[leaf] - baseline[above], weights=weights)
        return trajectory_credit(graph, settled(advantages))
