"""Trajectories trained as rows of their own, in the flat layout, against literal rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions, UpdateOptions
from graphpo_agent.engines.local.token_weights import moving_tokens, token_weights
from graphpo_agent.graph.samples import to_path_rows
from tests.engines.graphs import edge_logprobs, random_sample, with_rollout_logprobs
from tests.engines.norms import norm_in_full_precision
from tests.engines.test_gradient import check_update

CLIP = Objective(clip_low=0.1, clip_high=0.15)
CASES = {
    "token_mean": CLIP,
    "sequence_mean": CLIP,
    "sequence_sum": CLIP,
    "edge_mean": CLIP,
    "dual": replace(CLIP, dual_clip=1.3, kl=0.05, entropy=0.01),
}


def with_rows(seed, one_advantage_each, vocab_size=300):
    """A random graph of which most leaves are trained as rows, their advantages of both signs."""
    sample = random_sample(seed, num_nodes=14, vocab_size=vocab_size)
    leaves = np.flatnonzero(np.bincount(sample.parent[1:], minlength=14) == 0)
    rows = leaves[:-1]
    advantages = np.random.default_rng(seed).normal(size=len(rows)) if one_advantage_each else None
    return replace(sample, rows=rows, row_advantages=advantages)


def path(sample, leaf):
    nodes = []
    while leaf > 0:
        nodes.append(leaf)
        leaf = int(sample.parent[leaf])
    return nodes[::-1]


def with_a_silent_row(sample):
    """The sample whose first row has no trained token, as where the policy sampled none of it."""
    mask = sample.loss_mask.copy()
    for v in path(sample, int(sample.rows[0])):
        mask[sample.offsets[v] : sample.offsets[v + 1]] = False
    return replace(sample, loss_mask=mask)


def literal_loss(model, samples, objective, aggregation, horizon, reference):
    """One row per trajectory, as released trainers do it; token by token."""
    rows = []
    for sample in samples:
        for i, leaf in enumerate(sample.rows.tolist()):
            edges = []
            for node in path(sample, leaf):
                span = np.arange(sample.offsets[node], sample.offsets[node + 1])
                span = span[sample.loss_mask[span]]
                if not len(span):
                    continue
                old = torch.tensor(sample.logprobs[span].astype(np.float64), device=model.device)
                new, entropy = edge_logprobs(model, sample, node)
                own = sample.row_advantages
                advantage = float(sample.advantages[0, node] if own is None else own[i])
                ratio = torch.exp(new - old)
                clipped = torch.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
                gain = torch.minimum(ratio * advantage, clipped * advantage)
                if objective.dual_clip and advantage < 0:
                    gain = torch.clip(gain, min=objective.dual_clip * advantage)
                loss = -gain - objective.entropy * entropy
                if reference is not None:
                    with torch.no_grad():
                        frozen, _ = edge_logprobs(reference, sample, node)
                    loss = loss + objective.kl * (torch.exp(frozen - new) - 1 - (frozen - new))
                edges.append(loss)
            if edges:
                rows.append((sample.graph_id, edges))
    tokens = [torch.cat(edges) for _, edges in rows]
    if aggregation == "token_mean":
        return torch.cat(tokens).mean()
    if aggregation == "sequence_mean":
        return torch.stack([t.mean() for t in tokens]).mean()
    if aggregation == "sequence_sum":
        return torch.stack([t.sum() / horizon for t in tokens]).mean()
    graphs = []
    for name in dict.fromkeys(name for name, _ in rows):
        means = [e.mean() for own, edges in rows if own == name for e in edges]
        graphs.append(torch.stack(means).mean())
    return torch.stack(graphs).mean()


@pytest.mark.parametrize("vocab_size", [300, 5])
@pytest.mark.parametrize("one_advantage_each", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_flat_layout_trains_rows_exactly_also_where_ratios_clip(
    make_model, tokenizer, monkeypatch, case, one_advantage_each, vocab_size
):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    objective, aggregation = CASES[case], "token_mean" if case == "dual" else case
    model = make_model("qwen2", spread=0.3)
    samples = [with_rows(seed, one_advantage_each, vocab_size) for seed in (1, 2, 3)]
    samples[0] = with_a_silent_row(samples[0])
    samples = [with_rollout_logprobs(model, s, 0.3, seed=i) for i, s in enumerate(samples)]
    oracle, reference = make_model("qwen2", spread=0.3), make_model("qwen2", spread=0.3)
    for one in (oracle, reference):
        one.set_attn_implementation("sdpa")
    loss = literal_loss(
        oracle, samples, objective, aggregation, 50, reference if objective.kl else None
    )
    loss.backward()
    engine = LocalEngine(
        model,
        tokenizer,
        OptimizerOptions(max_grad_norm=float("inf"), max_tokens=120),
        UpdateOptions(
            minibatch_graphs=len(samples),
            objective=objective,
            loss_aggregation=aggregation,
            horizon=50,
            old_logprobs="rollout",
        ),
        compute=ComputeOptions(),
    )
    metrics = check_update(engine, model, oracle, samples, loss, 1e-12)
    assert metrics["update/clip_fraction"] > 0


def test_rows_that_share_nothing_have_one_term_and_shared_tokens_two():
    sample = random_sample(4, num_nodes=5)
    chains = replace(
        sample,
        parent=np.array([-1, 0, 1, 0, 3]),
        rows=np.array([2, 4]),
        row_advantages=np.array([1.0, -2.0]),
    )
    assert len(token_weights([chains], "token_mean").advantages) == 1
    fork = replace(chains, parent=np.array([-1, 0, 1, 1, 3]))
    shared = token_weights([fork], "token_mean").advantages[:, fork.offsets[1]]
    np.testing.assert_allclose(shared, [0.5, -1.0])


def test_a_token_of_rows_whose_advantages_cancel_moves_the_weights():
    sample = random_sample(4, num_nodes=5)
    fork = replace(
        sample,
        parent=np.array([-1, 0, 1, 1, 3]),
        rows=np.array([2, 4]),
        row_advantages=np.array([1.0, -1.0]),
    )
    np.testing.assert_array_equal(moving_tokens(fork), fork.loss_mask)
    one_idle = moving_tokens(replace(fork, row_advantages=np.array([1.0, 0.0])))
    node = np.repeat(np.arange(5), np.diff(fork.offsets))
    np.testing.assert_array_equal(one_idle, fork.loss_mask & (node <= 2))


def test_path_rows_of_a_sample_with_rows_own_every_edge_of_theirs():
    sample = with_rows(5, one_advantage_each=True)
    rows = to_path_rows(sample)
    assert len(rows) == len(sample.rows)
    for row, leaf, advantage in zip(rows, sample.rows, sample.row_advantages, strict=True):
        spans = [np.arange(*sample.offsets[v : v + 2]) for v in [0, *path(sample, int(leaf))]]
        mask = sample.loss_mask[np.concatenate(spans)]
        np.testing.assert_array_equal(row.loss_mask, mask)
        np.testing.assert_allclose(row.advantages[0], np.where(mask, advantage, 0.0))
