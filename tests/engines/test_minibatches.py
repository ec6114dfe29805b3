"""Optimiser steps share the graphs of an update evenly."""

import numpy as np
import pytest

from graphpo_agent.engines.minibatches import minibatches


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("num_graphs", [1, 2, 7, 10])
def test_every_graph_is_in_one_part_of_about_the_same_size(num_graphs: int, num_parts: int) -> None:
    parts = list(minibatches(num_graphs, num_parts, seed=3, step=8, epochs=2))
    half = len(parts) // 2
    assert half == min(num_parts, num_graphs)
    for epoch in (parts[:half], parts[half:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(num_graphs))
        sizes = [len(part) for part in epoch]
        assert max(sizes) - min(sizes) <= 1 <= min(sizes)


def test_the_order_is_another_in_every_epoch_and_step_and_with_every_seed() -> None:
    def orders(seed: int, step: int, epochs: int = 1) -> list[list[int]]:
        return [part.tolist() for part in minibatches(30, 1, seed, step, epochs)]

    first, second = orders(0, 0, epochs=2)
    assert orders(0, 0) == [first]
    assert len({tuple(order) for order in (first, second, *orders(0, 1), *orders(1, 0))}) == 4
