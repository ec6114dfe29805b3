"""TreeRL (arXiv 2506.11902): trees forked at unlikely tokens, edges credited by their leaves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import cycle, islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.advantages import own_counts
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.forest import by_layer
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.differences import settled
from graphpo_agent.methods.growth import Branch, Growth, Plan, onward, steady_chains
from graphpo_agent.methods.method import UNMERGED, Credit, Whiten, check_sizes

__all__ = ["TreeRL"]

_LAST_WORDS = ("conclusion", "answer")  # nothing is forked after a token that holds one of them
_NO_DIFFERENCE = 1e-8  # a local advantage below that is taken from the edge before


@dataclass(frozen=True, slots=True)
class TreeRL:
    """TreeRL (arXiv 2506.11902; THUDM/TreeRL at f0edbea), the settings of its script as defaults.

    Growth (EPTree): ``trees`` chains from the prompt, then ``rounds`` times: in each tree the
    ``forks`` tokens with the highest −log p are sampled anew, ``copies`` times each and to the
    end, which makes trees · (1 + forks · copies · rounds) leaves. The first token of such a branch
    is never forked, nor is what follows the first token of a chain or branch whose text holds
    "conclusion" or "answer". A token that was forked can be so again, and a branch with fewer
    tokens than ``forks`` offers them repeatedly, both as released.

    Credit: over all N leaves of the prompt R̃(l) = R(l) − (mean reward of the other leaves); V(v)
    is the mean of R̃ below v; U(v) = V(v)/√s(v), s(v) counting the trained leaves below v; and
    A(v) = U(v) + (U(v) − U(parent)). Below the first edge, a difference U(v) − U(parent) smaller
    than 1e-8 is replaced by that of the edge before. An edge that leads to no trained leaf has no
    advantage (NaN), and a prompt with fewer than two leaves trains nothing (the released code
    stops there). An early-stopped leaf counts nowhere.

    This is ``entropy_chain_local_manager.py``, ``tree_node.py`` and ``parallel_mcts.py``, but for
    three things: there a trained trajectory that ran out of length has −1 on all its tokens, which
    cannot be done here, since a graph does not tell why a path ended; tokens of a branch beyond
    the 7144th are not forked; and a fork of a chain's first token hangs under an empty node of its
    tree, here under the root.

    Attributes:
        trees: M.
        forks: N, per tree and round.
        rounds: L.
        copies: T.
        fork: ``token``, or ``edge``: the edges that hold the unlikeliest tokens are sampled anew
            from their beginning; the first edge of a branch is then never forked.
        select: how many leaves are trained, one with reward 1 among them if there is one, the
            others drawn uniformly by the graph's content; all where there are no more than that
            (the released code stops if there are less). None: all.
        weighting: ``sqrt``, or ``uniform``: U = V/s, a switch of the released code. ``paper``: its
            equations, V(v) the mean reward below v (less V(root) in the column ``score``) and
            A = (V(v) − V(root) + V(v) − V(parent))/√n with all n leaves below v, nothing replaced:
            for edges that end where something forks.

    Raises:
        ConfigError: a number out of range.
    """

    trees: int = 6
    forks: int = 2
    rounds: int = 1
    copies: int = 2
    fork: Literal["token", "edge"] = "token"
    select: int | None = 16
    weighting: Literal["sqrt", "uniform", "paper"] = "sqrt"
    name: str = "treerl"
    needs_states: bool = False
    whiten: Whiten = "none"
    merging: MergeOptions = UNMERGED

    def __post_init__(self) -> None:
        check_sizes(
            "treerl", trees=self.trees, forks=self.forks, copies=self.copies, select=self.select
        )
        check_sizes("treerl", least=0, rounds=self.rounds)

    def plan(self, growth: Growth) -> Plan:
        """The trunks, then round after round of forks, each grown to its end.

        The memory counts the rounds, what fills a budget as one more.
        """
        if growth.layer == 1:
            return Plan((Branch(0, self.trees),), memory=0)
        if len(growth.active) and growth.memory <= self.rounds:
            return onward(growth, growth.memory)
        if growth.memory < self.rounds:
            forks = self._forks(growth)
            if forks:
                return Plan(forks * self.copies, memory=growth.memory + 1)
        return steady_chains(growth, 0, memory=self.rounds + 1)

    def _forks(self, growth: Growth) -> tuple[Branch, ...]:
        """One continuation of each place to fork, tree by tree."""
        graph = growth.graph
        heads = _heads(graph)
        offered: dict[int, list[_Place]] = {}
        for places in self._places(graph, heads, _open_tokens(graph, heads, growth.decode)):
            tree = int(graph.tree[places[0].edge])
            offered.setdefault(tree, []).extend(islice(cycle(_unlikeliest(places)), self.forks))
        return tuple(
            place.branch(graph)
            for tree in sorted(offered)
            for place in _unlikeliest(offered[tree])[: self.forks]
        )

    def _places(
        self, graph: RolloutGraph, heads: IntArray, open_tokens: BoolArray
    ) -> list[list["_Place"]]:
        """Of each chain and branch that has any, the places where it can be forked."""
        branches: dict[int, list[_Place]] = {}
        begins_branch = _branch_beginnings(graph, heads)
        for v in range(1, graph.num_nodes):
            start, end = graph.offsets[v : v + 2].tolist()
            tokens = start + np.flatnonzero(open_tokens[start:end])
            tokens = tokens[np.argsort(graph.logprobs[tokens], kind="stable")[: self.forks]]
            found = [_Place(-float(graph.logprobs[t]), v, t - start) for t in tokens.tolist()]
            if self.fork == "edge":
                found = [] if begins_branch[v] else [replace(p, offset=0) for p in found[:1]]
            if found:
                branches.setdefault(int(heads[v]), []).extend(found)
        return list(branches.values())

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """Advantages of the edges on the paths to the trained leaves; a row per such leaf."""
        return [self._credit(graph) for graph in graphs]

    def _credit(self, graph: RolloutGraph) -> Credit:
        rows = _selected(graph, self.select)
        value = _state_values(graph, leave_one_out=self.weighting != "paper")
        advantage = self._advantage(graph, value, rows)
        return Credit(
            classes=np.arange(graph.num_nodes),
            advantages=advantage[None],
            columns={"score": value, "advantage": advantage},
            rows=rows,
        )

    def _advantage(self, graph: RolloutGraph, value: FloatArray, rows: IntArray) -> FloatArray:
        trained = np.zeros(graph.num_nodes, np.bool_)
        trained[rows] = True
        rows_below = _leaves_below(graph, trained)
        if self.weighting == "paper":
            gain = value - value[graph.parent]
            advantage = (value + gain) / np.sqrt(
                np.maximum(_leaves_below(graph, graph.terminal), 1)
            )
        else:
            power = 0.5 if self.weighting == "sqrt" else 1.0
            scaled = value / np.maximum(rows_below, 1) ** power
            gain = scaled - scaled[graph.parent]
            for nodes in by_layer(graph.depth)[2:]:
                same = nodes[np.abs(gain[nodes]) < _NO_DIFFERENCE]
                gain[same] = gain[graph.parent[same]]
            advantage = scaled + gain
        return np.where((rows_below > 0) & (graph.parent >= 0), advantage, np.nan)


@dataclass(frozen=True, slots=True)
class _Place:
    """A token to be sampled anew: how unlikely it was, its edge and its place in it."""

    surprise: float
    edge: int
    offset: int

    def branch(self, graph: RolloutGraph) -> Branch:
        tree = int(graph.tree[self.edge])
        if self.offset == 0:
            return Branch(int(graph.parent[self.edge]), tree=tree)
        return Branch(self.edge, offset=self.offset, tree=tree)


def _unlikeliest(places: Sequence[_Place]) -> list[_Place]:
    return sorted(places, key=lambda place: -place.surprise)


def _heads(graph: RolloutGraph) -> IntArray:
    """[n] the first node of the chain or branch that each node was sampled in; 0 at the root.

    The oldest of several continuations of a node, which stands before the others, goes on with
    its branch; each of the others begins one, and so do all continuations of the root.
    """
    heads = np.zeros(graph.num_nodes, np.int64)
    continued = np.zeros(graph.num_nodes, np.bool_)
    for v in range(1, graph.num_nodes):
        above = graph.parent[v]
        heads[v] = v if above == 0 or continued[above] else heads[above]
        continued[above] = True
    return heads


def _branch_beginnings(graph: RolloutGraph, heads: IntArray) -> BoolArray:
    """[n] whether a branch begins with a node; the chain that is a tree's trunk is none."""
    begins = heads == np.arange(graph.num_nodes)
    _, trunks = np.unique(graph.tree, return_index=True)
    begins[trunks] = False  # the root is the first of those without a tree
    return begins


