"""The memory estimate against what a real update allocates."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
)

from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.engines.local import flat_attention, saved
from graphpo_agent.engines.local.cache import PAGE, KVPool, KVShape
from graphpo_agent.engines.local.cached_pass import kv_shape
from graphpo_agent.engines.local.forward import flat_passes, score_tokens
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.memory import (
    MemoryEstimate,
    UpdateSizes,
    estimate_memory,
    free_memory,
    model_sizes,
)
from graphpo_agent.engines.local.model import context_limit, load_model, model_without_weights
from graphpo_agent.engines.local.optimizer import make_adamw, optimizer_step
from graphpo_agent.engines.local.options import ComputeOptions, OptimizerOptions
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.local.saved import saved_bytes
from graphpo_agent.engines.local.stretch_attention import stretch_layout
from graphpo_agent.memory import describe_memory, memory_of
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.graphs import tree_sample, use_slow_flash_attention
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
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with flat_passes(model, compute), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        scores = score_tokens(model, batch, 1.0, compute)
        total = sum(kept.values())
        scores.logprobs.sum().backward()
    return total - len(batch.target_ids) * 500 * 4


def counted(config, batch, compute, adapters=False, dtype=torch.float32):
    """The same as it is told before a run."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if adapters:
        add_adapters(model, LoraOptions(4, 8.0))
    return saved_bytes(model, batch, compute, torch.device("cpu"))


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
    found = counted(model.config, batch, compute, adapters, dtype)
    assert found == pytest.approx(really_saved(model, batch, compute), rel=0.01)


