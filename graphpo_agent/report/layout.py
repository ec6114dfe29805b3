"""Which nodes of a graph are drawn, and in which row of their layer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["shallow_part", "tree_rows"]

SWEEPS = 6


def shallow_part(depth: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    """The ``limit`` nodes nearest the root, earlier ones first; an ancestor is always among them.

    Args:
        depth: [num_nodes] edges from the root; parents come before children.
        limit: at least 1.
    """
    shown = np.zeros(len(depth), dtype=np.bool_)
    shown[np.argsort(depth, kind="stable")[:limit]] = True
    return shown


def tree_rows(parent: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.float64]:
    """A row for every node of a tree such that its edges never cross.

    A leaf has a row of its own, an inner node the middle of its first and last child. Siblings are
    ordered so that members of one equivalence class come close to each other (a few sweeps that
    sort siblings by the mean row of their subtrees' classmates).

    Example: two children, of which the first has two children itself::

        parent = [-1, 0, 0, 1, 1]   ->   rows = [1.25, 0.5, 2.0, 0.0, 1.0]

    Args:
        parent: [num_nodes] position of the parent, -1 at the root, parents first.
        classes: [num_nodes] equal numbers for equivalent nodes.

    Returns:
        [num_nodes] rows from 0, in units of one leaf.
    """
    children: list[list[int]] = [[] for _ in parent]
    for node in range(1, len(parent)):
        children[parent[node]].append(node)
    rows = _rows(children)
    best, best_spread = rows, _spread(rows, classes)
    for _ in range(SWEEPS):
        wish = _wished_rows(rows, parent, classes)
        for siblings in children:
            siblings.sort(key=lambda node: wish[node])
        rows = _rows(children)
        spread = _spread(rows, classes)
        if spread < best_spread:
            best, best_spread = rows, spread
    return best


def _rows(children: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    rows = np.zeros(len(children))
    next_leaf = 0
    for node in _preorder(children):
        if not children[node]:
            rows[node] = next_leaf
            next_leaf += 1
    for node in reversed(range(len(children))):
        if children[node]:
            rows[node] = (rows[children[node][0]] + rows[children[node][-1]]) / 2
    return rows


def _preorder(children: Sequence[Sequence[int]]) -> list[int]:
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    return order


def _spread(rows: NDArray[np.float64], classes: NDArray[np.int64]) -> float:
    """Summed distance of every node from the mean row of its class."""
    return float(np.abs(rows - _class_means(rows, classes)).sum())


def _class_means(rows: NDArray[np.float64], classes: NDArray[np.int64]) -> NDArray[np.float64]:
    _, group = np.unique(classes, return_inverse=True)
    return (np.bincount(group, weights=rows) / np.bincount(group))[group]


def _wished_rows(
    rows: NDArray[np.float64], parent: NDArray[np.int64], classes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For each node the mean, over its subtree, of the mean rows of its nodes' classes."""
    total, count = _class_means(rows, classes), np.ones(len(rows))
    for node in range(len(rows) - 1, 0, -1):
        total[parent[node]] += total[node]
        count[parent[node]] += count[node]
    return total / count
