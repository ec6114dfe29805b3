"""What the engine's benchmark compares is the same training, in every layout."""

import importlib
import json

import numpy as np
import pytest
import torch

from benchmarks.engine_parts import linear_attention, prompts, rows_attention, sampling, step
from benchmarks.engine_parts.machine import slope
from benchmarks.engine_parts.models import SIZES, make_model, questions, save_model
from benchmarks.engine_parts.profile import category
from benchmarks.engine_parts.rows import edge_rows, path_rows, train_on_rows
from benchmarks.engine_parts.update import (
    SCHEDULES,
    Case,
    compare,
    gradient,
    packed_pass,
    random_graphs,
    token_data,
    works,
)
from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.graph.samples import to_path_rows

SIZE = SIZES["0.2M"]


def graphs(schedule=(2, 3), segment=3, prompt=4, count=2):
    return random_graphs(schedule, segment, prompt, count, SIZE.vocabulary)


def test_path_rows_are_those_of_the_package():
    samples = graphs()
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    expected = [row for sample in samples for row in to_path_rows(sample)]
    rows = path_rows(samples)
    assert len(rows) == len(expected) == 12
    for row, other in zip(rows, expected, strict=True):
        assert token_ids[row.source].tolist() == other.token_ids.tolist()
        assert row.trained.tolist() == other.loss_mask.tolist()
        assert row.prompt == 4


@pytest.mark.parametrize("merges", [False, True])
def test_the_sampled_workload_grows_responses_of_known_lengths(merges, tmp_path):
    save_model(tmp_path / "model", SIZE)
    policy = LocalPolicy(
        load_model(str(tmp_path / "model")), HfTokenizer.load(str(tmp_path / "model"))
    )
    case = sampling.Case("0.2M", (2, 2, 1), 4, 2, merges)
    for rollout in sampling.grow(sampling.workload(case), policy):
        graph = rollout.graph
        edges = np.diff(graph.offsets)[1:]
        assert (edges == 4).all() and set(graph.depth[graph.terminals]) == {3}
        assert merges or len(edges) == 2 + 4 + 4


@pytest.mark.parametrize("layout", [path_rows, edge_rows])
def test_every_trained_token_is_trained_once(layout):
    samples = graphs()
    trained = np.concatenate([sample.loss_mask for sample in samples])
    counts = np.zeros(len(trained), np.int64)
    for row in layout(samples):
        counts[row.source[row.trained]] += 1
    assert counts.tolist() == trained.astype(np.int64).tolist()


@pytest.mark.parametrize("every_position", [False, True])
@pytest.mark.parametrize("layout", [path_rows, edge_rows])
def test_gradients_of_all_layouts_agree(layout, every_position):
    model = make_model(SIZE, context=64)
    samples = graphs()
    data = token_data(samples)
    packed = gradient(model, lambda: packed_pass(model, samples, data))
    rows = gradient(
        model,
        lambda: train_on_rows(model, layout(samples), data, 40, every_position=every_position),
    )
    assert packed.norm() > 0
    torch.testing.assert_close(rows, packed, rtol=1e-4, atol=1e-5 * float(packed.abs().max()))


@pytest.mark.parametrize("name", linear_attention.SMALL)
def test_chains_of_a_flat_row_that_share_nothing_train_the_same(monkeypatch, name):
    """In two rows and in one, of linear attention layers."""
    size = SIZES[name]
    model, samples = make_model(size, context=64), graphs()
    data, rows = token_data(samples), path_rows(samples)
    packed = gradient(model, lambda: packed_pass(model, samples, data))
    for limit in (60, 200):
        monkeypatch.setattr(linear_attention, "ROW_TOKENS", limit)
        alone = gradient(model, lambda: linear_attention.paths_pass(model, rows, data))
        close = 1e-5 * float(packed.abs().max())
        torch.testing.assert_close(alone, packed, rtol=1e-4, atol=close)