def _open_tokens(
    graph: RolloutGraph, heads: IntArray, decode: Callable[[Sequence[int]], str]
) -> BoolArray:
    """[T] sampled tokens that may be forked."""
    texts = {t: decode([t]).lower() for t in np.unique(graph.token_ids[graph.loss_mask]).tolist()}
    last = [t for t, text in texts.items() if any(word in text for word in _LAST_WORDS)]
    ending = graph.loss_mask & np.isin(graph.token_ids, last)
    open_tokens = graph.loss_mask.copy()
    closed = np.zeros(graph.num_nodes, np.bool_)
    begins_branch = _branch_beginnings(graph, heads)
    for v in range(1, graph.num_nodes):
        start, end = graph.offsets[v : v + 2].tolist()
        open_tokens[start + 1 : end] &= graph.loss_mask[start : end - 1]  # else it cannot be cut
        if begins_branch[v]:
            open_tokens[start : start + 1] = False
        if closed[graph.parent[v]]:
            open_tokens[start:end] = False
            closed[v] = True
        elif ending[start:end].any():
            open_tokens[start + int(ending[start:end].argmax()) + 1 : end] = False
            closed[v] = True
    return open_tokens


def _leaves_below(graph: RolloutGraph, leaves: BoolArray) -> FloatArray:
    """[n] how many of some leaves are below each node, itself included."""
    return own_counts(graph.parent, graph.depth, leaves, graph.reward)[1]


