"""The memory estimate against what a real update allocates."""

import weakref
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.engines.local import flat_attention, saved
from graphpo_agent.engines.local.cache import KVPool
from graphpo_agent.engines.local.forward import flat_passes, score_tokens
from graphpo_agent.engines.local.head import output_head
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.memory import (
    MemoryEstimate,
    UpdateSizes,
    estimate_memory,
    model_sizes,
    token_bytes,
)
from graphpo_agent.engines.local.model import load_model, model_without_weights
from graphpo_agent.engines.local.optimizer import make_adamw, optimizer_step
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.probe import kv_shape
from graphpo_agent.engines.local.stretch_attention import stretch_layout
from graphpo_agent.memory import describe_memory
from tests.engines.graphs import counted_bytes, tree_sample, use_slow_flash_attention
from tests.worlds import run_arguments

GIB = 2**30


def make(kind, hidden, layers, heads, key_heads):
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    config = config_class(
        vocab_size=500,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=512,
        tie_word_embeddings=kind == "qwen2",
    )
    return model_class(config).eval()


def really_saved(model, batch, compute):
    """Bytes that a real forward pass keeps for the backward pass, weights and logits left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = []  # some are let go before the pass ends, and others may then lie where they did

    def keep(tensor):
        saved.append(weakref.ref(tensor))
        return tensor

    with flat_passes(model, compute), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        scores = score_tokens(model, batch, 1.0, compute)
        there = [tensor.untyped_storage() for one in saved if (tensor := one()) is not None]
        kept = {storage.data_ptr(): storage.nbytes() for storage in there}
        total = sum(size for address, size in kept.items() if address not in weights)
        del there
        scores.logprobs.sum().backward()
    buffers = 1 if output_head(model).cap is None else 2
    return total - len(batch.target_ids) * 500 * 4 * buffers


@pytest.mark.parametrize(
    ("shape", "schedule", "segment"),
    [
        (("qwen2", 64, 2, 4, 4), (2, 5, 4, 2), 16),
        (("qwen2", 128, 3, 8, 2), (3, 3, 2), 32),
        (("llama", 96, 4, 6, 3), (6, 2, 1, 1), 24),
    ],
)
@pytest.mark.parametrize("prompt", [48, 700])
@pytest.mark.parametrize("compute", [ComputeOptions(), ComputeOptions(autocast=True)])
@pytest.mark.parametrize("adapters", [False, True])
def test_what_an_update_keeps_is_counted(shape, schedule, segment, prompt, compute, adapters):
    model = make(*shape)
    dtype = torch.bfloat16 if adapters and not compute.autocast else torch.float32
    if adapters:
        add_adapters(model.to(dtype), LoraOptions(4, 8.0))
    (batch,) = pack([tree_sample(schedule, segment, prompt)], 10_000)
    found = counted_bytes(model.config, batch, compute, adapters, dtype)
    assert found == pytest.approx(really_saved(model, batch, compute), rel=0.01)


LAYER = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 3, "pad_token_id": 0}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
WIDE = {"intermediate_size": 384, **LAYER}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STATES = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
GEMMA_4 = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 500,
    "final_logit_softcapping": 30.0,
    "sliding_window": 40,
}
LATENT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 3,
}
FAMILIES = [
    Qwen3Config(**WIDE, **HEADS),
    Qwen3Config(**WIDE, **HEADS | {"head_dim": 24}),  # heads wider than their share of the layer
    Gemma3TextConfig(**WIDE, **HEADS),
    MistralConfig(**WIDE, **HEADS, sliding_window=40),
    Olmo2Config(**WIDE, **HEADS),
    GPT2Config(**LAYER, num_attention_heads=8, n_positions=512),
    GPT2Config(**LAYER, num_attention_heads=8, n_positions=512, n_inner=80),
    OPTConfig(**LAYER, num_attention_heads=8, ffn_dim=384, word_embed_proj_dim=128),
    GPTNeoXConfig(**WIDE, num_attention_heads=8),
    MixtralConfig(num_local_experts=4, **WIDE, **HEADS),
    Qwen3MoeConfig(**EXPERTS, **WIDE, **HEADS),
    Gemma2Config(**WIDE, **HEADS, sliding_window=40),
    Gemma4TextConfig(**WIDE, **HEADS, **GEMMA_4),
    DeepseekV3Config(**WIDE, **LATENT),
    GptOssConfig(num_local_experts=4, num_experts_per_tok=2, **WIDE, **HEADS),
    Qwen3_5TextConfig(**WIDE, **HEADS, **STATES),
    Qwen3NextConfig(**EXPERTS, **WIDE, **HEADS, **STATES, shared_expert_intermediate_size=64),
    FalconH1Config(**WIDE, **HEADS, mamba_n_heads=64, mamba_d_head=16, mamba_d_state=24),
    Phi3Config(  # whose angles depend on the longest context of a pass
        **WIDE,
        num_attention_heads=8,
        original_max_position_embeddings=300,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
@pytest.mark.parametrize("autocast", [False, True])
def test_every_family_counts_as_it_computes(config, autocast):
    model = AutoModelForCausalLM.from_config(config).eval()
    (batch,) = pack([tree_sample((2, 5, 4, 2), 16, 48)], 10_000)
    compute = ComputeOptions(autocast=autocast)
    found = counted_bytes(config, batch, compute)
    assert found == pytest.approx(really_saved(model, batch, compute), rel=0.01)
    assert model_sizes(model).weight_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_a_token_holds_what_the_model_computes_of_it(config):
    model = AutoModelForCausalLM.from_config(config).eval()
    found = token_bytes(model_sizes(model), ComputeOptions())
    assert found == kv_shape(model).bytes_per_token


def test_layers_that_look_at_their_numbers_cannot_be_counted(tmp_path, reach, monkeypatch):
    monkeypatch.setattr(Qwen2MLP, "forward", lambda _, states: states * float(states.max()))
    path, *changes = run_arguments(reach, tmp_path, "model.device=cpu")
    (line, *_) = describe_memory(load_config(RunConfig, path, changes), 10)
    assert line == (
        "memory: what the update of this model keeps is not known: what its layers compute depends "
        "on their numbers"
    )


def test_where_a_kernel_takes_whole_paths_they_are_not_saved(monkeypatch):
    compute = ComputeOptions(autocast=True)
    model = make("qwen2", 128, 6, 8, 8)
    for prompt in (48, 480):
        (batch,) = pack([tree_sample((3, 3, 2), 16, prompt)], 10_000)
        paths = stretch_layout(batch, model.device).keys
        of_one_layer = 12 * len(paths) * 128  # gathered, their gradients, and these in float32
        with monkeypatch.context() as patch:
            use_slow_flash_attention(patch)
            for module in (flat_attention, saved):
                patch.setattr(module, "flash_fits", lambda *_: True)
            found = counted_bytes(model.config, batch, compute)
            wanted = really_saved(model, batch, compute) + of_one_layer
        assert found == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_keeps_inputs_of_layers_and_one_layer_or_the_rounded_weights(autocast):
    model = make("qwen2", 64, 6, 4, 4)
    (batch,) = pack([tree_sample((2, 5, 4), 16, 48)], 10_000)
    compute = ComputeOptions(autocast=autocast, checkpoint_layers=True)
    whole = counted_bytes(model.config, batch, ComputeOptions(autocast=autocast))
    inputs = really_saved(model, batch, compute)
    found = counted_bytes(model.config, batch, compute)
    assert found < whole / 3
    rounded = sum(p.nbytes for p in model.parameters()) // 2 if autocast else 0
    assert found == pytest.approx(inputs + max(rounded, whole / 6), rel=0.1)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_gradients_and_optimiser_state_are_exact(kind, adapters, dtype):
    model = make(kind, 64, 2, 4, 2).to(dtype)
    if adapters:
        add_adapters(model, LoraOptions(4, 8.0))
    estimate = estimate_memory(
        model_sizes(model), UpdateSizes(10, 10, reference=True), ComputeOptions()
    )
    optimizer = make_adamw(model, OptimizerOptions())
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    gradients = sum(p.grad.nbytes for p in trained)
    optimizer_step(optimizer, 0.1, 1.0)
    moments = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    assert estimate.weights == sum(p.nbytes for p in model.parameters()) == estimate.reference
    assert estimate.gradients == gradients
    assert estimate.optimizer == sum(v.nbytes for v in moments)


def test_a_model_without_weights_has_the_sizes_of_the_model(make_model, tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    empty = model_without_weights(str(tmp_path), torch.float64)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    model = load_model(str(tmp_path), torch.float64)
    assert model_sizes(empty) == model_sizes(model)
    options = LoraOptions(2, 4.0)
    assert model_sizes(add_adapters(empty, options)) == model_sizes(add_adapters(model, options))


def test_the_total_is_that_of_the_larger_phase():
    model = model_sizes(make("qwen2", 64, 2, 4, 2))
    update = UpdateSizes(2**20, 1000, sampler_bytes=GIB)
    at = estimate_memory(model, update, ComputeOptions())
    assert at.total == 2 * at.weights + at.optimizer + GIB, "a CPU samples with copies"
    other = estimate_memory(model, replace(update, model_samples=False), ComputeOptions())
    assert other.total == at.weights + at.optimizer + GIB
    on_gpu = estimate_memory(model, replace(update, device_type="cuda"), ComputeOptions())
    assert on_gpu.total == at.weights + at.optimizer + GIB
    assert at.heap == (at.activations + at.logits) // 4 > on_gpu.heap == 0
    away = estimate_memory(model, replace(update, offload=True), ComputeOptions())
    assert away.total == 2 * at.weights + GIB
    without = estimate_memory(model, replace(update, sampler_bytes=0), ComputeOptions())
    updating = at.gradients + at.optimizer + at.activations + at.logits + at.heap
    assert without.total == at.weights + updating
    stays = estimate_memory(model, replace(update, sampler_stays=True), ComputeOptions())
    assert stays.total == at.weights + updating + GIB


@pytest.mark.parametrize("autocast", [False, True])
def test_sampled_tokens_take_what_the_samplers_pool_takes(autocast):
    model = make("qwen2", 64, 2, 4, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pool = KVPool(kv_shape(model))
    pool.allocate(10_000)
    at = estimate_memory(
        model_sizes(model),
        UpdateSizes(10, 10, sampled_tokens=10_000),
        ComputeOptions(autocast=autocast),
    )
    assert at.sampler == sum(slab.nbytes for slab in pool._slabs)


def test_the_estimate_is_told_in_lines_and_names_the_setting_to_lower():
    estimate = MemoryEstimate(GIB, 0, GIB, 2 * GIB, 40 * GIB, 300 * 2**20, 0, GIB, 45 * GIB)
    first, second = estimate.lines(64 * GIB, "cpu")
    assert first == "memory: about 45.0 GiB of 64.0 GiB free on cpu"
    assert second.startswith("memory: weights 1.0 GiB, gradients 1.0 GiB, optimizer 2.0 GiB")
    assert "reference" not in second and "logits 300 MiB" in second
    warning = estimate.lines(16 * GIB, "cuda")[2]
    assert warning.startswith("warning: ") and "max_tokens_per_batch" in warning
    lora = replace(estimate, activations=0, sampler=9 * GIB).lines(GIB, "cpu")[2]
    assert "train.prompts_per_step" in lora
    weights = MemoryEstimate(9 * GIB, 0, 0, 0, 0, 0, 0, 0, 9 * GIB).lines(GIB, "cpu")[2]
    assert "model.lora with model.dtype bfloat16" in weights
