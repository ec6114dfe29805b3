"""Which graphs each optimiser step of an update learns from, whatever trains them."""

from collections.abc import Iterator

import numpy as np

from graphpo_agent.graph.arrays import IntArray

__all__ = ["minibatches"]


def minibatches(
    num_graphs: int, num_parts: int, seed: int, step: int, epochs: int = 1
) -> Iterator[IntArray]:
    """Deal graphs out in parts whose sizes differ by at most one.

    Their order depends on (seed, step) only. An update has as many optimiser steps whether few of
    its graphs have an advantage or all, and none learns from what a round number left over.

    Args:
        num_graphs: that are trained, one or more.
        num_parts: optimiser steps of an epoch; fewer where there are fewer graphs.
        seed: of the run.
        step: of training.
        epochs: passes over the graphs, each in an order of its own.

    Yields:
        [size] indices of the graphs of an optimiser step.
    """
    generator = np.random.default_rng([seed, step])
    for _ in range(epochs):
        order = generator.permutation(num_graphs)
        yield from np.array_split(order, min(num_parts, num_graphs))
