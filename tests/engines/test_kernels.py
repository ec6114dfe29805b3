"""Attention of grouped heads, by every way to compute it, against one softmax per head."""

import pytest
import torch

from graphpo_agent.engines.local import kernels
from graphpo_agent.engines.local.kernels import (
    folded_attention,
    grouped_attention,
    single_attention,
)
from graphpo_agent.engines.local.scoring import Scoring

SCALING = 0.5


def given(num_queries, num_keys, heads=6, key_heads=2, dim=8, value_dim=8):
    torch.manual_seed(num_queries)
    keys, values = ((3, key_heads, num_keys, size) for size in (dim, value_dim))
    shapes = [(3, heads, num_queries, dim), keys, values, (heads,)]
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    mask = torch.zeros(3, 1, num_queries, num_keys, dtype=torch.float64)
    mask[1, 0, :2, 5:] = -torch.inf
    return *inputs, mask


def slow(query, key, value, sinks, mask, cap=None):
    """[B, H, Q, Dv] with the sinks' scores as one more column."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * SCALING
    scores = mask + (scores if cap is None else cap * (scores / cap).tanh())
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def same(out, expected, inputs):
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    for own, other in zip(
        *(torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected)), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [(6, 2), (9, 1), (4, 4), (6, 2, 8, 5), (4, 4, 8, 16)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_masked_and_causal_queries(heads, with_sinks, cap):
    *inputs, mask = given(4, 9, *heads)
    inputs = inputs[: 3 + with_sinks]
    sinks = inputs[3] if with_sinks else None
    out = grouped_attention(*inputs[:3], mask, Scoring(SCALING, None, sinks, cap))
    same(out, slow(*inputs[:3], sinks, mask, cap), inputs)

    *inputs, _ = given(7, 7, *heads)
    inputs = inputs[: 3 + with_sinks]
    sinks = inputs[3] if with_sinks else None
    causal = torch.full((7, 7), -torch.inf).triu(1).double()
    out = grouped_attention(*inputs[:3], None, Scoring(SCALING, None, sinks, cap))
    same(out, slow(*inputs[:3], sinks, causal, cap), inputs)


@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_bounded_scores_in_blocks_of_queries(monkeypatch, block, with_sinks):
    """What is kept for the backward pass is less than one number a score."""
    monkeypatch.setattr(kernels, "_SCORES_AT_ONCE", 3 * 6 * 70 * block)
    causal = torch.full((70, 70), -torch.inf).triu(1).double()
    *inputs, mask = given(70, 70, value_dim=5)
    inputs = inputs[: 3 + with_sinks]
    sinks = inputs[3] if with_sinks else None
    for given_mask, expected_mask in ((mask, mask), (None, causal)):
        kept: dict[int, int] = {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        scoring = Scoring(SCALING, None, sinks, cap=1.5)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = grouped_attention(*inputs[:3], given_mask, scoring)
        assert sum(kept.values()) < 3 * 6 * 70 * 70 * 8
        same(out, slow(*inputs[:3], sinks, expected_mask, 1.5), inputs)


def test_heads_that_are_folded_into_queries():
    query, key, value, _, mask = given(4, 9, value_dim=5)
    out = folded_attention(query, key, value, mask, SCALING)
    same(out, slow(query, key, value, None, mask), (query, key, value))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_single_queries(with_sinks, cap):
    query, key, value, sinks, mask = given(1, 9, value_dim=5)
    sinks = sinks if with_sinks else None
    out = single_attention(query[:, :, 0], key, value, mask, Scoring(SCALING, None, sinks, cap))
    torch.testing.assert_close(out, slow(query, key, value, sinks, mask, cap)[:, :, 0])
