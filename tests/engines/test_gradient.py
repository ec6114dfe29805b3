"""The flat layout's gradient against one training row per edge, each with its full prefix."""

import numpy as np
import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions, UpdateOptions
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.pieces import cut_into_buckets
from tests.engines.graphs import (
    edge_logprobs,
    partly_idle,
    random_sample,
    with_instructions,
    with_rollout_logprobs,
)
from tests.engines.norms import (
    gemma_4_norm_in_full_precision,
    gemma_norm_in_full_precision,
    norm_in_full_precision,
)
from tests.engines.tiny import BOUNDED, LINEAR, OWN, WINDOWED


def per_edge_loss(model, samples, objective, aggregation, temperature=1.0, reference=None):
    """Algorithm 1's stage 4, written token by token; returns the loss and whether a ratio clips."""
    losses, clips = [], 0
    for sample in samples:
        edges = []
        for node in range(1, len(sample.parent)):
            span = np.arange(sample.offsets[node], sample.offsets[node + 1])
            old = torch.tensor(
                sample.logprobs[span[sample.loss_mask[span]]].astype(np.float64),
                device=model.device,
            )
            if not len(old):
                continue
            new, entropy = edge_logprobs(model, sample, node, temperature)
            loss = -objective.entropy * entropy
            for advantage in sample.advantages[:, node]:
                ratio = torch.exp(new - old)
                clipped = torch.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
                loss = loss - torch.minimum(ratio * advantage, clipped * advantage)
                clips += int((ratio != clipped).sum())
            if reference is not None:
                with torch.no_grad():
                    frozen, _ = edge_logprobs(reference, sample, node, temperature)
                loss = loss + objective.kl * (torch.exp(frozen - new) - 1 - (frozen - new))
            edges.append(loss)
        losses.append(edges)
    if aggregation == "token_mean":
        return torch.cat([loss for edges in losses for loss in edges]).mean(), clips
    graphs = [torch.stack([loss.mean() for loss in edges]).mean() for edges in losses]
    return torch.stack(graphs).mean(), clips


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def engine_gradients(engine, model, samples):
    """The gradients that reach the optimiser in one update."""
    caught = []
    engine._optimizer.register_step_pre_hook(lambda *_: caught.append(gradients(model)))
    metrics = engine.update(samples, step=0)
    (grads,) = caught
    return grads, metrics


