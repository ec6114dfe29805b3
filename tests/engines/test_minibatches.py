"""Optimiser steps learn from about as many graphs as asked for, and from equally many."""

import numpy as np
import pytest

from graphpo_agent.engines.minibatches import minibatches


@pytest.mark.parametrize("size", [1, 4, 9])
@pytest.mark.parametrize("num_graphs", range(1, 30))
def test_every_graph_is_in_one_part_of_about_the_size(num_graphs: int, size: int) -> None:
    parts = list(minibatches(num_graphs, size, seed=3, step=8, epochs=2))
    half = len(parts) // 2
    for epoch in (parts[:half], parts[half:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(num_graphs))
        sizes = [len(part) for part in epoch]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= 1.5 * size
        assert min(sizes) >= min(num_graphs, int(2 / 3 * size))
        # No other number of steps comes closer to the size.
        assert abs(num_graphs / size - half) <= 0.5 or half == 1


def test_the_order_is_another_in_every_epoch_and_step_and_with_every_seed() -> None:
    def orders(seed: int, step: int, epochs: int = 1) -> list[list[int]]:
        return [part.tolist() for part in minibatches(30, 30, seed, step, epochs)]

    first, second = orders(0, 0, epochs=2)
    assert orders(0, 0) == [first]
    assert len({tuple(order) for order in (first, second, *orders(0, 1), *orders(1, 0))}) == 4
