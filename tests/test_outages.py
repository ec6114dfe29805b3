"""Runs and evaluations whose tools or verifiers fail."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import graphpo_agent.train as train_module
from graphpo_agent import commands
from graphpo_agent.cli import main
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.rewards.judge import Judge
from graphpo_agent.rollout.outages import Outages
from graphpo_agent.types import Outcome, Task
from tests.net.servers import Script, always, answer, serving
from tests.runs import let_it_storm, rows
from tests.worlds import run_arguments


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
    assert main(["eval", *made, down, "--samples", "128"]) == 2
    assert "accuracy" not in capsys.readouterr().out


def test_paths_that_are_judged_all_the_same_give_no_accuracy_where_calls_failed(
    kb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This policy searches too seldom for its own calls."""
    made = run_arguments(kb, tmp_path / "run", "outages=score", "outage_limit=0.5", "train.steps=1")
    for failed, known in ((4, True), (5, False)):
        met = Outages(trajectories=8, tool_calls=10, failed_calls=failed)
        monkeypatch.setattr(train_module, "outages_of", lambda *_, met=met: met)
        run = tmp_path / str(failed)
        assert main(["train", *made, f"output={run}"]) == (0 if known else 2)
        before = rows(run)[0]
        assert before["eval/failed_calls"] == 2 * failed and before["eval/outages"] == 0
        assert ("eval/accuracy" in before) == ("eval/greedy_accuracy" in before) == known


def test_a_step_that_lost_some_paths_to_outages_says_so(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_it_storm(train_module, monkeypatch, lambda task: sum(task.encode()) % 4 == 0)
    run = tmp_path / "run"
    assert main(["train", *run_arguments(kb, run, "outage_limit=0.99")]) == 0
    out = capsys.readouterr().out
    assert out.count("of this step's trajectories unscored; rollout/left_out") == 1
    assert any(0 < row.get("rollout/left_out", 0) < 1 for row in rows(run))


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
    told = capsys.readouterr().out
    assert "held-out accuracy unknown → unknown (0 trajectories" in told
    assert ", 8 left out for outages)" in told
    for row in rows(run):
        assert row["eval/outages"] > 0 and "eval/accuracy" not in row
