"""Rows that begin alike, against sets of prefixes that are counted one by one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.engines.verl.layout import place_rows
from graphpo_agent.engines.verl.shared_rows import divided, flat_row, micro_batches, text_order

ROWS = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=7).map(np.array), min_size=1, max_size=9
)


def prefixes(rows):
    """Every beginning of a row, as often as it is a different one."""
    return {tuple(row[: i + 1].tolist()) for row in rows for i in range(len(row))}


@given(ROWS)
def test_rows_in_text_order_add_what_none_before_has(rows):
    order, added = text_order(rows)
    assert sorted(order) == list(range(len(rows)))
    seen = set()
    for i, more in zip(order, added, strict=True):
        own = prefixes([rows[i]])
        assert more == len(own - seen)
        seen |= own


@given(ROWS, st.integers(2, 20), st.integers(1, 9))
def test_micro_batches_hold_each_row_once_within_their_tokens(rows, max_tokens, count):
    count = min(count, len(rows))
    batches = divided(micro_batches(rows, max_tokens), count)
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(rows)))
    assert len(batches) >= count and all(batches)
    for batch in batches:
        tokens = len(prefixes([rows[i] for i in batch]))
        assert tokens <= max_tokens or len(batch) == 1


def test_rows_that_fit_are_one_micro_batch():
    rows = [np.array(row) for row in ([5, 6, 7, 8], [1, 2, 3], [5, 6, 7, 9], [5, 6, 7])]
    assert micro_batches(rows, 8) == [[1, 3, 0, 2]]
    assert micro_batches(rows, 5) == [[1], [3, 0, 2]]
    assert [len(batch) for batch in divided(micro_batches(rows, 8), 4)] == [1, 1, 1, 1]


@given(ROWS, st.integers(0, 2**32 - 1))
def test_a_flat_row_computes_each_beginning_of_a_trained_token_once(rows, seed):
    rng = np.random.default_rng(seed)
    trained = [np.concatenate([[False], rng.random(len(row) - 1) < 0.5]) for row in rows]
    trained[0][1] = True
    offsets = np.cumsum([0, *map(len, rows)])
    packed = flat_row(np.concatenate(rows), offsets, np.concatenate(trained))
    wanted = {
        tuple(row[:i].tolist())
        for row, mask in zip(rows, trained, strict=True)
        for i in np.flatnonzero(mask)
    }
    assert len(packed.token_ids) == len(prefixes([np.array(one) for one in wanted]))

    def path(place):
        above = [] if packed.previous[place] < 0 else path(packed.previous[place])
        return [*above, int(packed.token_ids[place])]

    assert packed.source.tolist() == np.flatnonzero(np.concatenate(trained)).tolist()
    for token, target in zip(packed.source, packed.target_of, strict=True):
        row = np.searchsorted(offsets, token, side="right") - 1
        whole = [*path(packed.predictors[target]), int(packed.target_ids[target])]
        assert whole == rows[row][: token - offsets[row] + 1].tolist()


def load(share, lengths, added):
    """Tokens of consecutive rows at one place."""
    return sum(lengths[row] if i == 0 else added[row] for i, row in enumerate(share))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_has_a_smaller_largest_share(seed):
    rng = np.random.default_rng(seed)
    graph = np.sort(rng.integers(0, 3, 8)).tolist()
    lengths = rng.integers(3, 20, 8).tolist()
    added: list[int] = []
    for row, one in enumerate(graph):
        first = row == 0 or graph[row - 1] != one
        most = lengths[row] if first else min(lengths[row], lengths[row - 1])
        added.append(lengths[row] if first else lengths[row] - int(rng.integers(0, most)))
    ranks = 3
    layout = place_rows(lengths, added, graph, [sorted(set(graph))], ranks)
    size = layout.rows_per_minibatch // ranks
    shares = [layout.order[rank * size : (rank + 1) * size] for rank in range(ranks)]
    held = [[row for row in share if row is not None] for share in shares]
    assert list(itertools.chain.from_iterable(held)) == list(range(8))
    found = max(load(share, lengths, added) for share in held)
    cuts = itertools.combinations_with_replacement(range(9), ranks - 1)
    best = min(
        max(load(range(a, b), lengths, added) for a, b in itertools.pairwise([0, *cut, 8]))
        for cut in cuts
    )
    assert found == best
