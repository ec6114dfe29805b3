"""Attention of single queries to scattered paths, against one softmax per row and head."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.engines.local import path_attention as module
from graphpo_agent.engines.local.cache import PAGE, KVPool, KVShape
from graphpo_agent.engines.local.kv_layers import KVLayer
from graphpo_agent.engines.local.paged_rows import PagedRows
from graphpo_agent.engines.local.path_attention import path_attention
from graphpo_agent.engines.local.scoring import Scoring


def slow(queries, keys, values, slots, lengths, scoring):
    groups = queries.shape[1] // keys.shape[1]
    out = queries.new_zeros(*queries.shape[:2], values.shape[2])
    for row, length in enumerate(lengths):
        path = torch.from_numpy(slots[row, :length].astype(np.int64))
        path = path[-scoring.window :] if scoring.window else path
        for head in range(queries.shape[1]):
            scores = keys[path, head // groups] @ queries[row, head] * scoring.scaling
            if scoring.cap is not None:
                scores = scoring.cap * (scores / scoring.cap).tanh()
            if scoring.sinks is not None:
                scores = torch.cat([scores, scoring.sinks[head : head + 1]])
            out[row, head] = scores.softmax(0)[: len(path)] @ values[path, head // groups]
    return out


def case(
    seed,
    rows=7,
    heads=4,
    key_heads=2,
    dim=8,
    longest=13,
    dtype=torch.float64,
    window=None,
    with_sinks=False,
    value_dim=None,
    cap=None,
):
    make = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    queries = torch.randn(rows, heads, dim, generator=make, dtype=dtype)
    keys, values = (
        torch.randn(40, key_heads, size, generator=make, dtype=dtype)
        for size in (dim, value_dim or dim)
    )
    slots = rng.integers(0, 40, (rows, longest + 2)).astype(np.int32)
    lengths = rng.integers(1, longest + 1, rows)
    sinks = torch.randn(heads, generator=make, dtype=dtype) if with_sinks else None
    return queries, keys, values, slots, lengths, Scoring(0.3, window, sinks, cap)


@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    st.integers(1, 9),
    st.integers(1, 20),
    st.none() | st.integers(1, 25),
    st.booleans(),
    st.none() | st.integers(1, 9),
    st.none() | st.just(0.5),
)
def test_every_row_attends_to_its_own_path(
    seed, rows, heads, dim, longest, window, with_sinks, value_dim, cap
):
    own = {"window": window, "with_sinks": with_sinks, "value_dim": value_dim, "cap": cap}
    given_case = case(seed, rows, *heads, dim, longest, **own)
    torch.testing.assert_close(
        path_attention(*given_case), slow(*given_case), rtol=1e-12, atol=1e-12
    )


def test_single_precision_rounds_as_it_does_elsewhere():
    given_case = case(3, rows=50, dim=64, longest=200, dtype=torch.float32)
    exact = [x.double() if isinstance(x, torch.Tensor) else x for x in given_case]
    out = path_attention(*given_case)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), slow(*exact), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 4 * 13 * 3])
def test_rows_are_done_in_blocks(monkeypatch, at_once):
    monkeypatch.setattr(module, "_SCORES_AT_ONCE", at_once)
    given_case = case(5, rows=10)
    torch.testing.assert_close(path_attention(*given_case), slow(*given_case))


def test_a_long_row_does_not_pad_the_others(monkeypatch):
    monkeypatch.setattr(module, "_SCORES_AT_ONCE", 4 * 30)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    lengths = np.array([3, 3, 3, 100, 5, 10, 10, 10, 1])
    blocks = [(part.start, part.stop) for part in module._blocks(lengths, 4)]
    assert blocks == [(0, 3), (3, 4), (4, 7), (7, 9)]


@pytest.mark.parametrize("rows", [1, 2, 3, 50])
def test_threads_share_the_rows(monkeypatch, rows):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(module, "_PRODUCTS_OF_A_THREAD", 1)
    given_case = case(6, rows=rows)
    torch.testing.assert_close(path_attention(*given_case), slow(*given_case))


def test_queries_as_a_model_hands_them_over():
    queries, *rest = case(7)
    strided = queries.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(path_attention(strided, *rest), path_attention(queries, *rest))


@pytest.mark.parametrize("what", [0, 1, 2])
def test_what_is_not_a_number_stays_so_in_its_row_only(what):
    given_case = case(8, rows=2)
    slots, lengths = given_case[3], given_case[4]
    slots[0, :], slots[1, :] = 1, 2
    lengths[:] = 5
    given_case[what][0 if what == 0 else 1] = torch.nan
    out = path_attention(*given_case)
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_a_score_that_overflows_gives_no_number():
    """Logits are then refused as the policy's divergence, and not drawn from."""
    given_case = case(9, rows=2, dtype=torch.float32)
    given_case[0][0] = 1e38
    given_case[1][:] = 1e38
    assert path_attention(*given_case)[0].isnan().all()


def test_rows_take_pages_of_their_own_and_keep_their_places_together():
    pool = KVPool(KVShape((KVLayer(1, 2, 2),), (0,), torch.float32, torch.device("cpu")))
    prefix = pool.allocate(3)
    rows = PagedRows(pool)
    rows.add(np.array([7, 8, 9]), [prefix, prefix, prefix[:2]], np.array([8, 8, 8]))
    lengths = [rows.lengths.tolist()]
    for _ in range(PAGE + 1):
        rows.begin()
        lengths.append(rows.lengths.tolist())
    assert lengths[0] == [3, 3, 2] and lengths[-1] == [8, 8, 7]
    assert pool._used == 3 + 3 * 2 * PAGE
    (own,) = rows.end(np.array([False, True, False]))
    assert len(own) == PAGE + 1 and (np.diff(own[:PAGE]) == 1).all()
    assert rows.members.tolist() == [7, 9] and rows.lengths.tolist() == [8, 7]
    others = rows.end(np.array([True, True]))
    assert len({*own.tolist(), *others[0].tolist(), *others[1].tolist()}) == 3 * (PAGE + 1)
    assert not len(rows.members)


def test_a_row_that_drew_one_token_has_computed_none():
    pool = KVPool(KVShape((KVLayer(1, 2, 2),), (0,), torch.float32, torch.device("cpu")))
    rows = PagedRows(pool)
    rows.add(np.array([0]), [pool.allocate(3)], np.array([4]))
    (own,) = rows.end(np.array([True]))
    assert not len(own) and pool._used == 3
