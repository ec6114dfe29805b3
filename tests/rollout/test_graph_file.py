"""``graphpo rollout --out`` as a user runs it: killed, repeated, with other settings."""

import gc
import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.cli import main
from graphpo_agent.errors import ConfigError
from graphpo_agent.partial_output import PartialOutput, partial_output, partial_path
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.rollout.graph_file import GraphFile, outages_in
from graphpo_agent.rollout.grow import Rollout
from graphpo_agent.rollout.outages import Outages
from graphpo_agent.types import Task
from tests.worlds import run_arguments, start_command, stopped, stopped_scorer


def arguments(world: Path, out: Path, *more: str) -> list[str]:
    run = run_arguments(world, out.with_name("run"), stopped(out, "SIGKILL"), *more)
    return ["rollout", *run, "--count", "6", "--out", str(out)]


def kill(command: list[str], out: Path) -> list[str]:
    """Run until the kill; returns the finished graphs' lines."""
    out.with_name("stop").touch()
    process = start_command(command)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not out.exists()
    out.with_name("stop").unlink()
    return Path(f"{out}.partial").read_text().splitlines()[1:]


def test_half_a_line_that_a_kill_left_spoils_nothing_behind_it(tmp_path: Path) -> None:
    out, name = tmp_path / "graphs.jsonl", {"verb": "rollout"}
    for task in ("a", "b"):
        with pytest.raises(KeyboardInterrupt), partial_output(out, name, len) as partial:
            partial.add({"task": task})
            with partial.path.open("a") as file:
                file.write('{"task": "ha')
            raise KeyboardInterrupt
    with partial_output(out, name, len) as partial:
        assert list(partial.kept) == ["a", "b"]


def test_what_was_added_last_is_read_from_disk(tmp_path: Path) -> None:
    out, old = tmp_path / "out", {"task": "a", "value": "old"}
    a, b = {"task": "a", "value": "ä" * 9}, {"task": "b", "value": [1, {"c": None}]}
    with pytest.raises(KeyboardInterrupt), partial_output(out, {}, len) as partial:
        for row in (old, old | {"task": "b"}, a):
            partial.add(row)
        raise KeyboardInterrupt
    with partial_output(out, {}, lambda row: len(row["value"])) as partial:
        assert partial.kept == {"a": 9, "b": 3}
        partial.add(b)
        assert [partial.read("a"), partial.read("b")] == [a, b]


def test_what_another_command_left_is_not_read(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), partial_output(out, {"verb": "eval"}, len) as partial:
        partial.add({"task": "a", "rows": []})
        raise KeyboardInterrupt
    with (
        pytest.raises(ConfigError, match="interrupted command with other verb: remove it"),
        partial_output(out, {"verb": "rollout"}, outages_in),
    ):
        pass


@pytest.mark.parametrize("scoring", [False, True])
def test_a_killed_rollout_goes_on_to_the_same_graphs(
    scoring: bool, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(path: Path) -> list[str]:
        scorer = stopped_scorer(path, "SIGKILL", group_size=64)  # four graphs at once
        more = ["reward=tests.worlds:length_reward", scorer] if scoring else []
        return arguments(reach, path, *more)

    whole, out = tmp_path / "whole.jsonl", tmp_path / "graphs.jsonl"
    assert main(command(whole)) == 0
    capsys.readouterr()
    finished = kill(command(out), out)
    assert 2 <= len(finished) < 6
    with Path(f"{out}.partial").open("a") as file:
        file.write(finished[0][:50])  # a kill in the middle of a line
    assert main(command(out)) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{len(finished)} of 6 tasks were finished before: {out}.partial\n")
    assert f"of the {6 - len(finished)} graphs that were grown now:\n" in said
    assert out.read_text() == whole.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, whole.name]


