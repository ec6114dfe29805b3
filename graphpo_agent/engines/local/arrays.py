"""Index arithmetic on arrays, and the way of an array to the device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpo_agent.graph.arrays import IntArray

__all__ = ["levels", "ranges", "to_device"]


def ranges(lengths: IntArray) -> IntArray:
    """``0 … n-1`` for every n of ``lengths``, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


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
