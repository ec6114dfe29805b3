"""Index arithmetic on arrays, and the way of an array to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpo_agent.graph.arrays import IntArray

__all__ = ["joined_forests", "levels", "ranges", "shifts", "to_device"]


def ranges(lengths: IntArray) -> IntArray:
    """``0 … n-1`` for every n of ``lengths``, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


def shifts(counts: Sequence[int]) -> IntArray:
    """How many come before each.

    >>> shifts([3, 1, 2]).tolist()
    [0, 3, 4]
    """
    return np.cumsum([0, *counts[:-1]])


def joined_forests(parents: Sequence[IntArray]) -> IntArray:
    """The parents of the nodes of several forests as those of one; a root's is -1.

    >>> joined_forests([np.array([-1, 0]), np.array([-1, 0, 1])]).tolist()
    [-1, 0, -1, 2, 3]
    """
    before = shifts([len(parent) for parent in parents])
    return np.concatenate(
        [np.where(parent >= 0, parent + n, -1) for parent, n in zip(parents, before, strict=True)]
    )


def levels(parent: IntArray) -> list[IntArray]:
    """The roots of a forest, whose parent is -1, then their children, and so on."""
    depth, ancestor = (parent >= 0).astype(np.int64), parent
    while (ancestor >= 0).any():  # twice as far up each time
        depth = depth + np.where(ancestor >= 0, depth[ancestor], 0)
        ancestor = np.where(ancestor >= 0, ancestor[ancestor], -1)
    return np.split(np.argsort(depth, kind="stable"), np.cumsum(np.bincount(depth))[:-1])


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the array's numbers; on a CPU it may share the array's memory."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