def test_work_is_counted_token_by_token():
    # Paths of 4 + 3 + 3 tokens, the last of which predicts nothing; 6 paths, 8 edges.
    work = works(SIZE, graphs(count=1))
    assert work["paths"].tokens == 6 * 9
    assert work["edges"].tokens == 2 * 6 + 6 * 9
    assert work["packed"].tokens == 4 + 2 * 3 + 6 * 2
    heads = 6.0 * SIZE.vocabulary * SIZE.hidden * 8 * 3
    pairs = 6 * sum(range(1, 10))
    assert work["paths"].attention == 12.0 * SIZE.layers * SIZE.hidden * pairs
    assert work["paths"].flops == 6.0 * SIZE.matrices * 54 + heads + work["paths"].attention


def test_a_small_comparison_runs(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "tiny", (2, 2))
    row = compare(Case("0.2M", "tiny", 4))
    assert row["gradient error"] < 1e-4
    assert set(row["seconds"]) == {"packed", "paths", "paths, all logits", "edges"}
    assert 0 < row["index share"] < 1


def test_rows_of_both_kinds_grow_the_same_layers():
    row = rows_attention.measure(rows_attention.Case("0.2M", (2, 3), 4, 2), repeats=1)
    assert row["rows"] == 2 * 2 * 3
    assert row["path"] == rows_attention.PROMPT + 2 * 4
    assert row["pool"] > 0 and row["shelves"] > 0


def test_this_project_trains_on_the_task_that_all_engines_get(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(step.PEERS))
    peer = importlib.import_module("graphpo_step")
    monkeypatch.setattr(step, "questions", lambda count, numbers: questions(8, numbers))
    step.lay_down(step.Case("0.2M", 0, steps=2, repeats=1), tmp_path / "task")
    task = json.loads((tmp_path / "task" / "task.json").read_text())
    task |= {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 5}
    result = peer.run(task, tmp_path / "task", steps=2)
    assert len(result["seconds"]) == 2 and result["mean_length"] == 5


def test_no_token_of_a_ruled_out_kind_can_be_drawn():
    model = make_model(SIZE, never=(7,), context=64)
    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert logits.softmax(-1)[..., 7].max() == 0.0


def test_slope_is_the_exponent_of_a_power_law():
    assert slope([1.0, 10.0, 100.0], [3.0, 30.0 * 10, 300.0 * 100]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["torch/nn/functional.py", "{t}/models/qwen2.py", "{m}", "{e}/sampler.py"], "sampling"),
        (["{e}/flat_attention.py", "{t}/models/qwen2.py", "{m}", "{e}/forward.py"], "update"),
        (["{t}/utils/generic.py", "{m}", "{e}/sampler.py"], "sampling"),
        (["{e}/head.py", "{e}/sampler.py"], "sampling"),
        (["{e}/head.py", "{e}/token_scores.py", "{e}/engine.py"], "update"),
    ],
)
def test_what_the_models_forward_pass_calls_counts_as_the_model(files, expected):
    assert category([in_full(file) for file in files]) == f"model: {expected}"


def test_transformers_outside_a_forward_pass_is_no_model():
    files = ["{t}/modeling_utils.py", "{e}/attention.py", "{e}/sampler.py"]
    assert category([in_full(file) for file in files]) == "bookkeeping: sampler"


def in_full(file: str) -> str:
    packages, engine = "/x/site-packages", "/x/engines/local"
    module = "/x/torch/nn/modules/module.py"
    return file.format(t=f"{packages}/transformers", m=module, e=engine)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/x/graphpo_agent/graph/equivalence.py", "/x/graphpo_agent/rollout/grow.py"], "graph"),
        (["/x/asyncio/events.py", "/x/graphpo_agent/rollout/scheduler.py"], "bookkeeping"),
        (["/x/engines/tokenizer.py", "/x/graphpo_agent/rollout/agent.py"], "tokenizer"),
        (["/x/json/encoder.py", "/x/graphpo_agent/report/run_dir.py"], "bookkeeping"),
    ],
)
def test_other_stacks_are_named_after_their_innermost_own_part(files, expected):
    assert category(files).startswith(expected)


def test_prompts_with_a_first_token_of_their_own_share_nothing():
    row = prompts.measure(prompts.dialects()["search_r1"], "0.2M", 1)
    assert row["prefilled"]["apart"] == row["prompt"] * prompts.TASKS
    rest = row["prefilled"]["apart"] - row["alike"] * prompts.TASKS
    assert row["prefilled"]["shared"] <= row["alike"] + rest