LAYER = {"vocab_size": 500, "hidden_size": 128, "num_hidden_layers": 3, "pad_token_id": 0}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
WIDE = {"intermediate_size": 384, **LAYER}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES = [
    Qwen3Config(**WIDE, **HEADS),
    Gemma3TextConfig(**WIDE, **HEADS),
    Olmo2Config(**WIDE, **HEADS),
    GPT2Config(**LAYER, num_attention_heads=8, n_positions=512),
    GPT2Config(**LAYER, num_attention_heads=8, n_positions=512, n_inner=80),
    OPTConfig(**LAYER, num_attention_heads=8, ffn_dim=384, word_embed_proj_dim=128),
    GPTNeoXConfig(**WIDE, num_attention_heads=8),
    MixtralConfig(num_local_experts=4, **WIDE, **HEADS),
    Qwen3MoeConfig(**EXPERTS, **WIDE, **HEADS),
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
    found = counted(config, batch, compute)
    assert found == pytest.approx(really_saved(model, batch, compute), rel=0.01)
    assert model_sizes(model).weight_bytes == sum(p.nbytes for p in model.parameters())


def test_layers_that_look_at_their_numbers_cannot_be_counted(tmp_path, reach):
    config = GraniteMoeConfig(
        **WIDE, num_attention_heads=8, num_key_value_heads=2, num_local_experts=4
    )
    directory = tmp_path / "policy"
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    path, *changes = run_arguments(reach, tmp_path, f"model.path={directory}", "model.device=cpu")
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
            found = counted(model.config, batch, compute)
            wanted = really_saved(model, batch, compute) + of_one_layer
        assert found == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_keeps_inputs_of_layers_and_one_layer_or_the_rounded_weights(autocast):
    model = make("qwen2", 64, 6, 4, 4)
    (batch,) = pack([tree_sample((2, 5, 4), 16, 48)], 10_000)
    compute = ComputeOptions(autocast=autocast, checkpoint_layers=True)
    whole = counted(model.config, batch, ComputeOptions(autocast=autocast))
    inputs = really_saved(model, batch, compute)
    found = counted(model.config, batch, compute)
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
    assert at.sampler == pool._tokens.nbytes


def told(world, output, *overrides, prompt_tokens=0):
    """The estimate of a run."""
    path, *changes = run_arguments(world, output, *overrides)
    config = load_config(RunConfig, path, changes)
    return memory_of(config, prompt_tokens)


@pytest.mark.parametrize(
    ("method", "edges"),
    [
        (["method={name: tree, schedule: [2, 3]}"], 2 + 6 + 6),
        (["method={name: tree, schedule: [2, 3]}", "budget.tokens=75"], 8),
        (["method={name: tree, schedule: [2, 3]}", "budget.trajectories=5"], 3 * 5),
        (["method={name: grpo, group_size: 4}"], 3 * 4),
        (["method={name: treerl, trees: 2}"], 3 * 2 * (1 + 2 * 2)),
    ],
)
def test_the_sampler_holds_the_tokens_of_all_graphs_of_a_step(reach, tmp_path, method, edges):
    run = (
        *method,
        "mode={kind: segment, segment_length: 10, max_response_tokens: 30}",
        "model.device=cpu",
    )
    one, three = (
        told(reach, tmp_path, *run, f"train.prompts_per_step={count}") for count in (1, 3)
    )
    model = load_model(str(reach / "policy"))
    token = kv_shape(model).bytes_per_token
    sampled = 75 if "budget.tokens=75" in method else edges * 10
    assert one.sampler == (sampled + edges * (PAGE - 1)) * token, "a page may have room left"
    assert three.sampler == 3 * one.sampler
    parts = (
        one.weights,
        one.gradients,
        one.optimizer,
        one.activations,
        one.logits,
        one.heap,
        one.sampler,
    )
    assert one.total == sum(parts), "on a CPU the sampler keeps its memory"


@pytest.mark.parametrize(
    ("method", "prompt", "limit", "told"),
    [
        ("{name: tree, schedule: [4, 2, 2]}", 500, 1000, True),  # two paths of 500 + 40 and less
        ("{name: tree, schedule: [4, 2, 2]}", 500, 1080, False),
        ("{name: tree, schedule: [2]}", 500, 700, False),  # all of the graph
        ("{name: grpo, group_size: 40}", 500, 999, True),
        ("{name: grpo, group_size: 40}", 500, 1000, False),
        ("{name: grpo, group_size: 40}", 8, 64, False),  # nothing but the prompt is shared
    ],
)
def test_rows_that_mostly_repeat_each_other_are_told(reach, tmp_path, method, prompt, limit, told):
    path, *changes = run_arguments(
        reach,
        tmp_path,
        f"method={method}",
        "mode={kind: segment, segment_length: 20, max_response_tokens: 80}",
        f"update.max_tokens_per_batch={limit}",
        "model.device=cpu",
    )
    lines = describe_memory(load_config(RunConfig, path, changes), prompt)
    assert any(line.startswith(f"memory: rows of {limit:,} tokens") for line in lines) == told


@pytest.mark.parametrize(
    "vast",
    [
        "method={name: grpo, group_size: 1000000000000}",
        "method={name: tree, schedule: [2, 1000000000000]}",
        "mode={kind: segment, segment_length: 1, max_response_tokens: 1000000000000}",
    ],
)
def test_numbers_far_too_large_are_told_and_cost_nothing_themselves(reach, tmp_path, vast):
    path, *changes = run_arguments(reach, tmp_path, vast, "model.device=cpu")
    assert describe_memory(load_config(RunConfig, path, changes), 10)[0].startswith("memory: about")


def test_no_answer_is_longer_than_the_contexts_of_the_model(reach, tmp_path):
    def at(longest):
        mode = f"mode={{kind: segment, segment_length: 8, max_response_tokens: {longest}}}"
        return told(reach, tmp_path, mode, "model.device=cpu")

    reach_of_model = context_limit(load_model(str(reach / "policy")).config)
    assert at(reach_of_model + 1000) == at(reach_of_model)


def test_turns_hold_their_observations_and_paths_end_at_their_limit(kb, tmp_path):
    def tokens(*overrides):
        run = ("method={name: grpo, group_size: 2}", "train.prompts_per_step=1", *overrides)
        held = told(kb, tmp_path, *run, "model.device=cpu").sampler
        token = kv_shape(load_model(str(kb / "policy"))).bytes_per_token
        return held / token - 2 * 3 * (PAGE - 1)

    mode = ("mode.max_turns=3", "mode.max_turn_tokens=8", "mode.max_observation_tokens=30")
    assert tokens(*mode, "mode.max_response_tokens=1000") == 2 * 3 * (8 + 30)
    assert tokens(*mode, "mode.max_response_tokens=50") == 2 * 50


def test_short_turns_bring_more_observations_than_a_budget_has_long_turns(kb, tmp_path):
    mode = ("mode.max_turn_tokens=300", "mode.max_observation_tokens=100")
    run = ("train.prompts_per_step=1", "budget.tokens=640", *mode, "mode.max_response_tokens=470")
    held = told(kb, tmp_path, *run, "model.device=cpu").sampler
    token = kv_shape(load_model(str(kb / "policy"))).bytes_per_token
    assert held == (640 + 20 * (100 + PAGE - 1)) * token


def test_what_runs_at_once_is_no_more_than_there_are_paths(reach, tmp_path):
    """Twelve paths of up to 70 tokens, on shelves of 128 as they are in 16 bits."""
    run = (
        "model.autocast=true",
        "method={name: grpo, group_size: 4}",
        "mode={kind: segment, segment_length: 10, max_response_tokens: 70}",
        "train.prompts_per_step=3",
        "model.device=cpu",
    )
    token = kv_shape(load_model(str(reach / "policy"))).bytes_per_token // 2
    assert told(reach, tmp_path, *run).sampler == 12 * (128 + 70) * token
    limited = told(reach, tmp_path, *run, "engine={kind: local, max_batch_gib: 1e-6}")
    assert limited.sampler == int(1e-6 * GIB) + 12 * 70 * token


def test_a_row_holds_a_whole_path_however_short_rows_are_to_be(reach, tmp_path):
    run = ("model.device=cpu", "mode.max_response_tokens=500")
    short, path, long = (
        told(reach, tmp_path, *run, f"update.max_tokens_per_batch={tokens}")
        for tokens in (1, 562, 1124)
    )
    assert 0 < short.logits == path.logits, "nine eighths of a path"
    assert path.logits * 992 == long.logits * 500, "predicted tokens of rows of 562 and 1,124"
    assert 0 < short.activations == path.activations
    assert path.activations == pytest.approx(long.activations / 2, rel=0.01)


@pytest.mark.parametrize("prompt", [50, 500])
@pytest.mark.parametrize(
    ("method", "schedule", "segment"),
    [
        ("{name: tree, schedule: [2, 3]}", (2, 3, 1, 1), 10),
        ("{name: grpo, group_size: 6}", (6,), 40),
        ("{name: tree, schedule: [4]}", (4, 1), 20),  # later layers go on with one
    ],
)
def test_the_row_is_of_the_methods_own_graphs(reach, tmp_path, method, schedule, segment, prompt):
    mode = f"{{kind: segment, segment_length: {segment}, max_response_tokens: 40}}"
    run = (f"method={method}", f"mode={mode}", "model.device=cpu")
    found = told(reach, tmp_path, *run, "update.max_tokens_per_batch=2000", prompt_tokens=prompt)
    graph = tree_sample(schedule, segment, prompt)
    fit = min(2, 2000 // (len(graph.token_ids) - 6))  # the last tokens of leaves are left out
    graphs = [replace(graph, token_ids=graph.token_ids + 10_000 * i) for i in range(fit)]
    (batch,) = pack(graphs, 2000)
    config = load_model(str(reach / "policy")).config
    assert found.activations == pytest.approx(counted(config, batch, ComputeOptions()), rel=0.01)


def test_prompts_are_kept_once_a_graph_and_fill_rows(reach, tmp_path):
    run = (
        "method={name: grpo, group_size: 4}",
        "mode={kind: segment, segment_length: 10, max_response_tokens: 30}",
        "train.prompts_per_step=3",
        "model.device=cpu",
    )
    without, behind = (told(reach, tmp_path, *run, prompt_tokens=n) for n in (0, 500))
    token = kv_shape(load_model(str(reach / "policy"))).bytes_per_token
    assert behind.sampler - without.sampler == 3 * 500 * token
    run = (*run, "update.max_tokens_per_batch=1")
    one, many = (told(reach, tmp_path, *run, prompt_tokens=n) for n in (0, 500))
    assert many.logits * 30 == one.logits * 100, "rows of 33 and 596 tokens: nine eighths of a path"
    assert many.activations > 10 * one.activations


def test_vllm_holds_weights_of_its_own_beside_its_keys_and_values(reach, tmp_path):
    run = ("engine={kind: vllm, kv_cache_gib: 0.5}", "model.device=cpu")
    estimate = told(reach, tmp_path, *run)
    assert estimate.sampler == estimate.weights + GIB // 2
    halves = told(reach, tmp_path, *run, "model.autocast=true")
    assert halves.sampler == estimate.weights // 2 + GIB // 2


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


def test_free_memory_of_this_machine_is_plausible():
    assert 2**24 < free_memory(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(
    ("limit", "used", "free"), [(3 * 2**20, 2**20, 2**21), (2**20, 2**21, 0), ("max", 5, None)]
)
def test_a_containers_limit_is_respected(tmp_path, limit, used, free):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    found = free_memory(torch.device("cpu"), tmp_path)
    assert found == free if free is not None else found > 2**24


def held_by_shelves(policy):
    return sum(shelf._rows.nbytes for shelf in policy._rows._shelves.values())


def test_what_runs_at_once_is_bounded_however_long_the_contexts_get(
    make_model, tokenizer, on_shelves
):
    model = make_model(limit=1024)
    limit = 64 * 64 * kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, limit)
    held = []
    for length in (20, 100, 200, 400):
        context = policy.open([5] * length)
        requests = [SampleRequest(context, seed, 12) for seed in range(80)]
        assert len(complete(policy, requests, SamplingParams())) == 80
        held.append(held_by_shelves(policy))
    assert max(held) <= limit
    assert held[0] == limit, "and it is used"


def test_continuations_of_many_lengths_hold_no_more_together_than_the_bound(
    make_model, tokenizer, on_shelves
):
    model = make_model(limit=1024)
    limit = 40 * 64 * kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, limit)
    context = policy.open([5, 6, 7])
    held, seed = [], 0
    for lengths in ([2] * 29 + [60] * 11, [2] * 9 + [110] * 5, [200] * 5, [20] * 30):
        for length in lengths:
            request = SampleRequest(context, seed, length, min_new_tokens=length)
            policy.submit(request, SamplingParams())
            seed += 1
        for _ in range(3):
            policy.advance()
            held.append(held_by_shelves(policy))
    assert len(policy._rows._shelves) == 3
    assert max(held) <= limit
    assert policy._columns > 0.8 * policy._max_columns, "and it is used"


def test_one_continuation_runs_whatever_it_takes(make_model, tokenizer, on_shelves):
    model = make_model(limit=1024)
    token = kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, 64 * token)
    held = []
    for length in (20, 400, 100):
        requests = [SampleRequest(policy.open([5] * length), seed, 3) for seed in range(2)]
        assert len(complete(policy, requests, SamplingParams())) == 2
        held.append(held_by_shelves(policy))
    assert held == [64 * token, 512 * token, 128 * token]


