"""Differences of rewards and of values that are means of them."""

import numpy as np

from graphpo_agent.graph.arrays import FloatArray

__all__ = ["settled"]

_NOISE = 1e-12


def settled(differences: FloatArray) -> FloatArray:
    """The differences, 0 where they are rounding (up to 1e-12).

    The mean of equal numbers is not always that number to the last bit, and prompts whose
    advantages are exactly 0 are no part of an update.
    """
    return np.where(np.abs(differences) <= _NOISE, 0.0, differences)
