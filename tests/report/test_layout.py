import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.report.layout import shallow_part, tree_rows


@st.composite
def _forests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents (parents first) and class numbers of up to 40 nodes."""
    size = draw(st.integers(1, 40))
    parent = [-1] + [draw(st.integers(0, v - 1)) for v in range(1, size)]
    classes = draw(st.lists(st.integers(0, 8), min_size=size, max_size=size))
    return parent, classes


def _depths(parent: list[int]) -> list[int]:
    depth = [0] * len(parent)
    for v in range(1, len(parent)):
        depth[v] = depth[parent[v]] + 1
    return depth


@given(_forests())
def test_edges_never_cross_and_nodes_of_a_layer_keep_their_distance(
    forest: tuple[list[int], list[int]],
) -> None:
    parent, classes = forest
    rows = tree_rows(np.array(parent), np.array(classes))
    depth = _depths(parent)
    for layer in range(1, max(depth) + 1):
        nodes = sorted((v for v in range(len(parent)) if depth[v] == layer), key=lambda v: rows[v])
        for above, below in itertools.pairwise(nodes):
            assert rows[below] - rows[above] >= 1
            assert rows[parent[above]] <= rows[parent[below]]


@given(_forests())
def test_a_parent_stands_in_the_middle_of_its_children(
    forest: tuple[list[int], list[int]],
) -> None:
    parent, classes = forest
    rows = tree_rows(np.array(parent), np.array(classes))
    for v in range(len(parent)):
        children = [rows[c] for c in range(len(parent)) if parent[c] == v]
        if children:
            assert rows[v] == pytest.approx((min(children) + max(children)) / 2)
    assert rows.min() == 0


def test_equivalent_states_are_brought_together() -> None:
    # Four children of the root; the first and the last are one class.
    parent, classes = np.array([-1, 0, 0, 0, 0]), np.array([0, 1, 2, 3, 1])
    rows = tree_rows(parent, classes)
    assert abs(rows[1] - rows[4]) == 1


@given(_forests(), st.integers(1, 50))
def test_the_shallow_part_holds_every_ancestor_of_its_nodes(
    forest: tuple[list[int], list[int]], limit: int
) -> None:
    parent, _ = forest
    depth = _depths(parent)
    shown = shallow_part(np.array(depth), limit)
    assert shown.sum() == min(limit, len(parent))
    assert all(shown[parent[v]] for v in range(1, len(parent)) if shown[v])
    deepest = max(d for d, s in zip(depth, shown, strict=True) if s)
    assert all(d >= deepest for d, s in zip(depth, shown, strict=True) if not s)
