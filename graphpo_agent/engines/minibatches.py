"""Which graphs each optimiser step of an update learns from, whatever trains them."""

from collections.abc import Iterator

import numpy as np

from graphpo_agent.graph.arrays import IntArray

__all__ = ["minibatches", "num_minibatches"]


def num_minibatches(num_graphs: int, size: int) -> int:
    """Optimiser steps of one pass over one or more graphs, each of about ``size`` of them.

    >>> [num_minibatches(n, 4) for n in (1, 4, 5, 6, 9, 10)]
    [1, 1, 1, 2, 2, 3]
    """
    return max(1, (2 * num_graphs + size) // (2 * size))


def minibatches(
    num_graphs: int, size: int, seed: int, step: int, epochs: int = 1
) -> Iterator[IntArray]:
    """Deal graphs out in parts of about a size, and of the same but for one graph.

    No step learns from the few that a round size would leave over: its gradient would be noise
    with as much weight as any other. The order of the graphs depends on (seed, step) only.

    Args:
        num_graphs: that are trained, one or more.
        size: graphs of an optimiser step; from two thirds to one and a half times as many where
            there are so many.
        seed: of the run.
        step: of training.
        epochs: passes over the graphs, each in an order of its own.

    Yields:
        [about size] indices of the graphs of an optimiser step.
    """
    generator = np.random.default_rng([seed, step])
    for _ in range(epochs):
        order = generator.permutation(num_graphs)
        yield from np.array_split(order, num_minibatches(num_graphs, size))
