"""Index arithmetic on arrays, and the way of an array to the device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpo_agent.graph.arrays import IntArray

__all__ = ["ranges", "to_device"]


def ranges(lengths: IntArray) -> IntArray:
    """``0 … n-1`` for every n of ``lengths``, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the array's numbers; on a CPU it may share the array's memory."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
