"""A whole run through verl on the CPU: Ray, FSDP2 over gloo, a vLLM server."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from graphpo_agent.cli import main
from graphpo_agent.engines.tokenizer import HfTokenizer
from tests.engines.vllm_models import SIZES as VLLM_SIZES
from tests.report.recorder import recorded
from tests.worlds import ROOT, SIZES, run_arguments, sft_overrides

pytestmark = [pytest.mark.verl, pytest.mark.slow]

ENGINE = "engine={{kind: verl, max_context_tokens: 128, grower_processes: 1, {}}}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """reach with attention heads of a size that vLLM knows on a CPU."""
    place = tmp_path_factory.mktemp("verl") / "reach"
    model = ["hidden_size=64", "num_layers=1", "num_heads=2"]
    assert main(["data", "toy", "reach", str(place), "seed=0", *SIZES, *model]) == 0
    assert main(["sft", str(ROOT / "configs/toy/reach_sft.yaml"), *sft_overrides(place)]) == 0
    return place


def trained(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "graphpo_agent.cli", "train", *arguments],
        cwd=ROOT,
        env=os.environ
        | {"RAY_ADDRESS": "127.0.0.1:1"},  # of a cluster that the run does not ask for
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.timeout(900)
def test_experts_and_convolutions_are_drawn_from_as_they_are_trained(
    world: Path, cluster: str, tmp_path: Path
) -> None:
    """On two nodes."""
    policy, run = tmp_path / "policy", tmp_path / "run"
    shutil.copytree(world / "policy", policy)
    torch.manual_seed(0)
    config = Lfm2MoeConfig(
        vocab_size=HfTokenizer.load(str(policy)).vocab_size,
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,  # which vLLM would fill up
        conv_dim=64,
        block_dim=64,
        **VLLM_SIZES,
    )
    Lfm2MoeForCausalLM(config).save_pretrained(policy)
    changes = ("train.steps=2", "train.max_resample=0", "train.eval_tasks=4")
    engine = ENGINE.format(f"nodes: 2, gpus_per_node: 1, ray_address: '{cluster}'")
    done = trained(run_arguments(world, run, engine, *changes, f"model.path={policy}"))
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert row["update/grad_norm"] > 0
        assert row["verl/training/rollout_probs_diff_max"] < 1e-5
    saved = run / "checkpoints/global_step_2/actor/huggingface/model.safetensors"
    before, after = load_file(policy / "model.safetensors"), load_file(saved)
    assert before.keys() == after.keys()
    assert any(".experts." in name and (after[name] != before[name]).any() for name in before)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lora", "tensor_parallel"), [("null", 1), ("{rank: 4}", 2)])
def test_two_steps_train_on_what_the_servers_drew(
    lora: str, tensor_parallel: int, world: Path, tmp_path: Path
) -> None:
    run, train = tmp_path / "run", tmp_path / "train.jsonl"
    lines = (world / "train.jsonl").read_text().splitlines()[:6]  # all are drawn in two steps
    long = json.loads(lines[0]) | {"id": "long", "question": "a " * 80}
    # Its prompt leaves less room than a whole response takes.
    lines[0] = json.dumps(json.loads(lines[0]) | {"question": "a " * 50})
    train.write_text("\n".join([json.dumps(long), *lines]) + "\n")
    engine = ENGINE.format(f"gpus_per_node: 2, tensor_parallel: {tensor_parallel}")
    arguments = run_arguments(
        world, run, engine, "train.steps=2", "train.max_resample=0", "train.eval_tasks=4"
    )
    arguments += [f"tasks.train={train}", f"model.lora={lora}", "update.mismatch_cap=1.0"]
    arguments.append("reward={class: tests.worlds:CountingReward, name: seen}")
    arguments.append("trackers=[{class: tests.report.recorder:Recorder}]")
    done = trained(arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"report: {run}" in done.stdout and "WARNING" not in done.stderr
    assert "1 training tasks are left out, as the first: task 'long'" in done.stdout

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert recorded(run)[1:] == [*rows, {"complete": True}]
    assert [row["progress"] for row in rows] == [0, 0.5, 1]
    assert 0 <= rows[0]["eval/accuracy"] <= 1 and 0 <= rows[2]["eval/accuracy"] <= 1
    assert rows[0]["eval/outages"] == rows[2]["eval/outages"] == 0
    for row in rows[1:]:
        assert np.isfinite(row["update/loss"]) and row["update/grad_norm"] > 0
        assert row["update/optimizer_steps"] == 2  # 3 graphs in minibatches of 2
        assert 3 <= row["update/rows"] <= 3 * row["rollout/terminals"]  # those that move weights
        assert row["tokens/generated"] > 0
        assert row["seen"] == pytest.approx(3 * row["rollout/terminals"])
        assert 0 < row["update/computed_tokens"] < row["update/row_tokens"]
        # The servers draw with the weights of the trainer, after a step too.
        assert row["verl/training/rollout_probs_diff_max"] < 1e-5
        assert row["update/mismatch"] < 1e-5
        assert 0.2 < row["update/mismatch_capped"] < 0.9  # those that it is above by a rounding
    assert rows[2]["tokens/total"] == rows[1]["tokens/generated"] + rows[2]["tokens/generated"]

    assert json.loads((run / "manifest.json").read_text())["seed"] == 0
    assert "kind: verl" in (run / "config.yaml").read_text()
    saved = run / "checkpoints/global_step_2/actor/huggingface/model.safetensors"
    best = run / "checkpoints/best/step-000002"
    assert (best / "model.safetensors").samefile(saved)
    assert f"best held-out accuracy {rows[2]['eval/accuracy']:.1%}: {best}\n" in done.stdout
    before, after = load_file(world / "policy/model.safetensors"), load_file(saved)
    moved = {name: float(np.abs(after[name] - before[name]).max()) for name in before}
    assert max(moved.values()) > 1e-4
