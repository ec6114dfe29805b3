"""``graphpo calibrate`` in a tiny world: graphs by rollout, then every file it leaves, or none."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from graphpo_agent.calibrate import calibrate_command, load_states, tasks_of
from graphpo_agent.calibration_files import _panels, summary, write_calibration
from graphpo_agent.cli import main
from graphpo_agent.config_state import HashingEmbedderConfig, TextState
from graphpo_agent.errors import (
    ConfigError,
    DataError,
    GraphError,
    GraphPOError,
    RunError,
    ToolError,
)
from graphpo_agent.evals.calibrate import (
    CalibrateOptions,
    Calibration,
    ChoiceCalibration,
    ThresholdRow,
)
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.report.calibration_plot import Curve, CurvePanel, _draw, draw_panels
from graphpo_agent.types import Outcome, PathState, Task
from tests.worlds import files_of_at_most, run_arguments

SCHEDULE = "method.schedule=[4,1]"
SHORT = "mode.max_response_tokens=16"
KEY = "parity={kind: key, function: 'tests.test_calibrate:parity'}"
FEW = CalibrateOptions(continuations=3, pairs=20, thresholds=(0.5, 0.99))


def parity(state: PathState) -> str:
    """A key that even an untrained policy reaches twice."""
    return str(len(state.response) % 2)


@pytest.fixture(scope="module")
def arguments(reach: Path) -> list[str]:
    return run_arguments(reach, reach / "unused", SCHEDULE, SHORT)


@pytest.fixture(scope="module")
def graphs(arguments, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("graphs") / "graphs.jsonl"
    assert main(["rollout", *arguments, "--count", "4", "--out", str(out)]) == 0
    return out


def run(arguments, graphs, out, states=(KEY,), options=FEW, extra=()) -> int:
    config, *overrides = arguments
    return calibrate_command(
        config, [*overrides, *extra], str(graphs), None, list(states), options, str(out)
    )


def test_everything_is_written_and_shown(arguments, graphs, tmp_path, capsys):
    options = CalibrateOptions(
        continuations=3, pairs=20, thresholds=(0.5, 0.99), reference="parity"
    )
    assert run(arguments, graphs, tmp_path / "new" / "out", options=options) == 0
    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "calibration.json",
        "calibration.md",
        "calibration.png",
    ]
    assert (out / "calibration.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert (out / "calibration.md").read_text() in shown
    assert "### run" in shown and "### parity" in shown
    found = json.loads((out / "calibration.json").read_text())
    assert found["graphs"] == 4 and found["candidate_pairs"] > 0 < found["measured_states"]
    assert list(found["choices"]) == ["run", "parity"]
    assert [row["threshold"] for row in found["choices"]["run"]["rows"]] == [0.5, 0.92, 0.99]
    assert [row["threshold"] for row in found["choices"]["parity"]["rows"]] == [None]
    assert found["choices"]["parity"]["rows"][0]["precision"] == 1.0
    assert found["choices"]["parity"]["rows"][0]["recall"] > 0
    merged = [row["merged_pairs"] for row in found["choices"]["run"]["rows"]]
    assert merged == sorted(merged, reverse=True)
    assert found["choices"]["parity"]["state"]["kind"] == "key"


def test_what_a_full_disk_cannot_hold_is_shown(arguments, graphs, tmp_path, capsys):
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        run(arguments, graphs, tmp_path / "out")
    assert "### parity" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_it_repeats_itself_and_knows_held_out_tasks(arguments, graphs, reach, tmp_path):
    swapped = [f"tasks.train={reach / 'heldout.jsonl'}", f"tasks.heldout={reach / 'train.jsonl'}"]
    for name, extra in (("a", []), ("b", swapped)):
        run(arguments, graphs, tmp_path / name, extra=extra)
    first, second = (json.loads((tmp_path / n / "calibration.json").read_text()) for n in "ab")
    assert first == second


def down(task: Task, outcome: Outcome) -> float:
    """A verifier in an outage."""
    raise CallFailed("transient", "503")


def test_nothing_is_said_where_an_outage_left_nothing_judged(arguments, graphs, tmp_path, capsys):
    verifier = f"reward={__name__}:down"
    with pytest.raises(ToolError, match="continuations was judged"):
        run(arguments, graphs, tmp_path / "out", extra=[verifier])
    rollout = ["rollout", *arguments, verifier, "--count", "4", "--out", str(tmp_path / "g.jsonl")]
    assert main(rollout) == 2
    assert "trajectories unscored (outage_limit: 0.5)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["g.jsonl.partial"]


def test_what_is_measured_goes_where_a_link_leads(arguments, graphs, tmp_path):
    place = tmp_path / "elsewhere"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    assert run(arguments, graphs, tmp_path / "link") == 0
    assert (tmp_path / "link").is_symlink() and (place / "calibration.json").is_file()


def test_a_directory_with_something_in_it_is_left_alone(arguments, graphs, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        run(arguments, graphs, tmp_path)
    with pytest.raises(RunError, match="is no directory"):
        run(arguments, graphs, tmp_path / "notes.txt" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def with_first_line(graphs: Path, change) -> str:
    record = json.loads(graphs.read_text().splitlines()[0])
    change(record)
    return json.dumps(record) + "\n"


def drop_tokens(record) -> None:
    for name in ("tokens", "logprobs", "loss_mask"):
        record["nodes"][1].pop(name, None)


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        (drop_tokens, GraphError, "node 1: it has no tokens"),
        (lambda record: record.update(id="nobody"), DataError, "graph 'nobody': no task of that"),
        (lambda record: record.update(nodes=record["nodes"][:1]), GraphError, "no two states"),
        (lambda record: record["nodes"][0]["tokens"].pop(), GraphError, "node 0: its prompt is"),
    ],
)
def test_graphs_that_cannot_be_used_leave_nothing(
    arguments, graphs, tmp_path, change, error, complaint
):
    path = tmp_path / "changed.jsonl"
    path.write_text(with_first_line(graphs, change))
    with pytest.raises(error, match=complaint) as caught:
        run(arguments, path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == ["changed.jsonl"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"extra": ["method={name: grpo, group_size: 2}"]}, "method.name is grpo: only graphpo"),
        ({"extra": ["method={name: tree, schedule: [2]}"]}, "method.name is tree: only graphpo"),
        ({"options": CalibrateOptions(reference="nobody")}, "'nobody' is none of run, parity"),
        ({"options": CalibrateOptions(reference="run")}, "'run': no two states have the same key"),
        ({"states": [KEY, KEY]}, "'parity' occurs twice"),
        ({"states": [KEY.replace("parity", "run")]}, "'run' occurs twice"),
        ({"states": ["bad={kind: nonsense}"]}, "state choice 'bad': .*state"),
        ({"states": ["absent.yaml"]}, "cannot read configuration absent.yaml"),
    ],
)
def test_mistakes_in_the_choices_are_named(arguments, graphs, tmp_path, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        run(arguments, graphs, tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


def test_choices_come_from_files_and_from_the_command_line(arguments, tmp_path):
    path = tmp_path / "states.yaml"
    path.write_text("one: {kind: text, max_characters: 7, embedder: {kind: hashing}}\n")
    config, *overrides = arguments
    states = load_states(config, overrides, [str(path), KEY])
    assert list(states) == ["run", "one", "parity"]
    assert states["one"].max_characters == 7  # type: ignore[union-attr]
    path.write_text("one: 3\n")
    with pytest.raises(GraphPOError, match="state choice 'one'"):
        load_states(config, overrides, [str(path)])


def test_graphs_of_a_run_directory_name_their_tasks_behind_the_step():
    tasks = [Task("a/b", "?", ()), Task("step-1/c", "?", ())]
    names = ["a/b", "step-3/a/b", "step-1/c", "step-2/step-1/c"]
    found = tasks_of([RolloutGraph.root(name, token_ids=[1]) for name in names], tasks)
    assert [task.id for task in found] == ["a/b", "a/b", "step-1/c", "step-1/c"]
    for name in ("step-3/b", "3/a/b"):
        with pytest.raises(DataError, match=f"'{name}'"):
            tasks_of([RolloutGraph.root(name, token_ids=[1])], tasks)


LOW = ThresholdRow(0.5, 200, 30, 50, 0.9, 0.25, 0.4, 0.6, math.nan, math.nan, 0.01)
HIGH = replace(LOW, threshold=0.92, merged_pairs=10, measured_pairs=5, spread=0.1, spread_upper=0.2)
WIDE = replace(LOW, spread_upper=0.8)


def calibration(**rows: tuple[ThresholdRow, ...]) -> Calibration:
    """What was found of some choices; recommended are thresholds of 0.92."""
    best = {name: [row for row in each if row.threshold == 0.92] for name, each in rows.items()}
    choices = {
        name: ChoiceCalibration(each, best[name][0] if best[name] else None)
        for name, each in rows.items()
    }
    return Calibration(CalibrateOptions(), 2, choices, 0.75, 0.02, 1234, 99)


def test_the_tables_say_what_was_found():
    unknown = replace(LOW, threshold=0.4, spread_upper=math.nan)
    vague = (unknown, WIDE, replace(LOW, threshold=0.6))
    lines = summary(calibration(text=(LOW, HIGH), vague=vague))
    assert "1,234 pairs" in lines[0] and "16 continuations" in lines[0]
    assert "differ by 0.750" in lines[1] and "nothing merged: 0.0200" in lines[1]
    head, _, text, nothing, *rest = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    found = dict(zip(head, text, strict=True))
    assert (found["choice"], found["κ"], found["merged pairs"]) == ("text", "0.92", "10")
    assert (found["right"], found["spread (bound)"]) == ("9 (90.0%)", "0.10 (0.20)")
    none = dict(zip(head, nothing, strict=True))
    assert (none["κ"], none["spread (bound)"]) == ("none", "– (0.60 at best)")
    assert dict(zip(head[1:], rest[2], strict=True))["right"] == "180 (90.0%)"


def test_the_record_holds_what_was_recommended_and_no_nan(tmp_path):
    states = {"text": TextState(kind="text", embedder=HashingEmbedderConfig(kind="hashing"))}
    left = tmp_path / ".out.partial"  # by a kill
    left.mkdir()
    (left / "calibration.md").write_text("half")
    write_calibration(tmp_path / "out", states, calibration(text=(LOW, HIGH)))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    text = (tmp_path / "out/calibration.json").read_text()
    record = json.loads(text, parse_constant=pytest.fail)
    assert (record["difference"], record["score_error"]) == (0.75, 0.02)
    assert record["choices"]["text"]["recommended"]["threshold"] == 0.92
    assert [row["recall"] for row in record["choices"]["text"]["rows"]] == [None, None]


def test_keys_alone_have_a_figure(tmp_path):
    states = {"key": TextState(kind="text", embedder=HashingEmbedderConfig(kind="hashing"))}
    found = calibration(key=(replace(LOW, threshold=None),))
    write_calibration(tmp_path / "out", states, found)
    assert (tmp_path / "out/calibration.png").read_bytes().startswith(b"\x89PNG")
    thresholds, panels = _panels(found)  # over which a band has a width
    assert thresholds == sorted(CalibrateOptions().thresholds)
    ((line,),) = (panel.lines for panel in panels if "spread" in panel.title)
    assert line.y.tolist() == [LOW.spread] * len(thresholds)
    assert line.upper is not None and set(line.upper.tolist()) == {LOW.spread_upper}


def test_no_two_of_a_dozen_lines_look_alike_and_bounds_are_shaded(tmp_path):
    y = np.array([0.1, 0.2])
    path = tmp_path / "c.svg"
    draw_panels(path, [0.5, 0.9], [CurvePanel("p", [Curve(f"c{i}", y + i) for i in range(12)])])
    styles = re.findall(r'style="(fill: none; [^"]*stroke-width: 1.8[^"]*)"', path.read_text())
    assert len(set(styles)) == 12
    axes = Figure().add_subplot()
    _draw(axes, [0.5, 0.9], CurvePanel("p", [Curve("a", y, y + 0.2)]))
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.1, 0.4))
