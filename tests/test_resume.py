"""Runs that are stopped, damaged and resumed."""

import io
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.atomic import write_atomically
from graphpo_agent.cli import main
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import dump_config, load_config
from graphpo_agent.errors import RunError
from graphpo_agent.report.checkpoints import read_progress
from graphpo_agent.report.numbers import percent
from graphpo_agent.report.run_dir import RunDirectory, locked
from tests.runs import contents, rows, weights, without_times
from tests.worlds import ROOT, files_of_at_most, run_arguments, start_command, wait_for


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(reach: Path, tmp_path: Path) -> Path:
    """The output of a run that has taken one step."""
    output = tmp_path / "run"
    assert main(["train", *run_arguments(reach, output, "train.steps=1")]) == 0
    return output


def test_a_run_takes_no_directory_of_something_else(tmp_path: Path) -> None:
    manifest = tmp_path / "index" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text('{"kind": "bm25", "corpus": "../corpus.jsonl"}')
    with pytest.raises(RunError, match=r"manifest\.json is there and no run wrote it"):
        RunDirectory(manifest.parent).check_new()


def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(kb: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert main(["train", *run_arguments(kb, whole)]) == 0
    assert main(["train", *run_arguments(kb, halves, "train.steps=2")]) == 0
    # The graph logs must be cut back to the checkpoint: leave something behind it.
    with (halves / "graphs.jsonl").open("a") as file:
        file.write("half a line that a crash left")
    (halves / "config.yaml").write_text((whole / "config.yaml").read_text())
    assert main(["train", "--resume", str(halves)]) == 0
    assert weights(whole) == weights(halves) != (kb / "policy" / "model.safetensors").read_bytes()
    # Step 2 was the last one in the first half, so it was also evaluated greedily there.
    drop = {"progress", "eval/greedy_accuracy"}
    stripped = [
        [{k: v for k, v in row.items() if k not in drop} for row in without_times(run)]
        for run in (whole, halves)
    ]
    assert stripped[0] == stripped[1]
    assert (whole / "graphs.jsonl").read_text() == (halves / "graphs.jsonl").read_text()


def test_the_time_of_a_resumed_run_goes_on_from_its_last_row(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations count too: the last row holds one."""
    evaluated = rows(run)[-1]
    assert evaluated["time/eval"] > 0
    assert read_progress(run / "checkpoints/step-000001")["seconds"] == evaluated["time/seconds"]
    stream = _Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "--resume", str(run), "train.steps=2"]) == 0
    assert rows(run)[-1]["time/seconds"] > evaluated["time/seconds"]
    first = percent(rows(run)[0]["eval/accuracy"])
    assert f"step 2/2 · held-out {first} → " in stream.getvalue()


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_step(reach: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    long = ["train.steps=30", "train.eval_every=100"]
    assert main(["train", *run_arguments(reach, whole, *long)]) == 0
    process = start_command(["train", *run_arguments(reach, killed, *long)])
    wait_for(lambda: len(list(killed.glob("checkpoints/step-*"))) >= 2, process)
    process.kill()
    process.wait()
    assert main(["train", "--resume", str(killed)]) == 0
    assert weights(whole) == weights(killed)
    assert without_times(whole) == without_times(killed)


@pytest.mark.slow
def test_ctrl_c_is_status_130_and_one_line(reach: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start_command(["train", *run_arguments(reach, run, "train.steps=500")])
    wait_for(
        lambda: (run / "checkpoints").exists() and any(run.glob("checkpoints/step-*")), process
    )
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "graphpo: interrupted\n"
    assert not list(run.glob("checkpoints/.partial*"))
    assert main(["train", "--resume", str(run), f"train.steps={rows(run)[-1]['step'] + 1}"]) == 0


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(run: Path) -> None:
    kept = weights(run)

    def no_large_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000))

    process = start_command(
        ["train", "--resume", str(run), "train.steps=3"], preexec_fn=no_large_files
    )
    _, error = process.communicate(timeout=120)
    assert process.returncode == 2
    assert error.count("\n") == 1 and error.startswith("graphpo: ")
    assert weights(run) == kept
    assert main(["train", "--resume", str(run), "train.steps=3"]) == 0


@pytest.mark.parametrize("log", ["metrics", "graphs"])
def test_a_disk_that_is_full_at_a_log_names_it(
    reach: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    log: str,
) -> None:
    run = tmp_path / "run"
    path = run / f"{log}.jsonl"
    writer = {"metrics": "log_metrics", "graphs": "log_graph"}[log]
    write = getattr(RunDirectory, writer)

    def on_a_full_disk(self: RunDirectory, row: Any) -> None:
        with files_of_at_most(path.stat().st_size + 100):
            write(self, row)

    monkeypatch.setattr(RunDirectory, writer, on_a_full_disk)
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 2
    says = f"graphpo: File too large ({path}); what was complete before is still there\n"
    assert capsys.readouterr().err.endswith(says)
    assert path.read_text() == ""


def test_a_disk_that_is_full_at_a_whole_file_names_it_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    with files_of_at_most(100), pytest.raises(OSError, match="too large") as caught:
        write_atomically(path, "new" * 100)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_a_run_is_not_overwritten(
    run: Path, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    absent = f"model.path={tmp_path / 'absent'}"
    for more in ([], [absent], ["--dry-run"]):
        assert main(["train", *run_arguments(reach, run, *more)]) == 2
        assert f"continue it with --resume {run}" in capsys.readouterr().err
    below = run / "config.yaml/run"
    assert main(["train", *run_arguments(reach, below), "--dry-run"]) == 2
    assert f"{run / 'config.yaml'} is no directory" in capsys.readouterr().err
    assert before == contents(run)


def test_a_run_that_is_under_way_is_left_alone(
    run: Path, reach: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(run)
    with locked(run):
        for again in (["train", *run_arguments(reach, run)], ["train", "--resume", str(run)]):
            assert main(again) == 2
            error = capsys.readouterr().err
            assert error == f"graphpo: {run} is in use: another process trains there\n"
        assert before == contents(run)
    assert main(["train", "--resume", str(run), "train.steps=2"]) == 0


@pytest.mark.parametrize("change", [str(ROOT / "configs/toy/reach.yaml"), "output=elsewhere"])
def test_a_resumed_run_stays_where_and_what_it_is(
    run: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "config.yaml").read_text(), rows(run)
    assert main(["train", "--resume", str(run), "train.steps=2", change]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert change in told and ((run / "config.yaml").read_text(), rows(run)) == before


@pytest.mark.parametrize("through_verl", [False, True])
def test_a_run_goes_on_with_an_engine_that_reads_its_checkpoints(
    through_verl: bool, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = ["engine={kind: local}", "engine={kind: verl, max_context_tokens: 64}"]
    began, other = reversed(engines) if through_verl else engines
    run = tmp_path / "run"
    path, *changes = run_arguments(reach, run, began)
    RunDirectory.create(run, dump_config(load_config(RunConfig, path, changes)), 0, ["graphpo"])
    before = sorted(run.iterdir())
    assert main(["train", "--resume", str(run), other]) == 2
    error = capsys.readouterr().err
    assert "leave engine as it was, or start another run" in error and error.count("\n") == 1
    assert sorted(run.iterdir()) == before


def test_overrides_of_a_resumed_run_are_told_and_kept(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
    assert "from here on" not in capsys.readouterr().out
    changes = ["train.steps=2", "update.learning_rate=5e-5"]
    assert main(["train", "--resume", str(run), *changes]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if line.startswith("from here on")] == [
        "from here on update.learning_rate was 0.0003, now 5e-05",
        "from here on train.steps was 1, now 2",
    ]
    (accuracy,) = (line for line in told if line.startswith("held-out accuracy"))
    assert accuracy.split()[2] == f"{rows(run)[0]['eval/accuracy']:.1%}"
    assert "steps: 2" in (run / "config.yaml").read_text()
    assert len(json.loads((run / "manifest.json").read_text())["resumed"]) == 1
    left = run / "checkpoints/.partial/step-000001"  # of a kill while it was deleted
    left.mkdir(parents=True)
    assert main(["train", "--resume", str(run)]) == 0
    assert "complete after step 2;" in capsys.readouterr().out
    assert not left.exists()


def test_an_accuracy_that_was_never_measured_is_not_another_steps(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run / "metrics.jsonl"
    before, after = log.read_text().splitlines(keepends=True)
    assert "eval/accuracy" in after
    log.write_text(before.replace("eval/accuracy", "eval/accurate") + after)  # as long as it was
    assert main(["train", "--resume", str(run), "train.steps=2"]) == 0
    assert "held-out accuracy unknown → " in capsys.readouterr().out


def test_a_section_that_is_new_in_a_resumed_run_is_told_by_its_settings(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", str(run), "model.lora={rank: 2}"]) == 2
    told = capsys.readouterr().out.splitlines()
    assert {line for line in told if line.startswith("from here on")} == {
        "from here on model.lora.rank was not set, now 2",
        "from here on model.lora.alpha was not set, now 32.0",
        "from here on model.lora.target_modules was not set, now null",
    }


@pytest.mark.parametrize(
    "change",
    [
        "model.lora={rank: 2}",
        "method={name: pros, group_size: 4}",
        "reward=tests.worlds:bad_reward",  # fails in the first step
        "train.steps=9",
    ],
)
def test_a_resume_that_fails_changes_nothing(
    run: Path, change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = run / "metrics.jsonl"
    if change == "train.steps=9":
        kept = kept.rename(tmp_path / "mislaid.jsonl")
    files = (run / "config.yaml", run / "manifest.json", kept)
    before = [path.read_bytes() for path in files]
    assert main(["train", "--resume", str(run), "train.steps=2", change]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.read_bytes() for path in files] == before
    kept.rename(run / "metrics.jsonl")
    assert main(["train", "--resume", str(run), "train.steps=2"]) == 0
    assert rows(run)[-1]["step"] == 2


def test_a_run_that_never_reached_a_checkpoint_is_replaced(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = run_arguments(reach, run, "train.steps=1")
    assert main(["train", *arguments, "reward=tests.worlds:bad_reward"]) == 2
    assert "outside [0, 1]" in capsys.readouterr().err
    assert main(["train", *arguments]) == 0
    assert [row["step"] for row in rows(run)] == [0, 1]


@pytest.mark.parametrize(
    "damage", ["model.safetensors", "optimizer.pt", "metrics.jsonl", "manifest.json"]
)
def test_damage_is_named_before_anything_is_changed(
    run: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = run.rglob(damage)
    path.write_bytes(path.read_bytes()[:10])
    before = {file: file.read_bytes() for file in run.rglob("*.jsonl")}
    assert main(["train", "--resume", str(run), "train.steps=2"]) == 2
    error = capsys.readouterr().err
    named = f"{path.parent} cannot be loaded" if path.suffix == ".safetensors" else str(path)
    assert named in error and error.count("\n") == 1
    assert ("delete that checkpoint" in error) == (damage != "manifest.json")
    assert before == {file: file.read_bytes() for file in run.rglob("*.jsonl")}


def test_a_directory_that_holds_no_run_to_resume_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run \(config.yaml is missing\): name the output"):
        RunDirectory.existing(tmp_path)
    (tmp_path / "config.yaml").touch()
    says = r"holds no run to resume \(manifest.json is missing\): start one without --resume"
    with pytest.raises(RunError, match=says):
        RunDirectory.existing(tmp_path).check_manifest()


def test_files_that_no_run_wrote_are_not_overwritten(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("my: own")
    assert main(["train", *run_arguments(reach, tmp_path, "train.steps=1")]) == 2
    assert f"{tmp_path / 'config.yaml'} is there" in capsys.readouterr().err
    assert contents(tmp_path) == {tmp_path / "config.yaml": b"my: own"}


def test_neither_a_copy_of_a_checkpoint_nor_half_of_one_is_a_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for name in ("step-000010", "step-000009", "step-000009.bak", "step-old", "step-1000000"):
        (run.checkpoints_path / name).mkdir(parents=True)
        (run.checkpoints_path / name / "progress.json").touch()
    (run.checkpoints_path / "step-2000000").mkdir()
    names = [path.name for path in run.checkpoints()]
    assert names == ["step-000009", "step-000010", "step-1000000"]


def test_a_corrupt_checkpoint_names_itself(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = run / "checkpoints" / "step-000001" / "progress.json"
    for damaged in ("{", "null", "{}"):
        progress.write_text(damaged)
        assert main(["train", "--resume", str(run), "train.steps=2"]) == 2
        assert str(progress) in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "nothing")]) == 2
