"""Tree-GRPO: several trees per prompt, leaves compared within their tree and among all trees."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph, default_trees
from graphpo_agent.methods.growth import Branch, Growth, Plan, onward, steady_chains
from graphpo_agent.methods.grpo import GroupOfOne, group_advantages
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten, check_sizes
from graphpo_agent.methods.rows import trajectory_credit

__all__ = ["TreeGrpo", "names_trees"]


@dataclass(frozen=True, slots=True)
class TreeGrpo:
    """Tree-GRPO (AMAP-ML/Tree-GRPO at 90b1709), its advantage estimator ``tree``.

    M chains are the trunks of M trees. Then, L times: of each tree N nodes are drawn uniformly with
    replacement from the prompt and the tree's nodes that have children, and one full continuation
    is made of each. That makes 1 + N·L leaves in a tree.

    A trained leaf has A = z_prompt(R) + z_tree(R), on all its tokens; z = (R − mean)/(std + 1e-6),
    std with ddof 1, over the trained leaves of all trees of the prompt and of the leaf's own tree.
    As released, equal rewards give 0, and in a tree with one trained leaf z_tree is the leaf's
    raw reward (mean 0, standard deviation 1); so is z_prompt where a prompt has one trained leaf.

    The code prunes all but K leaves of a tree before it computes anything, so the others count in
    no mean. It fails on a tree with fewer than K; here these are all trained. The draw depends on
    the graph alone (its shape and tokens), so that a graph always keeps the same leaves.

    Attributes:
        trees: M; 2 in the authors' scripts.
        expansions: N; 2 in the scripts.
        rounds: L; 1 in the scripts.
        kept: K; None: all leaves, which is what the scripts' K of 3 = 1 + N·L comes to.
        singleton: z of the only trained leaf of a tree or a prompt: its reward, or 0. The chains
            that use up a budget are trees of one leaf.

    Raises:
        ConfigError: a number out of range.
    """

    trees: int = 2
    expansions: int = 2
    rounds: int = 1
    kept: int | None = None
    singleton: GroupOfOne = "raw"
    name: str = "tree_grpo"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def __post_init__(self) -> None:
        check_sizes("tree_grpo", trees=self.trees, expansions=self.expansions, kept=self.kept)
        check_sizes("tree_grpo", least=0, rounds=self.rounds)

    def plan(self, growth: Growth) -> Plan:
        """The trunks, then a round of expansions whenever all paths have ended.

        The plan's memory is the number of rounds so far, what fills a budget counted as one.
        """
        if growth.layer == 1:
            return Plan((Branch(0, self.trees),), memory=0)
        if len(growth.active) and growth.memory <= self.rounds:
            return onward(growth, growth.memory)
        if growth.memory >= self.rounds:
            return steady_chains(growth, 0, memory=self.rounds + 1)
        return Plan(self._expand(growth), memory=growth.memory + 1)

    def _expand(self, growth: Growth) -> list[Branch]:
        graph = growth.graph
        has_children = graph.num_children > 0
        branches: list[Branch] = []
        rng = np.random.default_rng(growth.seed)
        for tree in np.unique(graph.tree[1:]).tolist():
            nodes = np.append(0, np.flatnonzero(has_children & (graph.tree == tree)))
            drawn = rng.choice(nodes, self.expansions).tolist()
            branches += [Branch(v, tree=tree) for v in drawn]
        return branches

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """One advantage per trained leaf.

        Raises:
            GraphError: only some nodes have a tree number.
        """
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        rewards = graph.reward[graph.terminals]
        advantages = np.full(len(rewards), np.nan)
        groups = self._trained(graph, _tree_numbers(graph))
        if groups:
            trained = np.concatenate(groups)
            advantages[trained] = group_advantages(rewards[trained], singleton=self.singleton)
        for group in groups:
            advantages[group] += group_advantages(rewards[group], singleton=self.singleton)
        return trajectory_credit(graph, advantages)

    def _trained(self, graph: RolloutGraph, trees: IntArray) -> list[IntArray]:
        """Of each tree with terminals, which of the graph's terminals are trained."""
        tree = trees[graph.terminals]
        rng = np.random.default_rng(_digest(graph, trees))
        groups: list[IntArray] = []
        for number in np.unique(tree).tolist():
            group = np.flatnonzero(tree == number)
            if self.kept is not None and len(group) > self.kept:
                group = np.sort(rng.choice(group, self.kept, replace=False))
            groups.append(group)
        return groups


def names_trees(graph: RolloutGraph) -> bool:
    """Whether any node below the root has the number of its tree."""
    return bool((graph.tree[1:] >= 0).any())


def _tree_numbers(graph: RolloutGraph) -> IntArray:
    """[n] the tree of each node; in a graph without any, one tree under each child of the root.

    Raises:
        GraphError: some nodes below the root have a number and others have not.
    """
    if not names_trees(graph):
        return default_trees(graph.parent, graph.tree)
    known = graph.tree[1:] >= 0
    if not known.all():
        lacking = graph.node_ids[1 + known.argmin()]
        raise GraphError(
            f"graph {graph.id!r}, node {lacking}: method tree_grpo needs the number of its tree "
            "(field `tree`), which other nodes have: give it to all nodes below the root or to none"
        )
    return graph.tree


def _digest(graph: RolloutGraph, trees: IntArray) -> int:
    """A number made of a graph's shape and tokens, but not of its id or rewards."""
    digest = blake2b(digest_size=8)
    for part in (graph.parent, trees, graph.offsets, graph.token_ids):
        digest.update(part.tobytes())
    return int.from_bytes(digest.digest(), "little")