def _state_values(graph: RolloutGraph, *, leave_one_out: bool) -> FloatArray:
    """[n] mean centred reward of the terminals below each node; NaN without one.

    A terminal's reward is centred on the mean of the others', or of all. All NaN where there are
    fewer than two.
    """
    rewards = graph.reward[graph.terminals]
    if len(rewards) < 2:
        return np.full(graph.num_nodes, np.nan)
    centred = graph.reward - rewards.mean()
    if leave_one_out:
        centred = graph.reward - (rewards.sum() - graph.reward) / (len(rewards) - 1)
    total, count = own_counts(graph.parent, graph.depth, graph.terminal, settled(centred))
    return np.divide(total, count, out=np.full(graph.num_nodes, np.nan), where=count > 0)


def _selected(graph: RolloutGraph, count: int | None) -> IntArray:
    """Positions of the terminals that are trained, ascending."""
    leaves = graph.terminals
    if len(leaves) < 2:
        return leaves[:0]
    if count is None or count >= len(leaves):
        return leaves
    content = [graph.parent, leaves, graph.reward[leaves], graph.token_ids]
    digest = sha256(b"".join(x.tobytes() for x in content)).digest()

    def shuffled(salt: bytes) -> list[int]:
        return sorted(leaves.tolist(), key=lambda v: sha256(digest + salt + b"%d" % v).digest())

    right = [v for v in shuffled(b"right") if graph.reward[v] == 1.0][:1]
    others = [v for v in shuffled(b"others") if v not in right]
    return np.sort(np.array((right + others)[:count], np.int64))
