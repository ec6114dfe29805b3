"""What a run through verl logs, and where one that goes on does so."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpo_agent.cli import main
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import dump_config, load_config
from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.engines.verl.log import RunLog, renamed, step_metrics
from graphpo_agent.errors import ConfigError, RunError
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import credits_of
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.rollout.tally import Tally, credit_tally, rollout_tally
from graphpo_agent.train_verl import keep_tasks, rewind_logs
from tests.engines.verl.test_settings import ENGINE, config
from tests.rollout.test_grow import grow
from tests.worlds import files_of_at_most, run_arguments


def test_metrics_have_our_names_where_they_mean_the_same() -> None:
    data = {
        "actor/grad_norm": 0.5,
        "reward/mean": 0.25,
        "eval/accuracy": 0.75,
        "perf/throughput": 3,
        "actor/kl": float("nan"),
        "table": ["no number"],
    }
    assert renamed(data) == {
        "update/grad_norm": 0.5,
        "reward/mean": 0.25,
        "eval/accuracy": 0.75,
        "verl/perf/throughput": 3.0,
    }


def test_a_steps_metrics_are_those_of_its_graphs_together() -> None:
    credited = GraphPO(schedule=(2, 2))
    rollouts = [*grow(credited)[:2], *grow(Grpo(4))[:1]]
    assert len({rollout.graph.num_nodes for rollout in rollouts}) > 1
    graphs, classes = zip(*((r.graph, r.classes) for r in rollouts), strict=True)
    credits = credits_of(credited, graphs, classes)
    notes: list[dict[str, Any]] = [{"total": 1.0}]  # a further row of the first graph
    for rollout, credit in zip(rollouts, credits, strict=True):
        tally = rollout_tally([rollout]) + credit_tally([credit])
        notes.append(json.loads(json.dumps({"total": 1.0, "tally": asdict(tally)})))
    notes[1]["counts"], notes[2]["counts"] = {"judge/failed": 0, "own": 3}, {"judge/failed": 2}
    row = renamed(step_metrics(notes))
    together = (rollout_tally(rollouts) + credit_tally(credits)).metrics
    assert row == pytest.approx(together | {"judge/failed": 2, "own": 3})
    nodes = [rollout.graph.num_nodes - 1 for rollout in rollouts]
    nonzero = [np.count_nonzero(each.advantages.sum(axis=0)[1:]) for each in credits]
    shares = [n / edges for n, edges in zip(nonzero, nodes, strict=True)]
    assert row["credit/nonzero"] == sum(nonzero) / sum(nodes) != pytest.approx(np.mean(shares))


def test_what_nothing_was_counted_for_is_not_logged() -> None:
    assert renamed(step_metrics([{"total": 0.0, "tally": asdict(Tally({"reward/mean": 0}))}])) == {}


def logged_run(path: Path) -> RunDirectory:
    run = RunDirectory.create(path, "seed: 0\n", 0, ["graphpo"])
    log = RunLog(path, steps=4)
    for step in range(4):
        log.log({"tokens/generated": 10.0 * (step > 0), "reward/mean": 0.1 * step}, step)
        log.log_graph([{"line": None}, {"line": json.dumps({"id": f"step-{step}/task/1"})}])
    return run


def test_a_log_of_a_full_disk_is_named_and_keeps_its_rows(tmp_path: Path) -> None:
    log = RunLog(tmp_path, steps=4)
    log.log({"reward/mean": 0.5}, 1)
    path = tmp_path / "metrics.jsonl"
    before = path.read_text()
    with (
        files_of_at_most(path.stat().st_size + 10),
        pytest.raises(OSError, match="too large") as caught,
    ):
        log.log({"reward/mean": 0.5}, 2)
    assert caught.value.filename == str(path)
    assert path.read_text() == before


def checkpoint(run: RunDirectory, step: int) -> None:
    (run.checkpoints_path / f"global_step_{step}" / "actor").mkdir(parents=True)


def logged_steps(run: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()]


def test_a_resumed_runs_logs_go_on_where_the_checkpoint_was_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = logged_run(tmp_path / "run")
    checkpoint(run, 2)  # cut off: verl had not said that it is complete
    with pytest.raises(RunError, match="ended before its first checkpoint"):
        rewind_logs(run)
    run.check_new()
    newest = run.verl_newest_path
    newest.write_text("2")
    with pytest.raises(RunError, match="already holds a run"):
        run.check_new()
    assert rewind_logs(run) == 2
    rows = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["progress"] for row in rows] == [0, 0.25, 0.5]
    assert len(run.graphs_path.read_text().splitlines()) == 3
    RunLog(run.path, steps=4).log({"tokens/generated": 5.0}, 3)
    last = json.loads(run.metrics_path.read_text().splitlines()[-1])
    assert last["tokens/total"] == 25.0


@pytest.mark.parametrize(
    ("written", "tracker", "step"),
    [
        ([3, 4], "4", 3),  # stopped between the checkpoint of step 4 and its row
        ([4], "4", 4),  # the same, of a run that keeps one
        ([1, 2], "3", 2),  # the newest was deleted
        ([2, 3], "2", 2),  # stopped while the checkpoint of step 3 was written
        ([2, 3, 4], "", 3),  # verl's file was torn
    ],
)
def test_a_resumed_run_goes_on_from_the_newest_checkpoint_that_is_in_its_log(
    written: list[int], tracker: str, step: int, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    run = logged_run(tmp_path / "run")
    for each in written:
        checkpoint(run, each)
    newest = run.verl_newest_path
    newest.write_text(tracker)
    with run.metrics_path.open("a") as metrics, run.graphs_path.open("a") as graphs:
        metrics.write('{"step": 4, "prog')
        graphs.write('{"id": "step-4')
    assert rewind_logs(run) == step == int(newest.read_text())
    assert logged_steps(run) == list(range(min(step, 3) + 1))


def test_a_run_without_a_checkpoint_or_with_a_foreign_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = logged_run(tmp_path / "run")
    run.verl_newest_path.write_text("2")
    with pytest.raises(RunError, match="holds no complete checkpoint any more"):
        rewind_logs(run)
    checkpoint(run, 2)
    foreign = ["no graph", "[1]", "{}", '{"id": "kb-7"}', '{"id": 3}', '{"id": "step-x/kb-7"}']
    for line in foreign:
        run.graphs_path.write_text(f"{line}\n")
        with pytest.raises(RunError, match=r"graphs\.jsonl: not a log of a run"):
            rewind_logs(run)
        assert logged_steps(run) == [0, 1, 2, 3]


@pytest.mark.verl
def test_a_run_that_is_complete_says_so_and_starts_nothing(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    name, *changes = run_arguments(reach, path, ENGINE, "train.steps=3", "train.max_resample=0")
    begun = load_config(RunConfig, name, changes)
    run = RunDirectory.create(path, dump_config(begun), 0, ["graphpo"])
    log = RunLog(path, steps=3)
    for step in range(4):
        log.log({"reward/mean": 0.5}, step)
    checkpoint(run, 3)
    run.verl_newest_path.write_text("3")
    for fewer in ([], ["train.steps=2"]):
        assert main(["train", "--resume", str(path), *fewer]) == 0
        assert "complete after step 3;" in capsys.readouterr().out
    assert logged_steps(run) == [0, 1, 2, 3]
    assert load_config(RunConfig, run.config_path) == begun


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["update.learning_rate=1e-5"], "keeps update.learning_rate, which"),
        (["update.weight_decay=0", "update.betas=[0.9,0.9]"], "update.betas, update.weight_decay,"),
        (["model.lora={rank: 8}"], "keeps model.lora, which"),
        (["model.path=elsewhere"], "keeps model.path, which"),
        (["engine.gpus_per_node=3"], "keeps engine.nodes times engine.gpus_per_node, which"),
    ],
)
def test_what_verl_takes_from_its_checkpoint_is_not_changed_by_a_resume(
    changes: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    begun = config(f"output={run}", "train.max_resample=0", "model.lora={rank: 4}")
    RunDirectory.create(run, dump_config(begun), 0, [])
    assert main(["train", "--resume", str(run), "train.steps=90", *changes]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert load_config(RunConfig, run / "config.yaml") == begun


def test_a_resumed_run_draws_the_tasks_that_it_drew(reach: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "seed: 0\n", 0, [])
    tasks = load_tasks(reach / "train.jsonl")[:4]
    keep_tasks(run, tasks, resume=False)
    keep_tasks(run, tasks, resume=True)
    for others in (tasks[:3], [*tasks[1:], tasks[0]]):
        with pytest.raises(ConfigError, match=r"inside a pass over its training tasks, and \d ot"):
            keep_tasks(run, others, resume=True)
