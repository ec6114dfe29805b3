"""The rollout graph: a struct of arrays (paper, section 3.2).

Node 0 is the root, the prompt. Every other node is a semantic state, and its one direct edge is
the tokens that lead from ``parent[v]`` to ``v``; so an edge is named by the node it leads to.
Arrays end in no suffix where they have one entry per node ``[n]``; ``[T]`` counts tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.arrays import (
    BoolArray,
    EmbeddingArray,
    Float32Array,
    FloatArray,
    IntArray,
)
from graphpo_agent.graph.new_node import NewNode, check_new_node
from graphpo_agent.types import check_lengths

__all__ = ["RolloutGraph", "default_trees"]

Scalar = TypeVar("Scalar", np.int64, np.bool_, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGraph:
    """A prompt's rollout graph. Never changed: ``append`` returns a longer graph.

    Example: a prompt with two first edges, the second continued to a right answer::

        parent   = [-1, 0, 0, 2]
        depth    = [ 0, 1, 1, 2]
        terminal = [ F, T, F, T]
        reward   = [nan, 0., nan, 1.]
        tree     = [-1, 0, 1, 1]

    Attributes:
        id: the graph's name, unique in a file.
        node_ids: [n] ids of the file; 0..n-1 in a graph that was grown here.
        parent: [n] positions, -1 at the root; parents come before children.
        depth: [n] edges from the root.
        terminal: [n] finished answers.
        reward: [n] verified rewards in [0, 1], NaN where not terminal.
        keys: [n] canonical state keys or None.
        states: [n] state texts or None.
        embeddings: [n, d] (float64 where float32 could not hold a file's numbers), zero rows
            where absent; None without any.
        has_embedding: [n].
        step_scores: [n] what a process reward model says of each edge, in [0, 1]; NaN where it
            was not asked.
        tree: [n] number of the tree a node belongs to; -1 where it has none: at a root, and
            where a file does not say.
        given_classes: [n] the file's equivalence classes, each named by the position of its
            member with the smallest id; None unless every node has one.
        offsets: [n + 1]; node v owns the tokens ``offsets[v]:offsets[v + 1]``.
        token_ids: [T], -1 where only the mask or the log-probabilities are known.
        loss_mask: [T] True on tokens the policy sampled; False on the prompt.
        logprobs: [T] behaviour log-probabilities, NaN where not sampled or absent.
        has_tokens: [n] whether the token ids are known.
        num_tokens: [n] tokens of the edge (of the prompt at the root); 1 where nothing is known.
        num_trained: [n] tokens of the edge that carry loss; 0 at the root.
    """

    id: str
    node_ids: IntArray
    parent: IntArray
    depth: IntArray
    terminal: BoolArray
    reward: FloatArray
    keys: tuple[str | None, ...]
    states: tuple[str | None, ...]
    embeddings: EmbeddingArray | None
    has_embedding: BoolArray
    step_scores: FloatArray
    tree: IntArray
    given_classes: IntArray | None
    offsets: IntArray
    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: Float32Array
    has_tokens: BoolArray
    num_tokens: IntArray
    num_trained: IntArray

    def __post_init__(self) -> None:
        check_lengths(
            node_ids=self.node_ids,
            parent=self.parent,
            depth=self.depth,
            terminal=self.terminal,
            reward=self.reward,
            keys=self.keys,
            states=self.states,
            has_embedding=self.has_embedding,
            step_scores=self.step_scores,
            tree=self.tree,
            offsets=self.offsets[1:],
            has_tokens=self.has_tokens,
            num_tokens=self.num_tokens,
            num_trained=self.num_trained,
        )
        check_lengths(token_ids=self.token_ids, loss_mask=self.loss_mask, logprobs=self.logprobs)

    @staticmethod
    def root(
        id: str,
        *,
        token_ids: Sequence[int],
        key: str | None = None,
        state: str | None = None,
        embedding: Float32Array | None = None,
    ) -> "RolloutGraph":
        """The graph of a prompt before anything was sampled.

        Args:
            id: the graph's name.
            token_ids: the rendered prompt.
            key: the canonical state key of the prompt's state.
            state: the text of the prompt's state.
            embedding: [d] of the prompt; decides the novelty of the first edges only.

        Raises:
            GraphError: the embedding holds a number that is not finite.
        """
        tokens = np.asarray(token_ids, np.int64)
        embeddings = None if embedding is None else np.asarray(embedding, np.float32)[None]
        if embeddings is not None:
            _check_finite(embeddings, 0)
        return RolloutGraph(
            id=id,
            node_ids=np.zeros(1, np.int64),
            parent=np.full(1, -1, np.int64),
            depth=np.zeros(1, np.int64),
            terminal=np.zeros(1, np.bool_),
            reward=np.full(1, np.nan),
            keys=(key,),
            states=(state,),
            embeddings=embeddings,
            has_embedding=np.array([embedding is not None]),
            step_scores=np.full(1, np.nan),
            tree=np.full(1, -1, np.int64),
            given_classes=None,
            offsets=np.array([0, len(tokens)], np.int64),
            token_ids=tokens,
            loss_mask=np.zeros(len(tokens), np.bool_),
            logprobs=np.full(len(tokens), np.nan, np.float32),
            has_tokens=np.ones(1, np.bool_),
            num_tokens=np.array([len(tokens)], np.int64),
            num_trained=np.zeros(1, np.int64),
        )

    def append(self, nodes: Sequence[NewNode]) -> "RolloutGraph":
        """This graph with new nodes at its end, in order.

        Raises:
            GraphError: a parent that is terminal or does not come before its child, a reward
                outside [0, 1] or on a node that is not terminal, an embedding of another length or
                with a number that is not finite, a trained token without a log-probability.
        """
        if not nodes:
            return self
        parent = np.concatenate([self.parent, np.array([x.parent for x in nodes], np.int64)])
        terminal = np.concatenate([self.terminal, np.array([x.terminal for x in nodes])])
        depth = np.concatenate([self.depth, np.zeros(len(nodes), np.int64)])
        for v, node in enumerate(nodes, self.num_nodes):
            check_new_node(v, node, terminal)
            depth[v] = depth[node.parent] + 1
        rewards = [np.nan if x.reward is None else x.reward for x in nodes]
        scores = [np.nan if x.step_score is None else x.step_score for x in nodes]
        new_ids = self.node_ids.max() + 1 + np.arange(len(nodes))
        lengths = np.array([len(x.token_ids) for x in nodes], np.int64)
        trained = np.array([sum(x.loss_mask) for x in nodes], np.int64)
        embeddings = _stack_embeddings(self, [x.embedding for x in nodes])
        has_embedding = np.array([x.embedding is not None for x in nodes])
        trees = [-1 if x.tree is None else x.tree for x in nodes]
        tree = np.concatenate([self.tree, np.array(trees, np.int64)])
        return replace(
            self,
            node_ids=np.concatenate([self.node_ids, new_ids]),
            parent=parent,
            depth=depth,
            terminal=terminal,
            reward=np.concatenate([self.reward, np.array(rewards, np.float64)]),
            keys=self.keys + tuple(x.key for x in nodes),
            states=self.states + tuple(x.state for x in nodes),
            embeddings=embeddings,
            has_embedding=np.concatenate([self.has_embedding, has_embedding]),
            step_scores=np.concatenate([self.step_scores, np.array(scores, np.float64)]),
            tree=default_trees(parent, tree),
            given_classes=None,
            offsets=np.concatenate([self.offsets, self.offsets[-1] + np.cumsum(lengths)]),
            token_ids=_extend(self.token_ids, [x.token_ids for x in nodes]),
            loss_mask=_extend(self.loss_mask, [x.loss_mask for x in nodes]),
            logprobs=_extend(self.logprobs, [x.logprobs for x in nodes]),
            has_tokens=np.concatenate([self.has_tokens, np.ones(len(nodes), np.bool_)]),
            num_tokens=np.concatenate([self.num_tokens, lengths]),
            num_trained=np.concatenate([self.num_trained, trained]),
        )

    def split(self, places: Sequence[tuple[int, int]]) -> "RolloutGraph":
        """This graph with edges cut inside, each cut a new node of its own.

        The j-th new node, in the order of ``places``, stands at position v + j: right before the
        node whose edge it cuts, and all behind it move back. It has a new id, and neither key nor
        text nor embedding nor step score.

        Args:
            places: (v, offset) in ascending order, each once: the position of a node below the
                root, and after how many tokens of the edge to it to cut.

        Raises:
            GraphError: there is nothing to cut at a place.
        """
        nodes = np.array([v for v, _ in places], np.int64)
        cuts = np.array([offset for _, offset in places], np.int64)
        lengths = np.diff(self.offsets)
        wrong = (nodes < 1) | ~self.has_tokens[nodes] | (cuts < 1) | (cuts >= lengths[nodes])
        if wrong.any():
            v, offset = places[int(np.argmax(wrong))]
            raise GraphError(
                f"graph {self.id!r}, node {self.node_ids[v]}: cannot be cut after {offset} tokens"
            )
        old = np.arange(self.num_nodes) + np.searchsorted(nodes, np.arange(self.num_nodes), "right")
        new = nodes + np.arange(len(nodes))
        # Both parts of a cut edge hang in a row under what the whole edge hung under.
        parent = np.empty(len(old) + len(new), np.int64)
        parent[old] = np.where(self.parent >= 0, old[self.parent], -1)
        above = parent[old[nodes]]
        parent[new] = np.where(np.diff(nodes, prepend=-1) > 0, above, new - 1)
        parent[old[nodes]] = old[nodes] - 1
        depth = np.zeros(len(parent), np.int64)
        for v in range(1, len(parent)):
            depth[v] = depth[parent[v]] + 1
        offsets = np.insert(self.offsets, nodes + 1, self.offsets[nodes] + cuts)
        trained = np.concatenate([[0], np.cumsum(self.loss_mask)])[offsets]
        first = int(self.node_ids.max()) + 1
        embeddings = self.embeddings
        unchanged = np.ones(len(parent), np.bool_)
        unchanged[new] = unchanged[old[nodes]] = False
        num_tokens, num_trained = np.diff(offsets), np.diff(trained)
        return replace(
            self,
            node_ids=np.insert(self.node_ids, nodes, first + np.arange(len(nodes))),
            parent=parent,
            depth=depth,
            terminal=np.insert(self.terminal, nodes, False),
            reward=np.insert(self.reward, nodes, np.nan),
            keys=_with_gaps(self.keys, old, len(parent)),
            states=_with_gaps(self.states, old, len(parent)),
            embeddings=None if embeddings is None else np.insert(embeddings, nodes, 0.0, axis=0),
            has_embedding=np.insert(self.has_embedding, nodes, False),
            step_scores=np.insert(self.step_scores, nodes, np.nan),
            tree=np.insert(self.tree, nodes, self.tree[nodes]),
            given_classes=None,
            offsets=offsets,
            has_tokens=np.insert(self.has_tokens, nodes, True),
            num_tokens=np.where(unchanged, np.insert(self.num_tokens, nodes, 0), num_tokens),
            num_trained=np.where(unchanged, np.insert(self.num_trained, nodes, 0), num_trained),
        )

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.parent)

    @property
    def num_edges(self) -> int:
        """Direct edges: one per node but the root."""
        return len(self.parent) - 1

    @property
    def num_children(self) -> IntArray:
        """[n] direct successors of each node."""
        return np.bincount(self.parent[1:], minlength=self.num_nodes)

    @property
    def leaves(self) -> IntArray:
        """Positions of nodes without children: terminals and early-stopped states."""
        return np.flatnonzero(self.num_children == 0)

    @property
    def terminals(self) -> IntArray:
        """Positions of the finished answers."""
        return np.flatnonzero(self.terminal)

    def path(self, v: int) -> list[int]:
        """Positions of the nodes below the root down to ``v``: the edges of its trajectory."""
        nodes: list[int] = []
        while self.parent[v] >= 0:
            nodes.append(v)
            v = int(self.parent[v])
        return nodes[::-1]

    def span(self, v: int | np.int64) -> slice:
        """Where the tokens of the edge to ``v``, of the prompt at the root, stand in [T] arrays."""
        return slice(int(self.offsets[v]), int(self.offsets[v + 1]))


def default_trees(parent: IntArray, tree: IntArray) -> IntArray:
    """Tree numbers, -1 filled in: one tree under each child of the root, inherited below it.

    Args:
        parent: [n], parents first.
        tree: [n], -1 where the tree is not given. New numbers follow the largest given one.
    """
    filled = tree.copy()
    unknown = np.flatnonzero((tree < 0) & (parent >= 0))
    first = unknown[parent[unknown] == 0]
    filled[first] = max(int(tree.max()), -1) + 1 + np.arange(len(first))
    for v in unknown[parent[unknown] > 0].tolist():
        filled[v] = filled[parent[v]]
    return filled


def _with_gaps(
    values: tuple[str | None, ...], places: IntArray, length: int
) -> tuple[str | None, ...]:
    """The values at their new places, None between them."""
    spread: list[str | None] = [None] * length
    for place, value in zip(places.tolist(), values, strict=True):
        spread[place] = value
    return tuple(spread)


def _extend(flat: NDArray[Scalar], pieces: Sequence[Sequence[float]]) -> NDArray[Scalar]:
    return np.concatenate([flat, np.fromiter(chain.from_iterable(pieces), flat.dtype)])


def _stack_embeddings(
    graph: RolloutGraph, new: Sequence[Float32Array | None]
) -> EmbeddingArray | None:
    given = [x for x in new if x is not None]
    old = graph.embeddings
    if old is None:
        if not given:
            return None
        old = np.zeros((graph.num_nodes, len(given[0])), np.float32)
    rows = np.zeros((len(new), old.shape[1]), old.dtype)
    for i, embedding in enumerate(new):
        if embedding is None:
            continue
        if embedding.shape != rows[i].shape:
            raise GraphError(
                f"node {graph.num_nodes + i}: embedding has shape {embedding.shape}, "
                f"earlier ones {rows[i].shape}"
            )
        rows[i] = embedding
    _check_finite(rows, graph.num_nodes)
    return np.concatenate([old, rows])


def _check_finite(embeddings: EmbeddingArray, first: int) -> None:
    """Raise GraphError unless all numbers are finite: one that is not would spoil every novelty."""
    wrong = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(wrong):
        raise GraphError(
            f"node {first + wrong[0]}: embedding holds a number that is not finite: an embedder "
            "without a vector for a text gives zeros"
        )
