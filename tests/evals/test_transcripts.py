"""``graphpo eval --out`` as a user runs it: interrupted, torn, repeated, graded."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.cli import main
from graphpo_agent.evals.grade import grade_file
from graphpo_agent.evals.graders import GradeOptions
from graphpo_agent.partial_output import partial_output
from graphpo_agent.rewards.asearcher import ASearcherReward
from graphpo_agent.types import FailureKind, Outcome, Task, ToolResult
from tests.worlds import run_arguments, stopped


def arguments(world: Path, out: Path, *more: str) -> list[str]:
    run = run_arguments(world, out.with_name("run"), stopped(out, "SIGINT"))
    return ["eval", *run, "--samples", "2", "--out", str(out), *more]


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_an_interrupted_evaluation_goes_on_to_the_same_result(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out, partial = (tmp_path / name for name in ("w.jsonl", "t.jsonl", "t.jsonl.partial"))
    assert main(arguments(reach, whole)) == 0
    said = told(capsys)
    stop = tmp_path / "stop"
    stop.touch()
    assert main(arguments(reach, out)) != 0
    assert not out.exists()
    finished = partial.read_text().splitlines()[1:]
    assert 2 <= len(finished) < 8
    with partial.open("a") as file:
        file.write(finished[0][:50])  # a kill in the middle of a line
    stop.unlink()
    told(capsys)
    # What changes nothing in an evaluation may be another.
    unused = ("budget.trajectories=3", "train.steps=9", "trackers=[{class: any:Thing}]")
    assert main(arguments(reach, out, *unused)) == 0
    again = told(capsys)
    assert again.startswith(f"{len(finished)} of 8 tasks were finished before: {partial}\n")
    assert again.partition("\n")[2] == said
    assert out.read_text() == whole.read_text() and not partial.exists()
    ids = [json.loads(line)["id"] for line in (reach / "heldout.jsonl").open()]
    rows = [json.loads(line) for line in out.open()]
    assert [row["task"] for row in rows] == [name for name in ids for _ in range(2)]


def test_what_another_evaluation_left_is_not_gone_on_with(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, partial = tmp_path / "t.jsonl", tmp_path / "t.jsonl.partial"
    (tmp_path / "stop").touch()
    assert main(arguments(reach, out)) != 0
    left = partial.read_bytes()
    (tmp_path / "stop").unlink()
    capsys.readouterr()
    assert main(arguments(reach, out, "seed=7", "--greedy")) == 2
    error = capsys.readouterr().err
    assert "interrupted command with other greedy, seed: remove" in error
    assert error.count("\n") == 1
    assert partial.read_bytes() == left
    policy = reach / "policy" / "config.json"
    text = policy.read_text()
    policy.write_text(f"{text}\n")
    assert main(arguments(reach, out)) == 2
    assert "with other weights: remove it" in capsys.readouterr().err
    policy.write_text(text)
    partial.write_bytes(left[: left.index(b"\n") // 2])  # nothing but a part of the first line
    assert main(arguments(reach, out)) == 0


def test_tasks_that_met_an_outage_are_sampled_again(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flag = tmp_path / "t.jsonl", tmp_path / "down"
    run = run_arguments(kb, tmp_path / "run", f"reward={{class: tests.worlds:Flaky, down: {flag}}}")
    command = ["eval", *run, "--out", str(out)]
    flag.touch()
    assert main(command) == 2
    assert not out.exists()
    error = capsys.readouterr().err
    assert "of 8 trajectories unscored (outage_limit: 0.5)" in error and error.count("\n") == 1
    lines = Path(f"{out}.partial").read_text().splitlines()[1:]
    kept = [row for line in lines for row in json.loads(line)["rows"]]
    judged = sum(row["reward"] is not None for row in kept)
    assert len(kept) == 8 and 0 < judged <= 4
    assert main(command) == 2  # those that were judged before count as well
    assert f"left {8 - judged} of 8 trajectories unscored" in capsys.readouterr().err
    flag.unlink()
    assert main(command) == 0
    assert told(capsys).startswith(f"{judged} of 8 tasks were finished before")
    assert all(json.loads(line)["reward"] is not None for line in out.open())


def test_scored_paths_that_met_an_outage_are_sampled_again(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flag = tmp_path / "t.jsonl", tmp_path / "down"
    tool = {"class": f"{__name__}:Unplugged", "down": str(flag)}
    settings = [f"mode.tools.search={json.dumps(tool)}", "outages=score"]
    command = ["eval", *run_arguments(kb, tmp_path / "run", *settings), "--out", str(out)]
    command += ["--samples", "128"]  # an untrained policy searches seldom
    flag.touch()
    assert main(command) == 2
    assert "tool calls and left 0 of 1,024 trajectories unscored" in capsys.readouterr().err
    flag.unlink()
    assert main(command) == 0
    rows = [json.loads(line) for line in out.open()]
    assert all(row["outages"] == 0 for row in rows) and any(row["tool_calls"] for row in rows)


class Unplugged:
    """A search that reaches nothing while ``down`` is there."""

    name = "search"
    description = "Search."
    schema: Mapping[str, Any] = {"type": "object"}

    def __init__(self, down: str) -> None:
        self._down = Path(down)

    def run(self, calls: Sequence[object]) -> list[ToolResult]:
        failure: FailureKind | None = "transient" if self._down.exists() else None
        return [ToolResult("the service is busy", failure=failure) for _ in calls]


def test_a_second_evaluation_at_once_is_told(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.jsonl"
    with partial_output(out, {}, len) as partial:
        assert main(arguments(reach, out)) == 2
        assert f"another process writes {out}" in capsys.readouterr().err
        partial.add({"task": "a"})
    assert main(arguments(reach, out)) == 0


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("wrong", "accuracy 0.0%, at most 31.2% (95 % over 8 tasks, 8 trajectories)"),
        ("right", "accuracy 100.0%, at least 68.8% (95 % over 8 tasks, 8 trajectories)"),
        ("half", "accuracy 50.0% ± unknown (95 % over 8 tasks, 8 trajectories)"),
        ("alternating", "accuracy 50.0% ± 37.0% (95 % over 8 tasks, 8 trajectories)"),
    ],
)
def test_an_accuracy_comes_with_its_interval(
    reward: str, says: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_arguments(reach, tmp_path / "run", f"reward={__name__}:{reward}", "overlap=false")
    assert main(["eval", *run]) == 0
    assert says in told(capsys)


def test_tasks_that_are_sampled_apart_are_sampled_alike(
    reach: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for at_once in (256, 3):
        monkeypatch.setattr("graphpo_agent.rollout.grow.TASKS_AT_ONCE", at_once)
        assert main([*arguments(reach, tmp_path / "t.jsonl"), "overlap=false"]) == 0
        rows = map(json.loads, (tmp_path / "t.jsonl").open())
        found.append([(row["id"], row["response"], row["reward"]) for row in rows])
    assert found[0] == found[1] and len(found[0]) == 16


def test_greedy_samples_are_alike_and_another_seed_draws_others(
    reach: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t.jsonl"
    command = ["eval", *run_arguments(reach, tmp_path / "run"), "--samples", "2", "--out", str(out)]

    def said(*more: str) -> list[str]:
        assert main([*command, *more]) == 0
        return [json.loads(line)["response"] for line in out.open()]

    greedy, drawn = said("--greedy"), said()
    assert greedy[::2] == greedy[1::2] and drawn[::2] != drawn[1::2]
    assert said("seed=1") != drawn == said()


def test_levels_and_the_best_of_each_task_are_measured_apart(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "t.jsonl"
    lines = [json.loads(line) for line in (reach / "heldout.jsonl").open()]
    levels = [{"metadata": {"level": 1 + int(line["id"][-1]) % 2}} for line in lines]
    rows = [json.dumps(line | level) for line, level in zip(lines, levels, strict=True)]
    tasks.write_text("\n".join(rows) + "\n")
    command = ["eval", *run_arguments(reach, tmp_path / "run"), "--tasks", str(tasks)]
    assert main([*command, f"reward={__name__}:alternating"]) == 0
    assert "level 1: 0.0% over 4 tasks\nlevel 2: 100.0% over 4 tasks\n" in told(capsys)
    assert main([*command, "--samples", "2", "--out", str(out)]) == 0
    rewards = [json.loads(line)["reward"] for line in out.open()]
    best = [max(pair) for pair in zip(rewards[::2], rewards[1::2], strict=True)]
    assert sum(best) / 8 > sum(rewards) / 16
    assert f"best of 2 {sum(best) / 8:.1%}\n" in told(capsys)


def wrong(task: Task, outcome: Outcome) -> float:
    return 0.0


def right(task: Task, outcome: Outcome) -> float:
    return 1.0


def half(task: Task, outcome: Outcome) -> float:
    return 0.5


def alternating(task: Task, outcome: Outcome) -> float:
    """Half of the tasks are right."""
    return float(int(task.id.rpartition("-")[2]) % 2)


def test_a_row_says_all_that_a_grader_asks_for(kb: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    about: dict[str, Any] = {"level": "2", "aug_answers": ["ab"], "canary": "secret"}
    lines = [json.loads(line) for line in (kb / "heldout.jsonl").open()]
    lines = [line | {"metadata": about} for line in lines]
    lines[0] |= {"answers": [], "metadata": about | {"unanswerable": True}}
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, grades = tmp_path / "t.jsonl", tmp_path / "g.jsonl"
    reward = "reward={class: graphpo_agent.rewards.asearcher:ASearcherReward}"
    run = run_arguments(kb, tmp_path / "run", reward)
    assert main(["eval", *run, "--tasks", str(tasks), "--samples", "4", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.open()]
    assert all(row["metadata"]["canary"] == "secret" for row in rows)
    assert any(row["tool_calls"] > 0 for row in rows)
    assert all(len(row["turns"]) == row["edges"] for row in rows)
    assert all(turn in row["response"] for row in rows for turn in row["turns"])
    grade_file("asearcher", str(out), str(grades), GradeOptions())
    assert [json.loads(line)["score"] for line in grades.open()] == [row["reward"] for row in rows]


def test_asearcher_s_reward_of_an_evaluation_s_rows(tmp_path: Path) -> None:
    turns = ["<think>a</think> <search>oak</search>", "<think>b</think> <answer>Oak</answer>"]
    row = {"id": "a", "response": "".join(turns), "turns": turns, "answer": "Oak", "gold": ["oak"]}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    alias = row | {"gold": ["fir"], "metadata": {"aug_answers": ["oak"]}}
    source.write_text("\n".join(map(json.dumps, [row, alias])))
    grade_file("asearcher", str(source), str(out), GradeOptions())
    assert [json.loads(line)["score"] for line in out.open()] == pytest.approx([1.0, 0.3])
    task = Task("a", "", ("oak",))
    assert ASearcherReward()(task, Outcome(row["response"], "Oak", tuple(turns))) == 1.0
