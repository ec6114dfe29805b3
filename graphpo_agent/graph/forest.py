"""Several graphs side by side, so that one vectorised pass serves all graphs of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = ["Forest", "by_layer", "join", "on_cycles", "preorder"]


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """The arrays of several graphs, concatenated.

    Example: two graphs, a root with one child and a root alone::

        starts = [0, 2, 3]    parent = [-1, 0, -1]    graph_of = [0, 0, 1]

    Attributes:
        starts: [num_graphs + 1]; graph g owns the positions ``starts[g]:starts[g + 1]``.
        graph_of: [n] the graph of each node.
        parent: [n] positions in the forest, -1 at roots; parents come before children.
        depth: [n] edges from the root.
        terminal: [n].
        reward: [n], NaN where not terminal.
    """

    starts: IntArray
    graph_of: IntArray
    parent: IntArray
    depth: IntArray
    terminal: BoolArray
    reward: FloatArray


def join(graphs: Sequence[RolloutGraph]) -> Forest:
    """The forest of at least one graph."""
    sizes = np.array([g.num_nodes for g in graphs], np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Forest(
        starts=starts,
        graph_of=np.repeat(np.arange(len(graphs)), sizes),
        parent=joined_parents([g.parent for g in graphs]),
        depth=np.concatenate([g.depth for g in graphs]),
        terminal=np.concatenate([g.terminal for g in graphs]),
        reward=np.concatenate([g.reward for g in graphs]),
    )


def joined_parents(parents: Sequence[IntArray]) -> IntArray:
    """The parents of the nodes of several forests as those of one; a root's is -1.

    >>> joined_parents([np.array([-1, 0]), np.array([-1, 0, 1])]).tolist()
    [-1, 0, -1, 2, 3]
    """
    sizes = np.array([len(parent) for parent in parents])
    joined = np.concatenate(parents)
    return np.where(joined >= 0, joined + np.repeat(np.cumsum(sizes) - sizes, sizes), -1)


def by_layer(depth: IntArray) -> list[IntArray]:
    """Positions at depth 0, 1, 2, …, each ascending."""
    order = np.argsort(depth, kind="stable")
    return np.split(order, np.searchsorted(depth[order], np.arange(1, int(depth.max()) + 1)))


def preorder(parent: IntArray, layers: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """The interval of each subtree in a depth-first order.

    ``u`` is an ancestor of ``v`` exactly if ``first[u] < first[v] <= last[u]``.

    Args:
        parent: [n], -1 at roots.
        layers: positions by depth.

    Returns:
        ``first`` [n], the place of each node, and ``last`` [n], that of its last descendant.
        Trees are numbered apart: roots all have place 0.
    """
    size = np.ones(len(parent), np.int64)
    for nodes in layers[:0:-1]:
        np.add.at(size, parent[nodes], size[nodes])
    first = np.zeros(len(parent), np.int64)
    for nodes in layers[1:]:
        nodes = nodes[np.argsort(parent[nodes], kind="stable")]
        before = np.cumsum(size[nodes]) - size[nodes]
        eldest = np.searchsorted(parent[nodes], parent[nodes])
        first[nodes] = first[parent[nodes]] + 1 + before - before[eldest]
    return first, first + size - 1


def on_cycles(parent: IntArray, label: IntArray) -> BoolArray:
    """[n] nodes whose class, all labels contracted, lies on a cycle or between two cycles."""
    child = np.flatnonzero(parent >= 0)
    tail, head = label[parent[child]], label[child]
    while True:
        inner = np.zeros(len(label), np.bool_)
        inner[tail] = True
        entered = np.zeros(len(label), np.bool_)
        entered[head] = True
        inner &= entered
        keep = inner[tail] & inner[head]
        if keep.all():
            return inner[label]
        tail, head = tail[keep], head[keep]