def test_rows_in_the_pool_take_what_they_draw_beside_the_one_context_before_them(
    make_model, tokenizer
):
    model = make_model(limit=1024).cpu()
    token = kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, 10 * PAGE * token)
    context = policy.open([5] * 400)
    for seed in range(25):
        request = SampleRequest(context, seed, 12, min_new_tokens=12)
        policy.submit(request, SamplingParams())
    running = []
    while len(running) < 40:
        policy.advance()
        running.append(len(policy._rows.members))
    assert max(running) == 10, "a row takes a page at a time"
    assert policy._pool._used == 400 + 25 * 12


def test_a_pool_takes_memory_where_tokens_are_written():
    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    shape = KVShape(4, 4, 64, torch.float32, torch.device("cpu"))
    pool = KVPool(shape, by_layer=True)
    before = resident()
    pool.allocate(10_000)
    pool.allocate(90_000)  # all fresh
    slots = torch.from_numpy(pool.allocate(10_000))
    for layer in range(shape.num_layers):
        for tokens in pool.layer(layer):
            assert tokens.data_ptr() % 64 == 0 and not tokens[100_000:].any()
            tokens[slots] = 1.0
    held = (resident() - before) / shape.bytes_per_token
    assert 9_000 < held < 130_000, "the room of 200,000 is not written to"
