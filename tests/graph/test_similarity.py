"""Which states are similar, by hand: rounding, numbers of any size, numbers in texts."""

import math

import numpy as np
import pytest

from graphpo_agent.graph.equivalence import MergeOptions, edge_similarity, find_classes, novelty
from tests.graph.test_worked_examples import grow, state, with_embeddings


def test_cosines_are_rounded_before_they_are_compared():
    # cos = 0.9199996 rounds to 0.92 and merges; 0.9199994 rounds to 0.919999 and does not.
    for cosine, merged in ((0.9199996, True), (0.9199994, False)):
        graph = grow(state(0, at=0), state(0, at=math.degrees(math.acos(cosine))))
        exact = np.array([[1, 0], [1, 0], [cosine, math.sqrt(1 - cosine**2)]])
        graph = with_embeddings(graph, exact)
        assert (find_classes(graph, MergeOptions())[2] == 1) == merged


def test_few_pairs_among_many_states_are_rounded_before_they_are_compared():
    # Twenty pairs, each in a plane of its own, by turns just similar enough and just not.
    cosines = [0.9199996, 0.9199994] * 10
    rows = np.zeros((41, 40))
    for k, cosine in enumerate(cosines):
        rows[2 * k + 1, 2 * k] = 1
        rows[2 * k + 2, 2 * k : 2 * k + 2] = cosine, math.sqrt(1 - cosine**2)
    graph = with_embeddings(grow(*[state(0, at=0)] * 40), rows)
    merged = find_classes(graph, MergeOptions())[2::2] == np.arange(1, 41, 2)
    assert merged.tolist() == [True, False] * 10


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e15, 1e30])
def test_the_length_of_an_embedding_does_not_count(scale):
    rows = np.array([[1, 0], [1, 1], [1, 1], [1, 0]]) * np.array([[1], [1], [scale], [scale]])
    graph = with_embeddings(grow(*[state(0)] * 3), rows.astype(np.float32))
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 1, 3]
    assert edge_similarity(graph) == pytest.approx([0, 0.5**0.5, 0.5**0.5, 1])


def test_numbers_whose_squares_are_none_have_cosines_all_the_same():
    # At 0 degrees the root, 1 and 2 at 45, 3 at 90 and its child 4 at 60.
    huge, tiny = 1e200, 1e-200
    rows = np.array([[huge, 0], [huge, huge], [tiny, tiny], [0, tiny], [huge, huge * 3**0.5]])
    graph = with_embeddings(grow(state(0), state(0), state(0), state(3)), rows)
    assert find_classes(graph, MergeOptions()).tolist() == [0, 1, 1, 3, 1]
    half = 0.5**0.5
    assert edge_similarity(graph) == pytest.approx([0, half, half, 0, 0.75**0.5])
    found = novelty(graph, np.arange(1, 4), MergeOptions())
    assert found == pytest.approx([0, 0, 1 - half], abs=1e-6)


@pytest.mark.parametrize(
    ("one", "other", "merged"),
    [
        ("left: 3 4", "left: 4 and 3", True),
        ("left: 3 3 4", "left: 3 4", False),
        ("left: 3 3 4", "left: 3 4 4", False),
        ("x = -3", "x = 3", False),
        ("x = \u22123", "x = 3", False),
        ("x = \u22123", "x = -3", True),
        ("x = 3.5", "x = 3 5", False),
        ("x is known", "y is", True),
        ("x is known", "x is 1", False),
    ],
)
def test_the_number_guard_counts_every_number(one, other, merged):
    graph = grow(state(0, at=0, text=one), state(0, at=0, text=other))
    found = find_classes(graph, MergeOptions(guard="numbers")).tolist()
    assert found == [0, 1, 1 if merged else 2]