@pytest.mark.parametrize("verb", ["rollout", "eval"])
def test_a_prompt_that_is_too_long_is_told_before_any_task_is_begun(
    verb: str,
    reach: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("graphpo_agent.rollout.grow.TASKS_AT_ONCE", 2)
    rows = [json.loads(line) for line in (reach / "train.jsonl").open()][:6]
    rows[5]["question"] *= 500
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    tasks.write_text("\n".join(map(json.dumps, rows)))
    run = run_arguments(reach, tmp_path / "run")
    assert main([verb, *run, "--tasks", str(tasks), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"graphpo: task '{rows[5]['id']}': its prompt has ")
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_a_long_rollout_holds_the_graphs_of_one_batch(
    reach: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held: list[int] = []
    add = GraphFile.add

    def counting(file: GraphFile, rollout: Rollout, tokenizer: Tokenizer) -> None:
        add(file, rollout, tokenizer)
        gc.collect()
        held.append(sum(type(each) is Rollout for each in gc.get_objects()))

    monkeypatch.setattr(GraphFile, "add", counting)
    texts, told = [], []
    for at_once in (6, 2):
        monkeypatch.setattr("graphpo_agent.rollout.grow.TASKS_AT_ONCE", at_once)
        out = tmp_path / f"{at_once}.jsonl"
        assert main([*arguments(reach, out), "overlap=false"]) == 0
        texts.append(out.read_text())
        told.append(capsys.readouterr().out.replace(out.name, ""))
        assert max(held) - min(held) < at_once
        held.clear()
    assert texts[0] == texts[1] and texts[0].count("\n") == 6
    assert told[0] == told[1] and "rollout/nodes" in told[0]


def test_what_other_settings_grew_is_not_gone_on_with(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, partial = tmp_path / "graphs.jsonl", tmp_path / "graphs.jsonl.partial"
    kill(arguments(reach, out), out)
    left = partial.read_bytes()
    assert main(arguments(reach, out, "seed=7", "budget.trajectories=3")) == 2
    error = capsys.readouterr().err
    assert "with other budget, seed: remove it" in error and error.count("\n") == 1
    assert partial.read_bytes() == left and not out.exists()
    assert main(arguments(reach, out, "train.steps=9", "outage_limit=0.9")) == 0


def test_settings_of_which_nothing_was_finished_stand_in_no_way(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "graphs.jsonl"
    assert main([*arguments(reach, out), "reward=tests.worlds:bad_reward"]) == 2
    assert "outside [0, 1]" in capsys.readouterr().err
    assert main(arguments(reach, out)) == 0


@pytest.mark.parametrize(
    "method", [[], ["method={name: prm, scorer: {class: 'tests.worlds:LengthScorer'}}"]]
)
def test_tasks_that_met_an_outage_are_grown_again(
    method: list[str], reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out, down = tmp_path / "whole.jsonl", tmp_path / "graphs.jsonl", tmp_path / "down"
    verifier = f"reward={{class: tests.worlds:Flaky, down: {down}}}"
    command = [*arguments(reach, out, *method), verifier]
    down.touch()
    assert main(command) == 2
    assert "trajectories unscored" in capsys.readouterr().err and not out.exists()
    down.unlink()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert " of 6 tasks were finished before" in said and not said.startswith("6")
    assert main([*arguments(reach, whole, *method), verifier]) == 0
    assert out.read_text() == whole.read_text()
    graphs = [json.loads(line) for line in out.open()]
    ends = [node for graph in graphs for node in graph["nodes"] if node["terminal"]]
    assert ends and all(node["reward"] is not None for node in ends)
    assert all("step_score" in node for node in ends) == bool(method)


@pytest.mark.parametrize(
    ("met", "kept"),
    [
        ({}, True),
        ({"trajectories": 4, "tool_calls": 3}, True),
        ({"trajectories": 4, "left_out": 1}, False),
        ({"trajectories": 4, "tool_calls": 3, "failed_calls": 1, "told": "down"}, False),
    ],
)
def test_a_graph_that_met_an_outage_is_not_kept(
    met: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    out, tasks = tmp_path / "graphs.jsonl", [Task("a", "?", ()), Task("b", "?", ())]
    row = {"task": "a", "outages": asdict(Outages(**met)), "graph": "{}"}
    partial_path(out).touch()
    PartialOutput(out, {"seed": 0}, outages_in).add(row)
    file = GraphFile(PartialOutput(out, {"seed": 0}, outages_in), tasks)
    assert [task.id for task in file.missing] == (["b"] if kept else ["a", "b"])
    assert file.outages == (Outages(**met) if kept else Outages())
