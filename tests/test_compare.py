"""``graphpo compare`` through the command line: whole, interrupted, mistaken."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
import warnings
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import mean

import pytest
import torch
import yaml

from graphpo_agent.cli import main
from graphpo_agent.compare import MethodFile, find_methods, time_left
from graphpo_agent.errors import ConfigError
from graphpo_agent.types import Outcome, Task
from tests.report.recorder import recorded
from tests.runs import rows, without_times
from tests.worlds import ROOT, run_arguments, start_command

METHODS = ["treerpo", "grpo/as_released"]
KB = str(ROOT / "configs/toy/kb.yaml")


def dying_reward(task: Task, outcome: Outcome) -> float:
    """A verifier that takes its process with it."""
    os._exit(7)


def warning_reward(task: Task, outcome: Outcome) -> float:
    """A verifier that has something to say."""
    warnings.warn("the judge\nis late", stacklevel=2)
    return 0.5


def arguments(place: Path, out: Path, *more: str, methods: list[str] = METHODS) -> list[str]:
    config, _, *overrides = run_arguments(place, out, "train.steps=2", *more)
    options = ["--methods", *methods, "--seeds", "2", "--out", str(out)]
    return ["compare", config, *overrides, "update.learning_rate=2e-3", *options]


def everything(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def mistake(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """The one line that a mistake is."""
    capsys.readouterr()
    try:
        status = main(words)
    except SystemExit as stop:
        status = int(stop.code or 0)
    error = capsys.readouterr().err
    assert status == 2 and error.count("\n") == 1 and error.startswith("graphpo")
    return error


@pytest.fixture(scope="module")
def compared(reach: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "out"
    tracker = "trackers=[{class: tests.report.recorder:Recorder}]"
    assert main(arguments(reach, out, tracker)) == 0
    return out


@pytest.fixture
def copied(compared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compared, tmp_path / "out")


def test_every_method_runs_with_every_seed_and_the_same_overrides(compared: Path) -> None:
    runs = [compared / "runs" / label / f"seed-{k}" for label in METHODS for k in (0, 1)]
    assert sorted((compared / "runs").rglob("seed-*")) == sorted(runs)
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs]
    assert [c["seed"] for c in configs] == [0, 1, 0, 1]
    assert all(recorded(run)[1:] == [*rows(run), {"complete": True}] for run in runs)
    assert [c["method"]["name"] for c in configs] == ["treerpo", "treerpo", "grpo", "grpo"]
    assert [c["update"]["learning_rate"] for c in configs] == [2e-3] * 4  # after the presets
    assert configs[2]["update"]["dual_clip"] == 3.0  # the preset's own
    assert without_times(runs[2]) != without_times(runs[3])


def test_a_run_is_the_one_that_train_would_do(compared: Path, reach: Path, tmp_path: Path) -> None:
    preset = str(ROOT / "configs/methods/grpo/as_released.yaml")
    more = [preset, "train.steps=2", "update.learning_rate=2e-3", "seed=1"]
    assert main(["train", *run_arguments(reach, tmp_path / "run", *more)]) == 0
    assert without_times(tmp_path / "run") == without_times(
        compared / "runs/grpo/as_released/seed-1"
    )


def test_where_there_is_a_gpu_processes_begin_afresh_and_do_the_same(
    compared: Path, reach: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    begun: list[SpawnProcess] = []
    start = SpawnProcess.start

    def starting(process: SpawnProcess) -> None:
        begun.append(process)
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", starting)
    words = arguments(reach, tmp_path / "out", methods=["grpo/as_released"])
    assert main([*words, "--seeds", "1-1"]) == 0
    assert len(begun) == 1
    run = "runs/grpo/as_released/seed-1"
    assert without_times(tmp_path / "out" / run) == without_times(compared / run)


def test_the_numbers_are_those_of_the_runs(compared: Path) -> None:
    record = json.loads((compared / "compare.json").read_text())
    assert [method["method"] for method in record["methods"]] == METHODS
    accuracy: dict[str, list[float]] = {}
    for method in record["methods"]:
        logs = [rows(compared / "runs" / method["method"] / f"seed-{k}") for k in (0, 1)]
        accuracy[method["method"]] = [log[-1]["eval/accuracy"] for log in logs]
        expected = {
            "final_accuracy": mean(accuracy[method["method"]]),
            "greedy_accuracy": mean(log[-1]["eval/greedy_accuracy"] for log in logs),
            "tokens": mean(log[-1]["tokens/total"] for log in logs),
            "steps": 2,
            "trajectories": mean(row["rollout/terminals"] for log in logs for row in log[1:]),
            "entropy": mean(log[-1]["update/entropy"] for log in logs),
        }
        for name, value in expected.items():
            assert method[name]["mean"] == pytest.approx(value, rel=1e-5), name
    pairs = zip(accuracy[METHODS[1]], accuracy[METHODS[0]], strict=True)
    (difference,) = record["differences"]
    assert difference["final_accuracy"]["mean"] == pytest.approx(mean(a - b for a, b in pairs))
    page = (compared / "compare.md").read_text()
    assert all(f"\n| {label} | " in page for label in METHODS)
    assert (compared / "compare.svg").read_text().startswith("<?xml")


def test_what_is_complete_is_kept(
    copied: Path, reach: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(copied / "runs")
    (copied / "compare.md").unlink()
    assert main(arguments(reach, copied)) == 0
    said = capsys.readouterr().out
    assert "4 of 4 runs are complete and kept" in said and "no budget.tokens: " in said
    assert everything(copied / "runs") == before
    assert (copied / "compare.md").exists()


def test_what_a_reader_should_know_of_the_methods_is_told_first(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _, *overrides = run_arguments(reach, tmp_path, "train.steps=1", "budget.tokens=64")
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: {name: graphpo, schedule: [9, 9, 9]}\n")
    options = ["--methods", "grpo", str(mine), "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main(["compare", config, *overrides, *options]) == 0
    out = capsys.readouterr().out
    places = [line for line in out.splitlines() if line.startswith("[")]
    assert ["begins" in line for line in places] == [True, False, True, False]  # one at a time
    before, _, _ = out.partition("begins")
    assert "no budget.tokens" not in before
    assert "mine: budget: graphpo as configured makes up to 729 paths" in before
    assert "grpo: budget" not in before
    assert "update.learning_rate differs: grpo 1e-06, mine 0.0003\n" in before


def test_what_was_interrupted_goes_on_from_its_checkpoint(
    compared: Path, copied: Path, reach: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, unbegun = copied / "runs/grpo/as_released/seed-0", copied / "runs/treerpo/seed-1"
    shutil.rmtree(begun / "checkpoints/step-000002")  # stopped in step 2, whose row was written
    shutil.rmtree(unbegun)
    unreported = copied / "runs/grpo/as_released/seed-1"
    (unreported / "report.html").unlink()
    first = (copied / "runs/treerpo/seed-0/manifest.json").read_bytes()
    assert main([*arguments(reach, copied), "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "1 of 4 runs are complete" in said
    assert "[2/4] grpo/as_released, seed 0 goes on from step 1" in said
    assert "[3/4] treerpo, seed 1 begins" in said
    assert "[3/4] treerpo, seed 1: held-out accuracy" in said
    assert (unreported / "report.html").exists()
    for label in ("grpo/as_released/seed-0", "treerpo/seed-1", "grpo/as_released/seed-1"):
        run = Path("runs") / label
        assert without_times(copied / run) == without_times(compared / run)
    assert (copied / "runs/treerpo/seed-0/manifest.json").read_bytes() == first


def test_a_changed_configuration_is_refused(
    copied: Path, reach: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(copied)
    error = mistake(capsys, arguments(reach, copied, "update.epochs=3", "train.eval_every=9"))
    assert "runs/treerpo/seed-0 was run with another configuration" in error
    assert "update.epochs was 1, now 3 (and 1 more)" in error
    assert everything(copied) == before


def test_further_seeds_and_methods_join(
    copied: Path, reach: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = arguments(reach, copied, methods=["treerpo"])
    more[more.index("--seeds") + 1] = "1-2"
    assert main(more) == 0
    assert "1 of 2 runs are complete" in capsys.readouterr().out
    record = json.loads((copied / "compare.json").read_text())
    assert [run["seed"] for run in record["methods"][0]["runs"]] == [1, 2]
    assert record["differences"] == []


@pytest.mark.parametrize(
    ("methods", "more", "says"),
    [
        (["nonesuch"], [], "no nonesuch/graphpo_adapted; it has"),
        (["grpo/nonesuch"], [], "it has grpo/as_released, grpo/graphpo_adapted"),
        (["dr_grpo"], [], "it has dr_grpo/as_released"),
        (["tree", "grpo", "grpo/graphpo_adapted"], [], "grpo/graphpo_adapted is there twice"),
        (["grpo", "mine/grpo.yaml"], [], "both called 'grpo'"),
        (["/nowhere/mine.yaml"], [], "/nowhere/mine.yaml"),
        (["treerpo", "grpo"], ["method.group_size=4"], "treerpo: "),
        (["grpo", "treerpo"], ["reward=os:sep"], "os:sep"),
        (["grpo"], ["seed=3"], "--seeds"),
        (["grpo"], ["tasks.heldout=null"], "held-out"),
        (["treerpo", "grpo"], ["model.path=/nowhere/model"], "treerpo: model directory /nowhere"),
        (["grpo"], ["tasks.train=/nowhere/tasks"], "grpo: /nowhere/tasks"),
        (["grpo"], ["train.prompts_per_step=9999"], "grpo: train.prompts_per_step is 9999"),
        (
            ["grpo"],
            ["engine={kind: verl, max_context_tokens: 128}"],
            "engine.kind verl is for train alone",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    methods: list[str],
    more: list[str],
    says: str,
    reach: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert says in mistake(capsys, arguments(reach, tmp_path / "out", *more, methods=methods))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--seeds", "0", "'0' is no seed at all"),
        ("--seeds", "7-3", "'7-3' is no seed at all"),
        ("--seeds", f"{2**63}-{2**63}", f"'{2**63}-{2**63}': a seed is below 2**63"),
        ("--seeds", "two", "'two' is neither a number of seeds nor FIRST-LAST"),
        ("--seeds", "-1", "'-1' is neither"),
        ("--seeds", "0-99999999999", "'0-99999999999' is more than 1000 seeds"),
        ("--jobs", "0", "'0' is not a whole number of at least 1"),
        ("--jobs", "two", "'two' is not a whole number"),
    ],
)
def test_numbers_that_cannot_be(
    option: str, value: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--methods", "grpo", "--out", str(tmp_path / "out"), option, value]
    assert f"{option}: {says}" in mistake(capsys, ["compare", KB, *options])


def test_an_output_that_is_a_file(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("mine")
    assert "not a directory" in mistake(capsys, arguments(reach, tmp_path / "out"))
    unnamed = [*arguments(reach, tmp_path / "out"), "--out", ""]
    assert "--out '' is not a directory" in mistake(capsys, unnamed)
    assert "is no UTF-8 text" in mistake(capsys, arguments(reach, tmp_path / "out-\udcff"))


def test_a_mistake_names_its_files(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = mistake(capsys, ["compare", "/nowhere.yaml", "--methods", "grpo", "--out", "out"])
    assert "cannot read configuration /nowhere.yaml" in error
    mine = tmp_path / "mine.yaml"
    mine.write_text("foo: 1")
    error = mistake(capsys, arguments(reach, tmp_path / "out", methods=[str(mine)]))
    assert f"reach.yaml + {mine}: foo: unknown key" in error


@pytest.mark.parametrize(
    ("reward", "says"),
    [("tests.worlds:bad_reward", "outside [0, 1]"), (f"{__name__}:dying_reward", "status 7")],
)
def test_a_run_that_fails_is_named(
    reward: str, says: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(reach, tmp_path / "out", f"reward={reward}")
    assert "treerpo, seed 0: " in (error := mistake(capsys, words)) and says in error
    assert says in mistake(capsys, [*words, "--jobs", "4"])
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_warning_in_a_run_is_a_line(reach: Path, tmp_path: Path) -> None:
    more = ("train.steps=1", f"reward={__name__}:warning_reward")
    process = start_command(arguments(reach, tmp_path / "out", *more, methods=["grpo"]))
    _, told = process.communicate()
    assert process.returncode == 0
    assert "graphpo: the judge is late\n" in told and "Warning" not in told


def test_overrides_behind_the_methods_are_overrides(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = arguments(reach, tmp_path / "out", methods=["grpo", "train.steps=none"])
    assert "train.steps" in mistake(capsys, words)


def test_names_are_looked_up_in_the_nearest_presets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets, config = tmp_path / "a/configs/methods", str(tmp_path / "a/b/mine.yaml")
    for name in ("graphpo/paper", "graphpo/graphpo_adapted", "grpo/graphpo_adapted"):
        (presets / name).parent.mkdir(parents=True, exist_ok=True)
        (presets / f"{name}.yaml").write_text("")
    found = find_methods(
        config, ["graphpo", "grpo", "graphpo/graphpo_adapted", "methods/x/mine.yml"]
    )
    assert found == [
        MethodFile("graphpo", presets / "graphpo/paper.yaml"),
        MethodFile("grpo", presets / "grpo/graphpo_adapted.yaml"),
        MethodFile("graphpo/graphpo_adapted", presets / "graphpo/graphpo_adapted.yaml"),
        MethodFile("mine", Path("methods/x/mine.yml")),
    ]
    named = [str(presets / "graphpo/paper.yaml"), "configs/methods/grpo/as_released.yaml"]
    assert [method.label for method in find_methods(config, named)] == [
        "graphpo",
        "grpo/as_released",
    ]
    # Nothing above the configuration: the working directory has them.
    elsewhere = str(tmp_path / "c/mine.yaml")
    monkeypatch.chdir(tmp_path / "a")
    assert find_methods(elsewhere, ["grpo"])[0].path == presets / "grpo/graphpo_adapted.yaml"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no configs/methods"):
        find_methods(elsewhere, ["grpo"])


def test_time_left_is_that_of_runs_of_the_same_method() -> None:
    # grpo took 12 s on average, all together took 20 s.
    seconds = {"grpo": [10.0, 14.0], "tree": [36.0], "dapo": []}
    assert time_left(seconds, ["grpo", "dapo", "tree"]) == 12 + 20 + 36
    assert math.isnan(time_left({"grpo": []}, ["grpo"]))


def started(words: list[str], run: Path) -> "subprocess.Popen[str]":
    """A comparison whose first run has made two steps."""
    process = start_command(words)
    for _ in range(1200):
        if (run / "checkpoints/step-000002").exists():
            return process
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    raise AssertionError("nothing happened in two minutes")


@pytest.mark.slow
def test_ctrl_c_loses_at_most_a_step(reach: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=300", "train.eval_every=300", "budget.tokens=150"]
    words = arguments(reach, tmp_path / "out", *overrides)
    run = tmp_path / "out/runs/treerpo/seed-0"
    process = started([*words, "--jobs", "2"], run)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error == "graphpo: interrupted\n"
    assert not list(run.glob("checkpoints/.partial*"))
    reached = len(rows(run))
    again = start_command(words)
    assert again.stdout is not None
    newest = int(max(run.glob("checkpoints/step-*")).name.removeprefix("step-"))
    assert f"goes on from step {newest}," in again.stdout.readline()
    assert newest >= reached - 2
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)


@pytest.mark.slow
def test_a_killed_comparison_leaves_nothing_running(reach: Path, tmp_path: Path) -> None:
    words = arguments(reach, tmp_path / "out", "train.steps=5000", "train.eval_every=5000")
    runs = [tmp_path / f"out/runs/{label}/seed-0" for label in METHODS]
    process = started([*words, "--jobs", "2"], runs[-1])
    process.kill()
    process.communicate(timeout=60)  # the pipes are closed when nobody holds them any more
    there = [len(rows(run)) for run in runs]
    time.sleep(2)
    assert [len(rows(run)) for run in runs] == there
    assert all(0 < steps < 5000 for steps in there)
