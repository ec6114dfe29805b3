"""Warm starts through the command line and the functions under it."""

import json
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.build import build_sft_engine
from graphpo_agent.cli import main
from graphpo_agent.config import SftConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.data.tasks import load_demonstrations
from graphpo_agent.errors import RunError
from graphpo_agent.sft import finished_steps, warm_start, with_observations
from graphpo_agent.types import Demonstration, Piece
from tests.worlds import ROOT, files_of_at_most, sft_overrides, start_command, wait_for


def sft_arguments(place: Path, *overrides: str) -> list[str]:
    return [str(ROOT / f"configs/toy/{place.name}_sft.yaml"), *sft_overrides(place), *overrides]


def test_the_loss_falls_and_the_last_step_has_no_learning_rate_left(reach: Path) -> None:
    path, *overrides = sft_arguments(reach, "steps=40", "warmup_steps=0")
    config = load_config(SftConfig, path, overrides)
    seen: list[dict[str, float]] = []
    warm_start(
        build_sft_engine(config),
        load_demonstrations(Path(config.demonstrations)),
        config.steps,
        config.batch_size,
        config.seed,
        lambda step, metrics: seen.append(metrics),
    )
    assert len(seen) == 40
    assert seen[-1]["imitate/loss"] < 0.7 * seen[0]["imitate/loss"]
    assert seen[-1]["imitate/learning_rate"] < 0.1 * seen[0]["imitate/learning_rate"]


def test_every_batch_is_full_and_every_epoch_holds_each_demonstration_once() -> None:
    batches: list[list[int]] = []

    class Engine:
        def imitate(self, demonstrations: Any) -> dict[str, float]:
            batches.append(list(demonstrations))
            return {}

    engine: Any = Engine()
    demonstrations: Any = [0, 1, 2]
    warm_start(engine, demonstrations, 6, 8, 0, lambda step, metrics: None)
    drawn = [one for batch in batches for one in batch]
    assert [len(batch) for batch in batches] == [8] * 6
    assert all(sorted(drawn[i : i + 3]) == [0, 1, 2] for i in range(0, 48, 3))
    assert len({tuple(drawn[i : i + 3]) for i in range(0, 48, 3)}) > 1


def test_observations_are_learned_only_when_asked_for(kb: Path) -> None:
    demonstration = load_demonstrations(kb / "demonstrations.jsonl")[0]
    assert any(not piece.trained for piece in demonstration.pieces)
    assert all(piece.trained for piece in with_observations(demonstration).pieces)
    texts = [piece.text for piece in demonstration.pieces]
    assert [piece.text for piece in with_observations(demonstration).pieces] == texts


def test_an_observation_that_is_learned_does_not_end_a_trajectory() -> None:
    pieces = (Piece("<search>", True), Piece("1987", False, role="user"))
    cut = Demonstration("a", ({"role": "user", "content": "when?"},), pieces)
    assert not with_observations(cut).ends
    assert with_observations(replace(cut, pieces=pieces[:1])).ends


def test_a_warm_start_learns_observations_where_it_is_told_to(kb: Path, tmp_path: Path) -> None:
    shown = tmp_path / "all.jsonl"
    text = (kb / "demonstrations.jsonl").read_text()
    shown.write_text(text.replace('"trained": false', '"trained": true'))
    assert shown.read_text() != text
    models = []
    for name, more in (
        ("plain", []),
        ("asked", ["observations=true"]),
        ("all", [f"demonstrations={shown}"]),
    ):
        output = tmp_path / name
        own = ["observations=false", f"output={output}", *more]
        assert main(["sft", *sft_arguments(kb, *own)]) == 0
        models.append((output / "model.safetensors").read_bytes())
    assert models[0] != models[1] == models[2]


def test_the_same_seed_gives_the_same_model(reach: Path, tmp_path: Path) -> None:
    models = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        output = tmp_path / name
        assert main(["sft", *sft_arguments(reach, f"output={output}", f"seed={seed}")]) == 0
        models.append((output / "model.safetensors").read_bytes())
    assert models[0] == models[1] != models[2]


