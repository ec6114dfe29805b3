"""The memory that a run's configuration will need."""

import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3_5TextConfig

from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.engines.local.cache import PAGE
from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.probe import kv_shape
from graphpo_agent.engines.local.reach import context_limit
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.memory import (
    _most_edges,
    _most_states,
    _most_summaries,
    _sampled_tokens,
    describe_memory,
    memory_of,
)
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.rollout.embed import HashingEmbedder
from graphpo_agent.rollout.grow import TASKS_AT_ONCE, Grower
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.rollout.summarize import PolicySummary
from graphpo_agent.types import SamplingParams, Task
from tests.engines.graphs import counted_bytes, tree_sample
from tests.worlds import run_arguments

GIB = 2**30


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


def test_the_sampler_holds_no_more_graphs_than_grow_at_once(reach, tmp_path):
    one, many, more = (
        told(reach, tmp_path, f"train.prompts_per_step={count}").sampler
        for count in (1, TASKS_AT_ONCE, 4 * TASKS_AT_ONCE)
    )
    assert one < many == more


@pytest.mark.parametrize("family", [Qwen2Config, Qwen3_5TextConfig])
def test_the_sampler_holds_what_the_policy_says_of_its_states(reach, tmp_path, family):
    policy = tmp_path / "policy"
    shutil.copytree(reach / "policy", policy)
    torch.manual_seed(0)
    tokenizer = HfTokenizer.load(str(policy))
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    AutoModelForCausalLM.from_config(
        family(vocab_size=tokenizer.vocab_size, max_position_embeddings=2048, **sizes, **heads)
    ).save_pretrained(policy)
    path, *changes = run_arguments(
        reach,
        tmp_path / "run",
        "method={name: graphpo, schedule: [2, 3]}",
        "mode={kind: segment, segment_length: 5, max_response_tokens: 15}",
        "state={kind: policy_summary, max_summary_tokens: 5, embedder: {kind: hashing}}",
        f"model.path={policy}",
    )
    config = load_config(RunConfig, path, changes)
    sampler = LocalPolicy(load_model(str(policy)), tokenizer)
    kept = {}
    release = sampler.release

    def look_and_release():
        kept.update(tokens=sampler._pool.used, states=sampler._states._used - 1)
        release()

    sampler.release = look_and_release
    grower = Grower(
        SegmentExpander(segment_length=5, max_response_tokens=15),
        lambda task, outcome: 0.0,
        PolicySummary(max_summary_tokens=5),
        HashingEmbedder(64),
        overlap=False,
    )
    (rollout,) = grower.grow(
        sampler, [Task("t", "Who?", ())], GraphPO(schedule=(2, 3)), SamplingParams(), (4,)
    )
    assert rollout.graph.num_edges == _most_edges(config)[0] == 14
    assert rollout.ledger.summary_tokens == _most_summaries(config) * 5
    needless = _most_summaries(config)  # their last tokens
    announced = rollout.graph.num_tokens[0] + _sampled_tokens(config, unused=0)
    assert kept["tokens"] == announced - needless, "what is drawn here fills its pages"
    if family is Qwen3_5TextConfig:
        assert kept["states"] == _most_states(config)


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
    assert found.activations == pytest.approx(
        counted_bytes(config, batch, ComputeOptions()), rel=0.01
    )


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