def check_update(engine, model, oracle, samples, loss, tolerance):
    """An update has an oracle's loss, and the gradients that the oracle's backward pass left.

    Returns:
        The update's metrics.
    """
    grads, metrics = engine_gradients(engine, model, samples)
    expected = gradients(oracle)
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    worst = max(float((grads[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= tolerance, worst
    assert metrics["update/loss"] == pytest.approx(loss.item(), abs=1e-8)
    return metrics


def compare(make_model, tokenizer, samples, tolerance, family="qwen2", attention="sdpa", **options):
    objective = options.pop("objective", Objective())
    spread = options.pop("spread", 0.3)
    model = make_model(family, spread=spread)
    samples = [with_rollout_logprobs(model, s, 0.3, seed=i) for i, s in enumerate(samples)]
    oracle = make_model(family, spread=spread)
    oracle.set_attn_implementation(attention)
    aggregation = options.get("loss_aggregation", "edge_mean")
    max_tokens = options.pop("max_tokens", 120)
    compute = options.pop("compute", ComputeOptions())
    loss, clips = per_edge_loss(oracle, samples, objective, aggregation)
    loss.backward()
    assert clips > 0, "the case must make the clip active"
    engine = LocalEngine(
        model,
        tokenizer,
        OptimizerOptions(max_grad_norm=float("inf"), max_tokens=max_tokens),
        UpdateOptions(old_logprobs="rollout", objective=objective, **options),
        compute=compute,
    )
    metrics = check_update(engine, model, oracle, samples, loss, tolerance)
    assert 0 < metrics["update/clip_fraction"] < 1


SAMPLES = [random_sample(seed, num_nodes=4 + 3 * seed) for seed in range(5)]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradient_equals_one_row_per_edge(make_model, tokenizer, attention):
    compare(make_model, tokenizer, SAMPLES, 1e-8, attention=attention, spread=0.02)


@pytest.mark.parametrize("max_tokens", [120, 40])
@pytest.mark.parametrize(
    ("family", "norm"), [("qwen2", Qwen2RMSNorm), ("qwen3", Qwen3RMSNorm), ("llama", LlamaRMSNorm)]
)
def test_gradient_equals_one_row_per_edge_to_rounding_without_the_norms_casts(
    make_model, tokenizer, monkeypatch, family, norm, max_tokens
):
    monkeypatch.setattr(norm, "forward", norm_in_full_precision)
    assert len(pack(SAMPLES[-1:], max_tokens)) == (1 if max_tokens == 120 else 2)
    compare(make_model, tokenizer, SAMPLES, 1e-12, family=family, max_tokens=max_tokens)


WINDOW_SIZES = [(8, 120), (8, 40), (90, 2000), (90, 250)]


@pytest.mark.parametrize(
    ("family", "longest", "max_tokens"),
    [
        *((family, *sizes) for family in WINDOWED[:3] for sizes in WINDOW_SIZES),
        *((family, *sizes) for family in ("gemma4", *BOUNDED) for sizes in WINDOW_SIZES[1::2]),
        *((family, 8, 40) for family in OWN),
    ],
)
def test_gradient_of_families_with_layers_of_their_own(
    make_model, tokenizer, monkeypatch, family, longest, max_tokens
):
    """Edges shorter and longer than the window, in all layers and beside layers that see all."""
    for norm in (MistralRMSNorm, GptOssRMSNorm, DeepseekV3RMSNorm, GraniteRMSNorm):
        monkeypatch.setattr(norm, "forward", norm_in_full_precision)
    for norm in (Gemma2RMSNorm, Gemma3RMSNorm):
        monkeypatch.setattr(norm, "forward", gemma_norm_in_full_precision)
    monkeypatch.setattr(Gemma4RMSNorm, "forward", gemma_4_norm_in_full_precision)
    samples = SAMPLES if longest == 8 else [random_sample(seed, 7, longest) for seed in (2, 3)]
    # Most cast scores down in "eager".
    attention = {"gpt_oss": "eager", "gemma2": "precise"}.get(family, "sdpa")
    options = {"family": family, "attention": attention, "max_tokens": max_tokens}
    compare(make_model, tokenizer, samples, 1e-12, **options)


@pytest.mark.parametrize(("longest", "max_tokens"), [(8, 120), (8, 40), (90, 2000), (90, 250)])
@pytest.mark.parametrize("family", LINEAR)
def test_gradient_through_the_states_of_linear_attention_layers(
    make_model, tokenizer, family, longest, max_tokens
):
    """Edges shorter and longer than a chunk of states, graphs in one row and in many."""
    samples = SAMPLES if longest == 8 else [random_sample(seed, 7, longest) for seed in (2, 3)]
    compare(make_model, tokenizer, samples, 1e-11, family=family, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [2000, 400])
def test_gradient_of_edges_that_are_computed_in_one_piece(
    make_model, tokenizer, monkeypatch, max_tokens
):
    """Edges of up to 300 tokens: causal pieces beside blocks, in one row and in three."""
    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm_in_full_precision)
    samples = [random_sample(seed, num_nodes=6, longest=300) for seed in (2, 3)]
    batches = pack(samples, max_tokens)
    assert len(batches) == (1 if max_tokens == 2000 else 3)
    pieces = [{bucket.causal for bucket in cut_into_buckets(batch)[0]} for batch in batches]
    assert pieces[0] == {True, False} and all(True in kinds for kinds in pieces)
    compare(make_model, tokenizer, samples, 1e-12, "qwen3", max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [120, 40])
def test_gradient_where_half_of_the_edges_have_no_advantage(
    make_model, tokenizer, monkeypatch, max_tokens
):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    samples = [partly_idle(sample, seed) for seed, sample in enumerate(SAMPLES)]
    compare(make_model, tokenizer, samples, 1e-12, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [120, 40])
def test_gradient_where_edges_begin_alike(make_model, tokenizer, monkeypatch, max_tokens):
    """They are computed once and keep advantages and sampled log-probabilities of their own."""
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    samples = [random_sample(seed, num_nodes=4 + 3 * seed, vocab_size=5) for seed in range(5)]
    batches = pack(samples, 1000)
    assert sum(len(b.target_ids) for b in batches) < 0.95 * sum(len(b.source) for b in batches)
    compare(make_model, tokenizer, samples, 1e-12, max_tokens=max_tokens)


@pytest.mark.parametrize("max_tokens", [1000, 80])
def test_gradient_where_prompts_begin_alike(make_model, tokenizer, monkeypatch, max_tokens):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    samples = [with_instructions(sample, range(3, 33)) for sample in SAMPLES]
    (batch,) = pack(samples, 1000)
    assert len(batch.token_ids) < sum(len(sample.token_ids) for sample in samples) - 4 * 30
    compare(make_model, tokenizer, samples, 1e-12, max_tokens=max_tokens)


def test_gradient_of_separate_terms_token_mean_and_asymmetric_clipping(
    make_model, tokenizer, monkeypatch
):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    samples = [random_sample(seed, terms=2) for seed in range(4)]
    objective = Objective(clip_low=0.1, clip_high=0.28, entropy=0.01)
    compare(
        make_model, tokenizer, samples, 1e-12, objective=objective, loss_aggregation="token_mean"
    )


def test_gradient_with_kl_to_the_reference_at_a_sampling_temperature(
    make_model, tokenizer, monkeypatch
):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    objective = Objective(kl=0.5)
    model, oracle, reference = make_model(), make_model(), make_model()
    samples = [with_rollout_logprobs(model, s, 0.2, temperature=0.7) for s in SAMPLES]
    engine = LocalEngine(
        model,
        tokenizer,
        OptimizerOptions(max_grad_norm=float("inf")),
        UpdateOptions(old_logprobs="rollout", objective=objective, temperature=0.7),
    )
    torch.manual_seed(1)
    drift = [0.01 * torch.randn_like(p) for p in model.parameters()]
    with torch.no_grad():
        for moved in (model, oracle):
            for parameter, change in zip(moved.parameters(), drift, strict=True):
                parameter += change
    loss, _ = per_edge_loss(oracle, samples, objective, "edge_mean", 0.7, reference)
    loss.backward()
    grads, metrics = engine_gradients(engine, model, samples)
    for name, expected in gradients(oracle).items():
        torch.testing.assert_close(grads[name], expected, rtol=0, atol=1e-12)
    assert metrics["update/reference_kl"] > 0
