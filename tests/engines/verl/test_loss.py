"""verl's own clipped loss on a graph's rows against the local engine, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.options import OptimizerOptions, UpdateOptions
from graphpo_agent.engines.verl.layout import place_rows
from graphpo_agent.engines.verl.rows import moving_rows, weighted_rows
from tests.engines.graphs import partly_idle, random_sample, with_rollout_logprobs
from tests.engines.norms import norm_in_full_precision
from tests.engines.test_gradient import engine_gradients, gradients
from tests.engines.test_rows import with_a_silent_row, with_rows

pytestmark = pytest.mark.verl

CLIP = Objective(clip_low=0.1, clip_high=0.15)
CASES = {
    "edge_mean": CLIP,
    "token_mean": replace(CLIP, kl=0.05),
    "sequence_mean": replace(CLIP, dual_clip=1.3, entropy=0.01),
    "sequence_sum": replace(CLIP, dual_clip=1.3, kl=0.05, entropy=0.01),
}
HORIZON = 50
KINDS = {
    "edges": lambda seed: random_sample(seed, num_nodes=14),
    "two_terms": lambda seed: random_sample(seed, num_nodes=14, terms=2),
    "trajectories": lambda seed: with_rows(seed, one_advantage_each=True),
    "edges_of_trajectories": lambda seed: with_rows(seed, one_advantage_each=False),
    "a_silent_trajectory": lambda seed: with_a_silent_row(with_rows(seed, one_advantage_each=True)),
}


def padded(rows, name):
    """[B, T] a number of the response tokens; 0 behind them."""
    values = [torch.tensor(np.asarray(getattr(r, name)[r.prompt_tokens :], float)) for r in rows]
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)


def scores(model, rows):
    """[B, T] log-probabilities and entropies of the response tokens, one pass per row."""
    logprobs, entropies = [], []
    for row in rows:
        ids = torch.tensor(row.token_ids)
        logits = model(ids[None], use_cache=False).logits[0, row.prompt_tokens - 1 : -1]
        distribution = logits.log_softmax(-1)
        logprobs.append(distribution.gather(1, ids[row.prompt_tokens :, None])[:, 0])
        entropies.append(-(distribution.exp() * distribution).sum(-1))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(logprobs, batch_first=True), pad(entropies, batch_first=True)


def rows_loss(model, reference, samples, objective, aggregation, ranks):
    """What verl computes: the ranks' sums over their rows, averaged over the ranks."""
    from verl.workers.config import FSDPActorConfig

    from graphpo_agent.engines.verl.loss import LossTerms, graph_objective

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=8,
        clip_ratio_low=objective.clip_low,
        clip_ratio_high=objective.clip_high,
        clip_ratio_c=objective.dual_clip or 1e9,
    )
    made = [weighted_rows(sample, aggregation, HORIZON) for sample in samples]
    if not objective.moves_all:
        made = [replace(one, rows=moving_rows(one.rows)) for one in made]
    divisor = max(sum(one.total for one in made), 1.0)
    rows = [row for one in made for row in one.rows]
    graph = [i for i, one in enumerate(made) for _ in one.rows]
    lengths = [len(row.token_ids) for row in rows]
    order = place_rows(lengths, lengths, graph, [range(len(made))], ranks).order
    share = len(order) // ranks
    names = [f"advantages_{k}" for k in range(len(rows[0].advantages))]
    terms = LossTerms(tuple(names), objective.kl, objective.entropy)
    loss = torch.zeros((), dtype=torch.float64)
    for rank in range(ranks):
        own = [rows[i] for i in order[rank * share : (rank + 1) * share] if i is not None]
        for batch in (own[:2], own[2:]):  # micro-batches
            if not batch:
                continue
            logprobs, entropies = scores(model, batch)
            fields = {
                "response_mask": padded(batch, "loss_mask"),
                "old_log_probs": padded(batch, "logprobs").nan_to_num(),
                "token_weights": padded(batch, "weights") / divisor,
            }
            for k, name in enumerate(names):
                term = [replace(row, weights=row.advantages[k] / divisor) for row in batch]
                fields[name] = padded(term, "weights")
            with torch.no_grad():
                fields["ref_log_prob"] = scores(reference, batch)[0]
            one, _ = graph_objective(config, terms, logprobs, entropies, fields, ranks)
            loss = loss + one / ranks
    return loss


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregation", CASES)
def test_loss_and_gradient_are_the_local_engines_also_where_ratios_clip(
    make_model, tokenizer, monkeypatch, aggregation, kind, ranks
):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    objective = CASES[aggregation]
    model = make_model("qwen2", spread=0.3)
    samples = [
        with_rollout_logprobs(model, partly_idle(KINDS[kind](seed), seed), 0.3, seed=seed)
        for seed in (1, 2, 3)
    ]
    ours, reference = make_model("qwen2", spread=0.3), make_model("qwen2", spread=0.3)
    for one in (ours, reference):
        one.set_attn_implementation("sdpa")
    loss = rows_loss(ours, reference, samples, objective, aggregation, ranks)
    loss.backward()
    engine = LocalEngine(
        model,
        tokenizer,
        OptimizerOptions(max_grad_norm=float("inf"), max_tokens=120),
        UpdateOptions(
            minibatch_graphs=len(samples),
            objective=objective,
            loss_aggregation=aggregation,
            horizon=HORIZON,
            old_logprobs="rollout",
        ),
    )
    expected, metrics = engine_gradients(engine, model, samples)
    assert metrics["update/clip_fraction"] > 0
    assert loss.item() == pytest.approx(metrics["update/loss"], abs=1e-10)
    found = gradients(ours)
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= 1e-10, worst


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_divergence_is_reported_as_it_is_weighted_in_the_loss(ranks):
    from verl.utils.metric import Metric
    from verl.workers.config import FSDPActorConfig

    from graphpo_agent.engines.verl.loss import LossTerms, graph_objective

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=8
    )
    generator = torch.Generator().manual_seed(0)
    logprobs, reference, weights = torch.rand(3, 8, 5, generator=generator, dtype=torch.float64)
    fields = {
        "response_mask": torch.ones_like(weights),
        "old_log_probs": logprobs,
        "ref_log_prob": reference,
        "token_weights": weights,
        "advantages": torch.zeros_like(weights),
    }
    whole = (weights * (torch.exp(reference - logprobs) - 1 - (reference - logprobs))).sum()
    of_ranks, loss = [], 0.0
    for rows in torch.arange(8).split(8 // ranks):
        own = {name: values[rows] for name, values in fields.items()}
        terms = LossTerms(("advantages",), kl=0.1)
        one, metrics = graph_objective(config, terms, logprobs[rows], None, own, ranks)
        of_ranks.append(metrics["actor/reference_kl"])
        loss += one.item() / ranks  # gradients are averaged
    assert Metric.aggregate_dp(of_ranks) == pytest.approx(whole.item())
    assert loss == pytest.approx(0.1 * whole.item())
