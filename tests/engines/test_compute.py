"""Every way to compute an update gives the same update."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from transformers import (
    Gemma2Config,
    Gemma4TextConfig,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from graphpo_agent.engines.local import flat_attention, forward
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.forward import check_flat_layout, flat_passes, score_tokens
from graphpo_agent.engines.local.loss import Objective
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions, UpdateOptions
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.token_weights import moving_tokens
from graphpo_agent.errors import ModelError
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.graphs import random_sample, use_slow_flash_attention
from tests.engines.norms import norm_in_full_precision
from tests.engines.test_gradient import SAMPLES, compare
from tests.engines.tiny import OWN, WINDOWED

UPDATING = UpdateOptions(learning_rate=0.01, minibatch_graphs=2, seed=5)
CHECKPOINTED = ComputeOptions(checkpoint_layers=True)
COMPILED = ComputeOptions(compile_layers=True)


@pytest.mark.parametrize("max_tokens", [120, 40])
@pytest.mark.parametrize(
    "compute",
    [
        CHECKPOINTED,
        pytest.param(COMPILED, marks=pytest.mark.slow),
        pytest.param(replace(COMPILED, checkpoint_layers=True), marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_one_row_per_edge(make_model, tokenizer, monkeypatch, compute, max_tokens):
    monkeypatch.setattr(Qwen2RMSNorm, "forward", norm_in_full_precision)
    objective = Objective(entropy=0.01)
    compare(
        make_model,
        tokenizer,
        SAMPLES,
        1e-12,
        compute=compute,
        objective=objective,
        max_tokens=max_tokens,
    )


def count_calls(model: PreTrainedModel, kind: type) -> list[int]:
    calls: list[int] = []
    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("compute", "passes"), [(ComputeOptions(), 1), (CHECKPOINTED, 2)])
def test_checkpointed_layers_are_computed_again_and_stay_in_evaluation_mode(
    make_model, compute, passes
):
    model = make_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    (batch,) = pack([random_sample(0)], 10_000)
    calls = count_calls(model, Qwen2MLP)
    with flat_passes(model, compute):
        scores = score_tokens(model, batch, 1.0, compute)
        scores.logprobs.sum().backward()
    assert len(calls) == passes * len(model.model.layers)
    assert not any(module.training for module in model.modules())
    with torch.no_grad(), flat_passes(model, ComputeOptions()):
        expected = score_tokens(model, batch, 1.0, ComputeOptions())
    assert torch.equal(scores.logprobs.detach(), expected.logprobs)


def test_a_layer_that_drops_by_itself_drops_nothing_where_it_is_checkpointed():
    config = OPTConfig(
        vocab_size=350,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=16,
        dropout=0.5,
    )
    model = OPTForCausalLM(config).eval()
    (batch,) = pack([random_sample(0)], 10_000)
    found = []
    for compute in (ComputeOptions(), CHECKPOINTED):
        model.zero_grad()
        with flat_passes(model, compute):
            for _ in range(2):  # computing a layer again ends in its middle
                scores = score_tokens(model, batch, 1.0, compute)
                scores.logprobs.sum().backward()
        found.append([scores.logprobs.detach(), *(p.grad for p in model.parameters())])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-5, atol=1e-6)
    assert not any(module.training for module in model.modules())


@pytest.mark.slow
def test_layers_are_compiled_inside_a_pass_only_and_share_what_is_compiled(make_model):
    model = make_model()
    torch._dynamo.reset()
    counters.clear()
    graphs = set()
    for seed in range(3):  # rows of other lengths
        (batch,) = pack([random_sample(seed, 10 + 9 * seed)], 10_000)
        with flat_passes(model, COMPILED):
            score_tokens(model, batch, 1.0, COMPILED).logprobs.sum().backward()
        assert not any("forward" in vars(layer) for layer in model.model.layers)
        graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1


@pytest.mark.parametrize("compute", [CHECKPOINTED, COMPILED])
def test_a_model_that_does_not_tell_its_layers_is_refused(make_model, monkeypatch, compute):
    model = make_model()
    monkeypatch.setattr(forward, "GradientCheckpointingLayer", type(None))
    with (
        pytest.raises(ModelError, match=r"gradient_checkpointing and update\.compile_layers"),
        flat_passes(model, compute),
    ):
        pass


def test_where_layers_cannot_be_compiled_one_line_says_so(make_model):
    torch._dynamo.reset()
    nowhere = {"cpp.cxx": (None, "no-compiler"), "force_disable_caches": True}
    with inductor.patch(nowhere), pytest.raises(ModelError) as caught:
        check_flat_layout(make_model().cpu(), COMPILED)
    told = str(caught.value)
    assert told.startswith("update.compile_layers cannot be used here") and "compiler" in told
    assert "\n" not in told


@pytest.mark.parametrize("family", ["qwen2", "llama", *WINDOWED, *OWN])
def test_stretches_give_the_scores_and_gradients_of_buckets(make_model, monkeypatch, family):
    """On a GPU it is the kernel itself, in the precision that it is made for."""
    model = make_model(family, spread=0.1)
    on_gpu = model.device.type == "cuda"
    compute = ComputeOptions(autocast=on_gpu)
    if on_gpu:
        model = model.float()
    (batch,) = pack([random_sample(0, 30), random_sample(1, 12)], 10_000)
    if not on_gpu:
        use_slow_flash_attention(monkeypatch)
    found = []
    for stretches in (False, True):
        monkeypatch.setattr(flat_attention, "flash_fits", lambda *_, fits=stretches: fits)
        model.zero_grad()
        with flat_passes(model, compute):
            scores = score_tokens(model, batch, 1.0, compute)
            scores.logprobs.sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((scores.logprobs.detach(), gradient.clone()))
    (expected, gradient), (logprobs, own) = found
    close = 0.03 if on_gpu else 1e-8
    assert float((logprobs - expected).abs().max()) < close
    assert float((own - gradient).norm() / gradient.norm()) < close


def test_flash_attention_is_for_16_bits_and_heads_that_it_knows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def fits(head_dim, dtype, device="cuda", kind=Qwen3Config, **own):
        config = kind(head_dim=head_dim, num_hidden_layers=2, **own)
        return flat_attention.flash_fits(config, dtype, torch.device(device))

    assert fits(64, torch.bfloat16) and fits(192, torch.float16)
    assert not fits(64, torch.float32) and not fits(64, torch.bfloat16, "cpu")
    assert not fits(12, torch.bfloat16) and not fits(256, torch.bfloat16)
    assert not fits(64, torch.bfloat16, kind=Gemma2Config)
    assert fits(64, torch.bfloat16, kind=Gemma2Config, attn_logit_softcapping=None)
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    assert not fits(64, torch.bfloat16, kind=Gemma4TextConfig, global_head_dim=512, **layers)
    assert not fits(64, torch.bfloat16, per_layer_config={"1": {"head_dim": 512}})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not fits(64, torch.bfloat16)


def test_autocast_multiplies_in_bfloat16_and_keeps_float32_weights(make_model, tokenizer):
    compute = ComputeOptions(autocast=True)
    metrics = {}
    for name, how in (("exact", ComputeOptions()), ("autocast", compute)):
        model = make_model(spread=0.02).float()
        engine = LocalEngine(model, tokenizer, OptimizerOptions(), UPDATING, compute=how)
        metrics[name] = engine.update(SAMPLES, 0)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    (batch,) = pack(SAMPLES[:1], 10_000)
    with flat_passes(model, compute):
        scores = score_tokens(model, batch, 1.0, compute)
    assert scores.logprobs.dtype == torch.float32
    for name in ("update/loss", "update/entropy", "update/grad_norm"):
        # The loss is a sum of advantages of both signs, and small.
        expected = pytest.approx(metrics["exact"][name], rel=0.05, abs=2e-3)
        assert metrics["autocast"][name] == expected
        assert metrics["autocast"][name] != metrics["exact"][name]


def test_the_sampler_multiplies_in_bfloat16_too(make_model, tokenizer):
    def mismatch(**compute):
        model = make_model(spread=0.02).float()
        updating = replace(UPDATING, learning_rate=0.0)
        how = ComputeOptions(**compute)
        engine = LocalEngine(model, tokenizer, OptimizerOptions(), updating, compute=how)
        prompt = tuple(range(5, 15))
        request = SampleRequest(engine.policy.open(prompt), 3, 40)
        engine.policy.submit(request, SamplingParams())
        ended = []
        while not ended:
            ended = engine.policy.advance()
        drawn = ended[0][1]
        sample = TrainingSample(
            graph_id="drawn",
            parent=np.array([-1, 0]),
            offsets=np.array([0, 10, 10 + len(drawn.token_ids)]),
            token_ids=np.array([*prompt, *drawn.token_ids]),
            loss_mask=np.arange(10 + len(drawn.token_ids)) >= 10,
            logprobs=np.array([np.nan] * 10 + [*drawn.logprobs], np.float32),
            advantages=np.ones((1, 2)),
        )
        return engine.update([sample], 0)["update/mismatch"]

    assert mismatch() < 1e-5
    assert mismatch(autocast=True) < 0.05


def test_autocast_products_are_bfloat16(make_model):
    compute = ComputeOptions(autocast=True)
    model = make_model(spread=0.02).float()
    kinds = set()
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, inputs: kinds.add(inputs[0].dtype)
        )
    (batch,) = pack(SAMPLES[:1], 10_000)
    with flat_passes(model, compute):
        score_tokens(model, batch, 1.0, compute).logprobs.sum().backward()
    assert kinds == {torch.bfloat16}


def test_offloading_the_optimiser_changes_nothing(make_model, tokenizer):
    weights = []
    for offload in (False, True):
        model = make_model()
        engine = LocalEngine(model, tokenizer, OptimizerOptions(offload=offload), UPDATING)
        for step in range(2):
            engine.update(SAMPLES, step)
        state = [v for s in engine._optimizer.state.values() for v in s.values()]
        assert {v.device.type for v in state} == {"cpu" if offload else model.device.type}
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])


def test_the_first_minibatch_needs_no_pass_of_its_own(make_model, tokenizer):
    def tokens_computed(minibatch_graphs, **more):
        model = make_model()
        updating = replace(UPDATING, minibatch_graphs=minibatch_graphs, **more)
        engine = LocalEngine(model, tokenizer, OptimizerOptions(), updating)
        sizes = []
        model.model.embed_tokens.register_forward_hook(
            lambda _, inputs, __: sizes.append(inputs[0].numel())
        )
        engine.update(SAMPLES, 0)
        return sum(sizes)

    moving = [replace(sample, loss_mask=moving_tokens(sample)) for sample in SAMPLES]
    once = sum(len(batch.token_ids) for batch in pack(moving, 10_000))
    assert tokens_computed(5) == once
    assert tokens_computed(5, epochs=2) == 2 * once
    assert once < tokens_computed(3) < 2 * once