def stopped(arguments: list[str], partial: Path) -> subprocess.Popen[str]:
    """A warm start that is stopped behind the steps that it kept."""
    process = start_command(["sft", *arguments])
    wait_for(lambda: any(partial.glob("step-*")), process)
    process.send_signal(signal.SIGSTOP)
    return process


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_killed_warm_start_goes_on_to_the_same_model(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, output, partial = (tmp_path / name for name in ("whole", "policy", "policy.partial"))
    arguments = sft_arguments(reach, f"output={output}", "steps=100", "batch_size=4")
    assert main(["sft", *arguments, f"output={whole}"]) == 0
    assert f" in {whole}.partial; a kill costs those since\n" in capsys.readouterr().out
    process = stopped(arguments, partial)
    capsys.readouterr()
    assert main(["sft", *arguments]) == 2  # a second writer
    error = capsys.readouterr().err
    assert error == f"graphpo: {partial} is in use: another process trains there\n"
    process.kill()
    process.communicate()
    (partial / ".partial" / "step-000099").mkdir(parents=True)  # a kill inside a checkpoint
    assert not output.exists()
    assert main(["sft", *arguments]) == 0
    said = capsys.readouterr().out
    assert f" of 100 steps were finished before: {partial}\n" in said
    assert "step 1/100" not in said and "step 100/100" in said
    assert {path.name: data for path, data in contents(output).items()} == {
        path.name: data for path, data in contents(whole).items()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy", "whole"]


def test_steps_are_kept_for_the_same_warm_start_only(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, partial = tmp_path / "policy", tmp_path / "policy.partial"
    demonstrations, model = tmp_path / "demonstrations.jsonl", tmp_path / "untrained"
    shutil.copy(reach / "demonstrations.jsonl", demonstrations)
    shutil.copytree(reach / "untrained", model)
    own = [f"output={output}", f"demonstrations={demonstrations}", f"model.path={model}"]
    arguments = sft_arguments(reach, *own, "steps=100", "batch_size=4")
    process = stopped(arguments, partial)
    process.kill()
    process.communicate()
    capsys.readouterr()
    newest = max(partial.glob("step-*"))  # a kill may leave the one before, or a part of it
    left = contents(newest)

    def refused(*overrides: str) -> str:
        assert main(["sft", *arguments, *overrides]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and contents(newest) == left and not output.exists()
        return error

    says = f"graphpo: {partial} was left by an interrupted command with other"
    assert refused("seed=3", "learning_rate=1e-3").startswith(f"{says} learning_rate, seed: remove")
    rows = demonstrations.read_text()
    demonstrations.write_text("".join(sorted(rows.splitlines(keepends=True), reverse=True)))
    assert refused().startswith(f"{says} demonstrations: ")
    demonstrations.write_text(rows)
    with files_of_at_most(16_000):
        assert refused().endswith("cannot be written: File too large\n")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-9] + b"x" + weights[-8:])
    assert refused().startswith(f"{says} weights: ")
    (model / "model.safetensors").write_bytes(weights)
    progress = newest / "progress.json"
    progress.write_text("[]")
    left = contents(newest)
    assert refused().startswith(f"graphpo: {progress} is damaged")
    shutil.rmtree(partial)
    assert main(["sft", *arguments, "steps=2"]) == 0


def test_a_demonstration_that_is_too_long_is_told_before_the_first_step(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (reach / "demonstrations.jsonl").read_text().splitlines()[:40]
    for place in (30, 35):  # behind the one step that is asked for
        row = json.loads(rows[place])
        row["pieces"][0]["text"] *= 5000
        rows[place] = json.dumps(row)
    (tmp_path / "long.jsonl").write_text("\n".join(rows))
    overrides = [f"demonstrations={tmp_path}/long.jsonl", f"output={tmp_path}/policy"]
    assert main(["sft", *sft_arguments(reach, *overrides, "steps=1", "batch_size=1")]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("graphpo: demonstration reach-demonstration-30: ")
    assert "context" in said.err and said.err.endswith(" (2 such of 40)\n")
    assert [path.name for path in tmp_path.iterdir()] == ["long.jsonl"]


def test_a_model_that_cannot_be_written_takes_no_steps_away(reach: Path, tmp_path: Path) -> None:
    output, partial = tmp_path / "policy", tmp_path / "policy.partial"
    path, *overrides = sft_arguments(reach)
    engine = build_sft_engine(load_config(SftConfig, path, overrides))
    with (
        pytest.raises(RunError, match="cannot be written"),
        finished_steps(engine, output, {}) as steps,
    ):
        steps.add(1)
        left = contents(partial)
        with files_of_at_most(16_000):
            engine.save_model(output)
    assert left and contents(tmp_path) == left


class SlowDisk:
    """An engine whose checkpoints take two seconds."""

    def __init__(self) -> None:
        self.now = 100.0
        self.kept: list[int] = []

    def save_checkpoint(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self.kept.append(int(directory.name.removeprefix("step-")))
        self.now += 2.0


def test_steps_are_kept_when_losing_them_costs_much_more_than_keeping_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = SlowDisk()
    monkeypatch.setattr(time, "monotonic", lambda: engine.now)
    with suppress(KeyboardInterrupt), finished_steps(engine, tmp_path / "policy", {}) as steps:
        for step in range(1, 15):
            engine.now += 10.0
            steps.add(step)
            assert steps.interval == 60
        raise KeyboardInterrupt
    assert engine.kept == [1, 7, 13]
    assert [path.name for path in (tmp_path / "policy.partial").iterdir()] == ["step-000013"]


def test_a_directory_that_is_no_model_is_not_replaced(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["sft", *sft_arguments(reach, f"output={tmp_path}")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_model_is_not_replaced_by_its_own_warm_start(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(reach / "policy", tmp_path / "policy")
    before = (model / "model.safetensors").read_bytes()
    overrides = [f"model.path={model}", f"output={tmp_path}/./policy"]
    assert main(["sft", *sft_arguments(reach, *overrides)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is also an input" in error
    assert (model / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("output", ["thesis.txt", "thesis.txt/policy", "."])
def test_an_impossible_output_is_refused_before_the_work(
    output: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    overrides = [f"output={tmp_path / output}", "model.path=/never/loaded"]
    assert main(["sft", *sft_arguments(reach, *overrides)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(tmp_path) in error and "never" not in error
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.path=/nowhere/model", "/nowhere/model"),
        ("demonstrations=/nowhere/demos.jsonl", "/nowhere/demos.jsonl"),
        ("steps=0", "steps"),
        ("stepz=3", "stepz: unknown key"),
        ("engine.kind=vllm", "engine: unknown key"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    override: str, says: str, reach: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", *sft_arguments(reach, override)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
