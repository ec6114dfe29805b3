import json
import math
from pathlib import Path

import pytest

from graphpo_agent.errors import RunError
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.report.run_files import flatten, read_run
from tests.report.sample_run import write_lines


def test_columns_hold_nan_where_a_row_has_nothing(tmp_path: Path) -> None:
    rows = [{"step": 0, "eval/accuracy": 0.2}, {"step": 1, "reward/mean": 0.3, "x": None}]
    write_lines(tmp_path / "metrics.jsonl", rows)
    metrics = read_run(tmp_path).metrics

    assert metrics.steps.tolist() == [0, 1]
    assert metrics.columns["eval/accuracy"][0] == 0.2
    assert math.isnan(metrics.columns["eval/accuracy"][1])
    assert [part.tolist() for part in metrics.defined("reward/mean")] == [[1], [0.3]]
    assert [len(part) for part in metrics.defined("x")] == [0, 0]
    assert [len(part) for part in metrics.defined("never")] == [0, 0]
    assert math.isnan(metrics.last("never"))


def test_a_mapping_without_keys_is_a_value_too() -> None:
    assert flatten({"tools": {}, "mode": {"options": {}}}) == {"tools": "{}", "mode.options": "{}"}


def test_a_metric_that_is_no_number_is_left_out_of_the_log(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "", 0, [])
    run.log_metrics({"step": 1, "update/loss": 0.5, "a": math.nan, "b": -math.inf})
    assert json.loads(run.metrics_path.read_text()) == {"step": 1, "update/loss": 0.5}


def test_a_step_that_was_written_again_counts_as_written_last(tmp_path: Path) -> None:
    rows = [{"step": s, "reward/mean": r} for s, r in [(0, 0.0), (2, 0.2), (1, 0.1), (2, 0.9)]]
    write_lines(tmp_path / "metrics.jsonl", rows)
    metrics = read_run(tmp_path).metrics
    assert metrics.steps.tolist() == [0, 1, 2]
    assert metrics.columns["reward/mean"].tolist() == [0.0, 0.1, 0.9]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"step": 1, "rew', "not JSON: Unterminated string starting at column 13"),
        ("[1, 2]", "a row of metrics is a JSON object"),
        ('{"reward/mean": 0.5}', "the row has no whole-numbered 'step'"),
        ('{"step": "one"}', "'step' is not a number"),
        ('{"step": 1, "reward/mean": "high"}', "'reward/mean' is not a number"),
        ('{"step": 1, "reward/mean": [1]}', "'reward/mean' is not a number"),
        ('{"step": 1, "loss": 1' + "0" * 400 + "}", "the row holds a number that is too large"),
        ('{"step": 1, "loss": 1' + "0" * 5000 + "}", "not JSON that can be read: Exceeds"),
        ("[" * 100_000, "not JSON that can be read: maximum recursion depth"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(
    tmp_path: Path, line: str, complaint: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n\n' + line + "\n")
    with pytest.raises(RunError) as caught:
        read_run(tmp_path)
    assert f"metrics.jsonl:3: {complaint}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("config.yaml", "a: [1", "config.yaml: not YAML"),
        ("config.yaml", "- 1", "config.yaml: expected a mapping"),
        ("manifest.json", '{"a":\n 1,}', "manifest.json:2: not JSON"),
        ("manifest.json", "3", "manifest.json: expected a mapping"),
        ("manifest.json", "[" * 100_000, "manifest.json: not JSON that can be read"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=complaint) as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="not UTF-8"):
        read_run(tmp_path)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(json.dumps({"step": 0}))
    with pytest.raises(RunError, match="not a run directory"):
        read_run(tmp_path)
    with pytest.raises(RunError, match="not a run directory"):
        read_run(tmp_path / "missing")


def test_files_that_are_empty_or_missing_give_empty_fields(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "manifest.json").touch()
    run = read_run(tmp_path)
    assert (len(run.metrics.steps), run.config, run.manifest) == (0, {}, {})
