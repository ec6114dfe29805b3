"""Whole runs through the command line: both modes, stopped and resumed."""

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphpo_agent.train as train_module
from graphpo_agent import commands
from graphpo_agent.atomic import write_atomically
from graphpo_agent.cli import main
from graphpo_agent.errors import RunError
from graphpo_agent.graph.jsonl import read_graphs
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.report.run_dir import RunDirectory, locked
from graphpo_agent.rewards.judge import Judge
from graphpo_agent.rollout.grow import Grower
from graphpo_agent.types import Outcome, Task
from tests.net.servers import Script, always, answer, serving
from tests.worlds import (
    ROOT,
    Storm,
    files_of_at_most,
    run_arguments,
    start_command,
    wait_for,
)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(run: Path) -> list[dict[str, Any]]:
    timed = ("time/", "tokens/per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows(run)]


def weights(run: Path) -> bytes:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return (newest / "model.safetensors").read_bytes()


def test_a_run_takes_no_directory_of_something_else(tmp_path: Path) -> None:
    manifest = tmp_path / "index" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text('{"kind": "bm25", "corpus": "../corpus.jsonl"}')
    with pytest.raises(RunError, match=r"manifest\.json is there and no run wrote it"):
        RunDirectory(manifest.parent).check_new()


@pytest.mark.parametrize("world", ["kb", "reach"])
def test_what_a_run_leaves(world: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place: Path = request.getfixturevalue(world)
    run = tmp_path / "run"
    overrides = ["train.steps=2", "train.max_resample=1"]
    assert main(["train", *run_arguments(place, run, *overrides)]) == 0
    before, *steps = rows(run)
    assert before["step"] == 0 and {"eval/accuracy", "eval/greedy_accuracy"} <= set(before)
    assert [row["step"] for row in steps] == [1, 2]
    assert steps[-1]["tokens/total"] == sum(row["tokens/generated"] for row in steps)
    assert "eval/accuracy" in steps[-1]
    assert {path.name for path in run.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "graphs.jsonl",
        "manifest.json",
        "metrics.jsonl",
        "report.html",
    }
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["seed"] == 0 and manifest["versions"]["torch"]


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


@pytest.mark.parametrize(
    "state",
    [
        "state={kind: policy_summary, max_summary_tokens: 4, embedder: {kind: hashing}}",
        "state={kind: key}",
        "state={kind: key, function: 'graphpo_agent.rewards.toy:facts_key'}",
        "state={kind: frozen_summary, max_summary_tokens: 8, embedder: {kind: hashing},"
        " chat: {class: graphpo_agent.local_chat:LocalChat, path: POLICY}}",
        "state={kind: text, embedder: {kind: encoder, path: POLICY}}",
    ],
)
def test_every_way_of_naming_a_state_runs(state: str, kb: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = state.replace("POLICY", str(kb / "policy"))
    assert main(["train", *run_arguments(kb, run, state, "train.steps=1")]) == 0
    summary_tokens = rows(run)[1]["tokens/summary"]
    assert (summary_tokens > 0) == ("policy_summary" in state)


def test_a_users_own_modules_beside_the_run_are_found(reach: Path, tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(
        "def reward(task, outcome):\n    return len(outcome.response) % 2\n"
        "def key(state):\n    return str(state.depth)\n"
    )
    script = Path(sys.executable).with_name("graphpo")
    own = ["reward=my_parts:reward", "state={kind: key, function: 'my_parts:key'}"]
    arguments = run_arguments(reach, tmp_path / "run", "train.steps=1", *own)
    done = subprocess.run([script, "train", *arguments], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run")[1]["reward/mean"] > 0


def test_what_a_reward_object_counts_is_in_the_metrics(reach: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = "reward={class: tests.worlds:CountingReward, name: seen}"
    assert main(["train", *run_arguments(reach, run, own, "train.steps=2")]) == 0
    terminals = [3 * row["rollout/terminals"] for row in rows(run)[1:]]
    assert [row["seen"] for row in rows(run)[1:]] == pytest.approx(terminals)


def test_another_seed_draws_other_rollouts(reach: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for run, seed in zip(runs, (0, 0, 1), strict=True):
        arguments = run_arguments(reach, run, f"seed={seed}", "train.steps=1")
        assert main(["train", *arguments]) == 0
    assert weights(runs[0]) == weights(runs[1]) != weights(runs[2])


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
def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(reach: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
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


def test_dry_run_prints_the_resolved_configuration_and_writes_nothing(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(kb, run, "train.steps=7"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "steps: 7" in printed
    assert "# memory: about" in printed and "# memory: prompts are not read" in printed
    assert "# tasks: 24 to train with, 8 held out\n" in printed
    trained = f"tasks.train={kb}/heldout.jsonl"
    few = [trained, "train.prompts_per_step=2"]
    assert main(["train", *run_arguments(kb, run, *few), "--dry-run"]) == 0
    assert "held out; 8 of these are training tasks\n" in capsys.readouterr().out
    gone = [*run_arguments(kb, run, "tasks.train=/nowhere/tasks.jsonl"), "--dry-run"]
    assert main(["train", *gone]) == 0
    assert "# tasks: not known yet: " in capsys.readouterr().out
    assert not run.exists()


def test_memory_is_told_and_tasks_are_checked_before_weights_are_loaded(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(kb / "policy", model)
    (model / "model.safetensors").write_bytes(b"damaged")
    arguments = run_arguments(kb, run, f"model.path={model}")
    assert main(["train", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(f"graphpo → {run}\nmemory: about ")
    assert "a weight file is damaged" in printed.err
    assert main(["train", *arguments, f"tasks.train={tmp_path}/none.jsonl"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "none.jsonl" in printed.err
    assert not run.exists()


def test_a_budget_of_paths_that_a_method_cannot_keep_is_told(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chains = "method={name: spo_chain, num_chains: 4}"
    for paths, status in ((4, 2), (5, 0)):
        some = [f"budget.trajectories={paths}", chains, "--dry-run"]
        assert main(["train", *run_arguments(reach, tmp_path / "run", *some)]) == status
    told = capsys.readouterr()
    assert "leaves spo_chain no rollouts beside its chains" in told.err
    assert "paths a prompt, and budget.trajectories is 5: most of its branches" in told.out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("reward=graphpo_agent.rewards.qa:exact_match", "qa:exact_match compares the answer"),
        (
            "reward={class: 'graphpo_agent.rewards.qa:Binarize', threshold: 0.5, "
            "reward: {function: 'graphpo_agent.rewards.qa:token_f1'}}",
            "qa:token_f1 compares the answer",
        ),
        ("state={kind: key}", "documents_key tells what an agent has found"),
    ],
)
def test_what_only_an_agent_has_is_refused_in_segment_mode(
    override: str, says: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *run_arguments(reach, tmp_path / "run", override), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_a_step_whose_every_path_met_an_outage_ends_the_run_with_one_line(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = {json.loads(line)["id"] for line in (kb / "train.jsonl").open()}
    let_it_storm(train_module, monkeypatch, trained.__contains__)
    run = tmp_path / "run"
    assert main(["train", *run_arguments(kb, run)]) == 2
    error = capsys.readouterr().err
    assert "trajectories unscored (outage_limit: 0.5)" in error and error.count("\n") == 1
    assert [row["step"] for row in rows(run)] == [0]


def test_a_search_server_that_is_down_ends_the_run_though_some_paths_need_none(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = "{class: retrievers.remote:RemoteRetriever, urls: '127.0.0.1:9', "
    down = f"mode.tools.search.retriever={remote} deadline_s: 0.5, tries: 1}}"
    run = tmp_path / "run"
    seldom = ["outage_limit=0.001", "train.prompts_per_step=6"]  # does this policy search
    made = [a for a in run_arguments(kb, run, *seldom) if not a.startswith("mode.tools")]
    assert main(["train", *made, down]) == 2
    captured = capsys.readouterr()
    assert "of this step's trajectories unscored" not in captured.out
    (line,) = captured.err.splitlines()[-1:]
    assert re.search("outages met ([1-9][0-9]*) of \\1 tool calls and left", line)
    assert all(row.get("tokens/tool_calls", 0) == 0 for row in rows(run))  # nobody searched yet
    assert main(["eval", *made, down, "--samples", "32"]) == 2
    assert "accuracy" not in capsys.readouterr().out


def test_a_step_that_lost_some_paths_to_outages_says_so(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_it_storm(train_module, monkeypatch, lambda task: sum(task.encode()) % 4 == 0)
    run = tmp_path / "run"
    assert main(["train", *run_arguments(kb, run, "outage_limit=0.99")]) == 0
    out = capsys.readouterr().out
    assert out.count("of this step's trajectories unscored; rollout/left_out") == 1
    assert any(0 < row.get("rollout/left_out", 0) < 1 for row in rows(run))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.path=/nowhere/model", "/nowhere/model"),
        ("tasks.train=/nowhere/tasks.jsonl", "/nowhere/tasks.jsonl"),
        ("mode.tools.search.retriever.directory=/nowhere/index", "/nowhere/index"),
        ("mode.tools.search.class=tools.search:Nonesuch", "tools.search:Nonesuch"),
        ("mode.tools.search.depth=3", "depth"),
        ("reward=graphpo_agent.rewards.qa:nonesuch", "nonesuch"),
        ("state={kind: key, function: 'no_module:f'}", "no_module"),
        ("train.prompts_per_step=2000", "prompts_per_step"),
        ("model.device=abacus", "abacus"),
        ("update.betas=[1.0, 0.9]", "update.betas"),
        ("reward=os:sep", "os:sep"),
        ("reward=os:getcwd", "task, outcome"),
        ("reward=graphpo_agent.rewards.qa", "reward: 'graphpo_agent.rewards.qa': write module"),
        ("state={kind: key, function: 'os:getcwd'}", "state.function: 'os:getcwd' cannot be"),
        (
            "mode.tools.search.class=tests.worlds:AnyArguments",
            "mode.tools.search: tests.worlds:AnyArguments has no run, name",
        ),
        ("mode.tools.search.class=tests.worlds:Runs", "Runs has no name, description, schema"),
        ("mode.tools.search.retriever=books", "mode.tools.search: tools.search:SearchTool: retri"),
        ("mode.tools.search.topk=many", "topk is not valid: input should be a valid integer"),
        ("method.merge_treshold=0.9", "merge_treshold: unknown key"),
        ("method.schedule=[6,0]", "method.schedule.1"),
    ],
)
def test_a_mistake_is_one_line_status_2_and_leaves_no_run(
    override: str, says: str, kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(kb, run, override)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error and error.startswith("graphpo: ")
    assert not run.exists()


@pytest.mark.parametrize("minibatch", [8, 2])
def test_a_policy_that_diverges_is_one_line_and_status_2(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], minibatch: int
) -> None:
    overrides = ["update.learning_rate=1e30", f"update.minibatch_graphs={minibatch}"]
    arguments = run_arguments(reach, tmp_path / "run", *overrides, "train.steps=3")
    assert main(["train", *arguments]) == 2
    assert "the policy has diverged; lower " in capsys.readouterr().err


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_is_not_overwritten(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
    before = contents(run)
    capsys.readouterr()
    absent = f"model.path={tmp_path / 'absent'}"
    for more in ([], [absent], ["--dry-run"]):
        assert main(["train", *run_arguments(reach, run, *more)]) == 2
        assert f"continue it with --resume {run}" in capsys.readouterr().err
    below = run / "config.yaml/run"
    assert main(["train", *run_arguments(reach, below), "--dry-run"]) == 2
    assert f"{run / 'config.yaml'} is no directory" in capsys.readouterr().err
    assert before == contents(run)


def test_a_run_that_is_under_way_is_left_alone(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
    before = contents(run)
    capsys.readouterr()
    with locked(run):
        for again in (["train", *run_arguments(reach, run)], ["train", "--resume", str(run)]):
            assert main(again) == 2
            error = capsys.readouterr().err
            assert error == f"graphpo: {run} is in use: another process trains there\n"
        assert before == contents(run)
    assert main(["train", "--resume", str(run), "train.steps=2"]) == 0


def test_rollout_eval_score_and_report(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs, transcripts, credit = (tmp_path / name for name in ("g.jsonl", "t.jsonl", "c.jsonl"))
    arguments = run_arguments(kb, tmp_path / "run")
    assert main(["rollout", *arguments, "--count", "3", "--out", str(graphs)]) == 0
    assert len(list(read_graphs(graphs))) == 3
    assert main(["score", str(graphs), "--method", "graphpo", "--out", str(credit)]) == 0
    assert len(credit.read_text().splitlines()) == 3
    capsys.readouterr()
    assert main(["eval", *arguments, "--samples", "2", "--out", str(transcripts)]) == 0
    assert "8 tasks, 16 trajectories" in capsys.readouterr().out
    lines = [json.loads(line) for line in transcripts.read_text().splitlines()]
    assert len(lines) == 16 and all(line["reward"] in (0.0, 0.5, 1.0) for line in lines)
    assert not (tmp_path / "run").exists()


def let_it_storm(module: Any, monkeypatch: pytest.MonkeyPatch, met: Callable[[str], bool]) -> None:
    build = module.build_grower

    def stormy(config: Any) -> Grower:
        grower = build(config)
        return replace(grower, expander=Storm(grower.expander, met))

    monkeypatch.setattr(module, "build_grower", stormy)


def test_eval_says_how_many_trajectories_outages_left_out(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stormy = {json.loads(line)["id"] for line in list((kb / "heldout.jsonl").open())[:3]}
    transcripts = tmp_path / "t.jsonl"
    let_it_storm(commands, monkeypatch, stormy.__contains__)
    arguments = ["eval", *run_arguments(kb, tmp_path / "run"), "--samples", "2"]
    assert main([*arguments, "--out", str(transcripts)]) == 0
    out = capsys.readouterr().out
    assert "5 tasks, 10 trajectories" in out and "left out: 6 trajectories" in out
    lines = [json.loads(line) for line in transcripts.read_text().splitlines()]
    assert len(lines) == 16
    for line in lines:
        hit = line["id"].split("/")[0] in stormy
        assert (line["reward"] is None) == hit and line["outages"] == hit
    assert main([*arguments, "outages=score"]) == 0
    out = capsys.readouterr().out
    assert "8 tasks, 16 trajectories" in out and "left out" not in out


class ResponseJudge:
    """A judge that is shown whole responses."""

    def __init__(self, *, url: str) -> None:
        self._judge = Judge(OpenAIChat(url, "m", tries=1))

    def __call__(self, task: Task, outcome: Outcome) -> float:
        return self._judge(task, replace(outcome, answer=outcome.response))


@pytest.mark.filterwarnings("ignore:chat model")
def test_what_a_judge_that_is_down_cannot_judge_does_not_count(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"choices": [{"message": {"content": '{"verdict": "correct"}'}}]}
    flaky = lambda before, _: answer(said) if before % 3 else answer({}, 503)  # noqa: E731
    transcripts = tmp_path / "t.jsonl"

    def evaluated(script: Script) -> tuple[int, list[float | None]]:
        with serving(script) as server:
            judge = f"reward={{class: {__name__}:ResponseJudge, url: '{server.url}'}}"
            arguments = ["eval", *run_arguments(reach, tmp_path / "run", judge)]
            status = main([*arguments, "--out", str(transcripts)])
        return status, [json.loads(line)["reward"] for line in transcripts.open()]

    status, rewards = evaluated(flaky)
    out = capsys.readouterr().out
    assert status == 0 and set(rewards) == {None, 1.0} and "accuracy 100.0%" in out
    assert f"left out: {rewards.count(None)} trajectories that outages left unscored" in out
    status, rewards = evaluated(always(answer({}, 503)))
    assert status == 2
    assert "left 8 of 8 trajectories unscored" in capsys.readouterr().err


def test_an_evaluation_that_outages_left_nothing_of_has_no_accuracy(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_it_storm(commands, monkeypatch, lambda task: True)
    assert main(["eval", *run_arguments(kb, tmp_path / "run")]) == 2
    captured = capsys.readouterr()
    assert "accuracy 0" not in captured.out
    assert "left 8 of 8 trajectories unscored" in captured.err
    held_out = {json.loads(line)["id"] for line in (kb / "heldout.jsonl").open()}
    let_it_storm(train_module, monkeypatch, held_out.__contains__)
    run = tmp_path / "run"
    assert main(["train", *run_arguments(kb, run, "train.steps=1", "train.max_resample=0")]) == 0
    assert "held-out accuracy unknown → unknown" in capsys.readouterr().out
    for row in rows(run):
        assert row["eval/outages"] > 0 and "eval/accuracy" not in row


def test_a_small_task_file_ends_resampling_not_the_run(reach: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join((reach / "train.jsonl").read_text().splitlines(True)[:5]))
    run = tmp_path / "run"
    never = ["reward=tests.worlds:no_reward", "train.max_resample=2", "train.steps=2"]
    assert main(["train", *run_arguments(reach, run, f"tasks.train={few}", *never)]) == 0
    first, second = rows(run)[1:]
    assert first["rollout/nodes"] > 1 and second["rollout/nodes"] > 1
    assert "update/loss" not in second
    # The same tasks and the same policy, yet each step draws with random numbers of its own.
    assert first["tokens/generated"] != second["tokens/generated"]


def test_tasks_whose_prompts_do_not_fit_are_told_before_the_first_step(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_long_ones(name: str) -> Path:
        lines = (reach / name).read_text().splitlines()[:4]
        long = [json.loads(lines[0]) | {"id": f"long {n}", "question": "a " * 900} for n in (1, 2)]
        made = tmp_path / name
        made.write_text("\n".join([*map(json.dumps, long), *lines]) + "\n")
        return made

    train, heldout = with_long_ones("train.jsonl"), with_long_ones("heldout.jsonl")
    run, few = tmp_path / "run", ["train.prompts_per_step=2", "train.steps=4"]
    assert main(["train", *run_arguments(reach, run, f"tasks.train={train}", *few)]) == 0
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    assert "2 training tasks are left out, as the first: task 'long 1'" in capsys.readouterr().out

    refused = tmp_path / "refused"
    assert main(["train", *run_arguments(reach, refused, f"tasks.heldout={heldout}", *few)]) == 2
    error = capsys.readouterr().err
    assert "'long 1'" in error and "2 such tasks of 6" in error and error.count("\n") == 1
    many = ["train.prompts_per_step=5"]
    assert main(["train", *run_arguments(reach, refused, f"tasks.train={train}", *many)]) == 2
    error = capsys.readouterr().err
    assert "has 4 tasks that can be used; 2 training tasks are left out, as the first" in error
    assert "'long 1'" in error and error.count("\n") == 1
    assert not refused.exists()


def test_a_sliding_window_that_ends_contexts_early_is_told(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(reach / "policy", policy)

    def trained(window: int) -> int:
        settings = json.loads((policy / "config.json").read_text())
        settings |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
        settings.pop("layer_types", None)
        (policy / "config.json").write_text(json.dumps(settings))
        shown = [f"model.path={policy}", "train.steps=1"]
        return main(["train", *run_arguments(reach, tmp_path / f"run-{window}", *shown)])

    says = "contexts end at 30 tokens, not at the 512 that"
    assert trained(30) == 0
    assert says in capsys.readouterr().out
    arguments = run_arguments(reach, tmp_path / "run", f"model.path={policy}")
    assert main(["eval", *arguments]) == 0
    assert capsys.readouterr().out.startswith(says)
    assert main(["rollout", *arguments, "--count", "1", "--out", str(tmp_path / "g.jsonl")]) == 0
    assert capsys.readouterr().out.startswith(says)
    assert trained(8) == 2
    error = capsys.readouterr().err
    assert "has 0 tasks that can be used" in error and error.count("\n") == 1
    assert "the policy's context of 8; remove" in error and "longer context" in error


@pytest.mark.parametrize("change", [str(ROOT / "configs/toy/reach.yaml"), "output=elsewhere"])
def test_a_resumed_run_stays_where_and_what_it_is(
    change: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
    before = (run / "config.yaml").read_text(), rows(run)
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "train.steps=2", change]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert change in told and ((run / "config.yaml").read_text(), rows(run)) == before


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


def test_a_section_that_is_new_in_a_resumed_run_is_told_by_its_settings(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
    capsys.readouterr()
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
    change: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
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
    damage: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
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


@pytest.mark.parametrize("out", ["nowhere/x.jsonl", ".", "/dev/null"])
@pytest.mark.parametrize("verb", ["rollout", "eval"])
def test_an_impossible_output_is_refused_before_the_work(
    verb: str, out: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = run_arguments(reach, tmp_path / "run", "model.path=/never/loaded")
    assert main([verb, *arguments, "--out", out]) == 2
    assert "output" in capsys.readouterr().err


def test_a_corrupt_checkpoint_names_itself(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
    progress = run / "checkpoints" / "step-000001" / "progress.json"
    for damaged in ("{", "null", "{}"):
        progress.write_text(damaged)
        assert main(["train", "--resume", str(run), "train.steps=2"]) == 2
        assert str(progress) in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "nothing")]) == 2
