"""Runs that are shown elsewhere: by TensorBoard, Weights & Biases and a tracker of one's own."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from graphpo_agent.cli import main
from graphpo_agent.report import trackers
from graphpo_agent.report.tracking import Tail
from tests.report.recorder import recorded
from tests.runs import rows
from tests.worlds import run_arguments

OWN = "{class: tests.report.recorder:Recorder}"
TENSORBOARD = "{class: graphpo_agent.report.trackers:TensorBoard}"
WANDB = "{class: graphpo_agent.report.trackers:Wandb, mode: offline, project: oaks, tags: [a, b]}"


def train(place: Path, run: Path, *more: str) -> int:
    return main(["train", *run_arguments(place, run, "train.eval_tasks=2", *more)])


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    """By metric, the steps and values that TensorBoard shows."""
    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    names = read.Tags()["scalars"]
    return {name: [(each.step, each.value) for each in read.Scalars(name)] for name in names}


def records(file: Path) -> list[Record]:
    """What wandb has on the disk: a log in LevelDB's format behind a header of 7 bytes."""
    data, found, begun = file.read_bytes(), [], b""
    place = 7
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        begun += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(begun))
            begun = b""
    return found


def history(found: list[Record]) -> list[dict[str, Any]]:
    steps = [each.history for each in found if each.HasField("history")]
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in step.item}
        for step in steps
    ]


def test_trackers_are_told_every_row_once_also_of_a_run_that_goes_on(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(reach, run, "train.steps=2", f"trackers=[{OWN}, {TENSORBOARD}, {WANDB}]") == 0
    assert f"recorded in {run}" in (told := capsys.readouterr().out)
    assert f"tensorboard --logdir {run}/tensorboard" in told and "wandb sync" in told
    first = rows(run)
    assert recorded(run) == [{"resumed": False, "method": "graphpo"}, *first, {"complete": True}]
    (run / "recorded.jsonl").unlink()
    # As after a kill in the third step: its row is there, its checkpoint is not.
    lost = first[-1] | {"step": 3, "reward/mean": 77.0}
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(lost) + "\n")

    assert main(["train", "--resume", str(run), "train.steps=4"]) == 0
    written = rows(run)
    assert [row["step"] for row in written] == [0, 1, 2, 3, 4]
    assert recorded(run) == [{"resumed": True, "method": "graphpo"}, *written, {"complete": True}]
    shown = events(run)
    assert set(shown) == {name for row in written for name in row} - {"step"}
    for name, points in shown.items():
        there = [(row["step"], row[name]) for row in written if name in row]
        assert [step for step, _ in points] == [step for step, _ in there]
        assert [value for _, value in points] == pytest.approx([v for _, v in there], rel=1e-6)

    before, after = (records(file) for file in sorted(run.glob("wandb/offline-*/*.wandb")))
    assert {each.run.run_id for each in (*before, *after) if each.HasField("run")} == {
        (run / "wandb-id.txt").read_text()
    }
    (begun,) = (each.run for each in before if each.HasField("run"))
    assert begun.project == "oaks" and list(begun.tags) == ["a", "b"]
    assert begun.display_name == str(run)
    settings = {each.key: json.loads(each.value_json) for each in begun.config.update}
    assert settings["update"]["minibatch_graphs"] == 2
    for found, expected in ((before, first), (after, written)):
        kept = [{k: v for k, v in row.items() if k[0] != "_"} for row in history(found)]
        assert kept == [{k: v for k, v in row.items() if k != "step"} for row in expected]
    ends = [each.exit.exit_code for each in (*before, *after) if each.HasField("exit")]
    assert ends == [0, 0]


def test_a_tracker_that_fails_is_told_no_more_and_stops_nothing(
    reach: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    failing = "{class: tests.report.recorder:Recorder, fails_at: 1}"
    with pytest.warns(
        UserWarning, match=r"trackers\[0\] failed at step 1 .*: the line is; metrics"
    ):
        assert train(reach, run, "train.steps=2", f"trackers=[{failing}, {TENSORBOARD}]") == 0
    assert [told.get("step") for told in recorded(run)] == [None, 0]
    assert [step for step, _ in events(run)["progress"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("trackers", "says"),
    [
        ("[{class: tests.report.recorder:Recorder}]", "trackers[0]: it cannot start: no seat"),
        ("[{class: tests.worlds:Runs}]", "trackers[0]: tests.worlds:Runs has no start, log, fin"),
        ("[{class: graphpo_agent.report.trackers:Wandb, mode: of}]", "trackers[0]: "),
        ("[wandb]", "trackers.0: Input should be a valid dictionary"),
    ],
)
def test_a_tracker_that_there_is_not_is_one_line_before_the_first_step(
    trackers: str, says: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(reach, run, f"trackers={trackers}", "seed=13") == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (run / "metrics.jsonl").exists() or not rows(run)
    assert train(reach, run, "train.steps=1") == 0


def test_a_run_that_ends_early_says_so_to_its_trackers(reach: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(reach, run, f"trackers=[{OWN}]", "reward=tests.worlds:bad_reward") == 2
    assert recorded(run)[-1] == {"complete": False}


def test_a_package_that_is_missing_is_named(
    reach: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "installed_version", lambda package: None)
    assert train(reach, tmp_path / "run", f"trackers=[{TENSORBOARD}]") == 2
    assert "pip install 'graphpo-agent[tensorboard]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_row_is_read_once_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"st')
    tail = Tail(log)
    assert tail.rows() == [{"step": 1}, {"step": 2}]
    assert tail.rows() == []
    with log.open("a") as file:
        file.write('ep": 3}\n')
    assert tail.rows() == [{"step": 3}]
    assert Tail(log, start=12).rows() == [{"step": 2}, {"step": 3}]
