"""SPO-chain (arXiv 2505.23564, section 4.1): segments of chains, valued by Monte-Carlo rollouts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.advantages import own_counts
from graphpo_agent.graph.arrays import BoolArray, FloatArray
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.forest import by_layer
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.differences import settled
from graphpo_agent.methods.growth import Branch, Growth, Plan, chains, onward
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten, check_sizes

__all__ = ["SpoChain"]


@dataclass(frozen=True, slots=True)
class SpoChain:
    """SPO with chain-based estimation (arXiv 2505.23564; AIFrameResearch/SPO at b9fc6a2).

    A chain is cut before every ``cut_interval``-th of its tokens that were sampled with less than
    ``max_probability``, the first such token included; if that is the chain's first token, the
    cut is the prompt, whose rollouts serve all chains. From each cut ``rollouts`` continuations to
    the end estimate V. A segment, the tokens from one cut to the next, has A = V(end) − V(start);
    a chain's end has its reward as V. Tokens before the first cut have 0, and so has a chain
    without cuts.

    This is ``math_episode_generator_with_mc_advantages.py``, with the defaults of the run that the
    authors' README shows. The paper instead spreads a fixed number of cuts evenly over the
    uncertain tokens. The code takes the probabilities from a second pass of the policy, this one
    from the recorded log-probabilities; and it shares the prompt's rollouts only among chains that
    are cut there, which makes no difference to any trained token. Whitening over the trained
    tokens of the batch follows in the code (``whiten="batch"``).

    In a graph a rollout is the edges without a trained token (``num_trained`` 0) below a node of
    a chain, and the mean reward of their terminals is that node's V. Where chains fork, the end of
    a segment is worth the mean over the forks. An edge that no reward follows has no advantage
    (NaN) and is not trained; rollouts have none either.

    Attributes:
        num_chains: chains per prompt.
        rollouts: rollouts per cut; 4 in the authors' configurations for Qwen.
        cut_interval: 1 cuts before every uncertain token.
        max_probability: tokens sampled with at least this probability are not cut before and not
            trained. A token whose log-probability is not recorded is trained.
        cut: ``token``, or ``edge``: cut only where an edge begins that holds an uncertain token,
            counting such edges instead of tokens.

    Raises:
        ConfigError: a number out of range.
    """

    num_chains: int = 8
    rollouts: int = 9
    cut_interval: int = 5
    max_probability: float = 0.9
    cut: Literal["token", "edge"] = "token"
    name: str = "spo_chain"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def __post_init__(self) -> None:
        check_sizes(
            "spo_chain",
            num_chains=self.num_chains,
            rollouts=self.rollouts,
            cut_interval=self.cut_interval,
        )
        if not 0 < self.max_probability <= 1:
            raise ConfigError(
                f"spo_chain: max_probability {self.max_probability} is outside (0, 1]"
            )

    def plan(self, growth: Growth) -> Plan:
        """The chains; when all have ended, rollouts from their cuts; then more chains.

        Chains that fill a budget are cut too, as far as the budget goes. A chain that was stopped
        early is not. The memory holds the ids of the terminals whose chains were cut.
        """
        if growth.layer == 1:
            return Plan((Branch(0, self.num_chains),), memory=frozenset[int]())
        if len(growth.active):
            return onward(growth, growth.memory)
        graph: RolloutGraph = growth.graph
        ends = graph.terminals[graph.num_trained[graph.terminals] > 0]
        new = [v for v in ends.tolist() if graph.node_ids[v] not in growth.memory]
        cuts = dict.fromkeys(branch for v in new for branch in self._cuts(graph, v))
        if _estimates(graph)[graph.parent == 0].any():  # the prompt's rollouts serve all chains
            cuts = {branch: None for branch in cuts if branch.node}
        memory = growth.memory | {int(graph.node_ids[v]) for v in new}
        return Plan(tuple(cuts) or chains(growth, 0), memory=memory)

    def _cuts(self, graph: RolloutGraph, terminal: int) -> list[Branch]:
        spots = list(self._uncertain(graph, graph.path(terminal)))
        if self.cut == "edge":
            spots = [(v, 0) for v in dict.fromkeys(v for v, _ in spots)]
        return [
            Branch(
                node=v if offset else int(graph.parent[v]),
                count=self.rollouts,
                offset=offset or None,
                value_only=True,
            )
            for v, offset in spots[:: self.cut_interval]
        ]

    def _uncertain(self, graph: RolloutGraph, path: list[int]) -> Iterator[tuple[int, int]]:
        """(edge, place in it) of the uncertain tokens along a path that can be sampled anew."""
        for v in path:
            here = graph.span(v)
            sampled = graph.loss_mask[here]
            low = sampled & (np.exp(graph.logprobs[here]) < np.float32(self.max_probability))
            for offset in np.flatnonzero(low).tolist():
                if offset == 0 or sampled[offset - 1]:
                    yield v, offset

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """Differences of values along each chain, every edge of it trained once."""
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        estimate = _estimates(graph)
        value = _values(graph, estimate)
        advantage = _differences(graph, estimate, value)
        return Credit(
            classes=np.arange(graph.num_nodes),
            advantages=advantage[None],
            columns={"score": value, "advantage": advantage},
            untrained=(np.exp(graph.logprobs) >= np.float32(self.max_probability))
            | np.repeat(np.isnan(advantage), np.diff(graph.offsets)),
        )


def _estimates(graph: RolloutGraph) -> BoolArray:
    """[n] nodes that a rollout reached which is not trained."""
    estimate = (graph.num_trained == 0) & (graph.parent >= 0)
    for nodes in by_layer(graph.depth)[1:]:
        estimate[nodes] |= estimate[graph.parent[nodes]]
    return estimate


def _values(graph: RolloutGraph, estimate: BoolArray) -> FloatArray:
    """[n] V of each node: a terminal's reward, the mean reward of a node's rollouts, else NaN."""
    n = graph.num_nodes
    total, count = own_counts(graph.parent, graph.depth, graph.terminal & estimate, graph.reward)
    first = np.flatnonzero(estimate & ~estimate[graph.parent])
    rewards = np.bincount(graph.parent[first], total[first], n)
    ends = np.bincount(graph.parent[first], count[first], n)
    value = np.where(graph.terminal, graph.reward, np.nan)
    return np.divide(rewards, ends, out=value, where=ends > 0)


def _differences(graph: RolloutGraph, estimate: BoolArray, value: FloatArray) -> FloatArray:
    """[n] A of each edge of a chain: the next known V below it less the last one above it."""
    n, parent, layers = graph.num_nodes, graph.parent, by_layer(graph.depth)
    end = value.copy()
    for nodes in layers[:0:-1]:
        known = nodes[~np.isnan(end[nodes])]
        total = np.bincount(parent[known], end[known], n)
        count = np.bincount(parent[known], minlength=n)
        open_ends = np.isnan(end) & (count > 0)
        end[open_ends] = total[open_ends] / count[open_ends]
    start = np.full(n, np.nan)
    for nodes in layers[1:]:
        above = parent[nodes]
        start[nodes] = np.where(np.isnan(value[above]), start[above], value[above])
    advantage = np.where(np.isnan(start), 0.0, settled(end - start))
    return np.where(estimate | np.isnan(end) | (parent < 0), np.nan, advantage)
