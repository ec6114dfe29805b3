"""Statistics of a comparison against hand-computed numbers, and what is written of them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import RunError
from graphpo_agent.report.compare_page import (
    _read_off,
    comparison_tables,
    draw_curves,
    write_comparison,
)
from graphpo_agent.report.compare_stats import (
    MEASURES,
    Comparison,
    Outcome,
    interval,
    mean_of_curve,
    paired_difference,
    read_outcome,
)
from tests.worlds import files_of_at_most


def outcome(tokens: list[float], accuracy: list[float], **measures: float) -> Outcome:
    known = {name: 1.0 for name in MEASURES if name != "curve_accuracy"}
    known |= {"final_accuracy": accuracy[-1], "tokens": tokens[-1]}
    return Outcome(np.array(tokens), np.array(accuracy), known | measures)


def two_methods() -> Comparison:
    return Comparison(
        {
            "grpo": {
                0: outcome([0, 100], [0.2, 0.6], greedy_accuracy=0.5),
                1: outcome([0, 120], [0.2, 0.4], greedy_accuracy=math.nan),
            },
            "tree": {
                0: outcome([0, 50, 110], [0.2, 0.5, 0.9]),
                1: outcome([0, 50, 110], [0.2, 0.4, 0.5]),
            },
        },
        limit=None,
    )


@pytest.mark.parametrize(
    ("values", "mean", "half_width"),
    [
        # s = √0.1, t(4) = 2.776445: 2.776445 · √(0.1 / 5)
        ([0.2, 0.4, 0.6, 0.8, 1.0], 0.6, 0.392648),
        # s / √2 = 0.1, t(1) = 12.70620
        ([0.2, 0.4], 0.3, 1.270620),
        ([0.2, math.nan, 0.4], 0.3, 1.270620),
    ],
)
def test_an_interval_is_students(values: list[float], mean: float, half_width: float) -> None:
    found = interval(values)
    assert found.mean == pytest.approx(mean)
    assert found.half_width == pytest.approx(half_width, abs=1e-5)


def test_one_seed_has_a_mean_without_interval_and_none_has_nothing() -> None:
    assert interval([0.3]).mean == 0.3 and math.isnan(interval([0.3]).half_width)
    assert math.isnan(interval([]).mean) and math.isnan(interval([math.nan]).mean)


def test_differences_are_taken_seed_by_seed() -> None:
    # The methods vary by 0.4 over seeds, their differences 0.1, 0.2, 0.3 by 0.1 only:
    # s / √3 = 0.0577350, t(2) = 4.302653.
    values, others = {0: 0.2, 1: 0.9, 2: 0.7}, {2: 0.4, 0: 0.1, 1: 0.7}
    found = paired_difference(values, others)
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(0.248414, abs=1e-5)


def test_the_mean_of_a_curve_is_its_area() -> None:
    x, y = np.array([0.0, 10.0, 30.0]), np.array([0.0, 0.4, 0.8])
    # 10 · 0.2 + 10 · 0.5 over 20; 10 · 0.2 + 20 · 0.6 over 30; then level at 0.8 for 10 more.
    assert mean_of_curve(x, y, 20.0) == pytest.approx(7 / 20)
    assert mean_of_curve(x, y, 30.0) == pytest.approx(14 / 30)
    assert mean_of_curve(x, y, 40.0) == pytest.approx(22 / 40)
    assert mean_of_curve(x, y, 5.0) == pytest.approx(0.1)
    assert mean_of_curve(x, y, 0.0) == 0.0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=6),
    st.integers(1, 30),
)
def test_the_mean_of_a_curve_is_that_of_many_small_pieces(
    pieces: list[tuple[int, int]], end: int
) -> None:
    x, y = [0], [3]
    for width, height in pieces:
        x.append(x[-1] + width)
        y.append(height)

    def height_at(place: float) -> float:
        for i in range(len(x) - 1):
            if x[i] <= place <= x[i + 1]:
                return y[i] + (y[i + 1] - y[i]) * (place - x[i]) / (x[i + 1] - x[i])
        return y[-1]

    # Corners lie on whole numbers, so the midpoints of pieces of 1/4 give the exact area.
    slow = sum(height_at((i + 0.5) / 4) for i in range(4 * end)) / (4 * end)
    assert mean_of_curve(np.array(x, float), np.array(y, float), float(end)) == pytest.approx(slow)


def test_curves_count_up_to_what_every_run_reached_or_the_budget() -> None:
    found = two_methods()
    assert found.budget == 100
    assert Comparison(found.outcomes, limit=80).budget == 80
    assert Comparison(found.outcomes, limit=105).budget == 100
    # At 100 of 120 tokens the second run is at 0.2 + 0.2 · 5/6.
    assert found.values("grpo", "curve_accuracy") == pytest.approx(
        {0: 0.4, 1: (0.2 + 0.2 + 0.2 * 5 / 6) / 2}
    )
    assert found.difference("tree", "grpo", "final_accuracy").mean == pytest.approx(0.2)


def test_the_tables_show_means_and_differences() -> None:
    lines = list(comparison_tables(two_methods()))
    # 0.6 and 0.4: ± 12.7062 · 0.1; differences 0.3 and 0.1: the same.
    assert "| grpo | 50.0 ± 127.1 | 50.0 ± – |" in "\n".join(lines)
    assert any(line.startswith("| tree | +20.0 ± 127.1 | +50.0 ± – |") for line in lines)
    assert "20.0 before training" in lines[0] and "up to 100 generated tokens" in lines[0]
    head, row = (
        next(line for line in lines if line.startswith(f"| {name} |")).split(" | ")
        for name in ("method", "grpo")
    )
    cells = dict(zip(head, row, strict=True))
    assert (cells["tokens"], cells["steps"], cells["entropy"]) == ("110", "1", "1.000")
    assert row[-1] == "1s |" and head[-1] == "time |"


def test_undefined_numbers_are_null_and_all_files_are_written(tmp_path: Path) -> None:
    write_comparison(tmp_path, "reach", two_methods())
    record = json.loads((tmp_path / "compare.json").read_text())
    grpo, tree = record["methods"]
    assert [run["greedy_accuracy"] for run in grpo["runs"]] == [0.5, None]
    assert grpo["greedy_accuracy"] == {"mean": 0.5, "half_width": None}
    assert tree["runs"][0]["curve"] == {"tokens": [0, 50, 110], "accuracy": [0.2, 0.5, 0.9]}
    (difference,) = record["differences"]
    assert (difference["method"], difference["to"]) == ("tree", "grpo")
    assert {path.name for path in tmp_path.iterdir()} == {
        "compare.md",
        "compare.json",
        "compare.svg",
    }
    assert "](compare.svg)" in (tmp_path / "compare.md").read_text()


def test_many_methods_share_figures_with_the_first_one(tmp_path: Path) -> None:
    names = [f"method{i}" for i in reversed(range(8))]
    runs = {0: outcome([0, 10], [0.1, 0.2])}
    comparison = Comparison(dict.fromkeys(names, runs), limit=None)
    first, second = draw_curves(tmp_path / "c.svg", "many", comparison)
    shown = [
        [name for name in names if f"<!-- {name} -->" in path.read_text()]
        for path in (first, second)
    ]
    assert shown == [names[:6], [names[0], *names[6:]]]
    assert second.name == "c-2.svg"
    assert draw_curves(tmp_path / "one.svg", "one", Comparison({"grpo": runs}, limit=None)) == [
        tmp_path / "one.svg"
    ]
    assert "<!-- grpo -->" in (tmp_path / "one.svg").read_text()


def test_labels_may_hold_what_figures_and_tables_use_themselves(tmp_path: Path) -> None:
    names = ["a$^$", "_mine", "p|q"]
    comparison = Comparison({name: {0: outcome([0, 10], [0.1, 0.2])} for name in names}, None)
    write_comparison(tmp_path, "x$^$", comparison)
    drawn = (tmp_path / "compare.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in [*names, "x$^$"])
    page = (tmp_path / "compare.md").read_text()
    assert page.count(r"| p\|q |") == 2 and "| p|q" not in page


def test_a_run_whose_first_evaluation_is_missing_counts_in_no_number_from_it() -> None:
    late = {0: outcome([40, 100], [0.5, 0.9]), 1: outcome([0, 100], [0.2, 0.6])}
    others = {0: outcome([0, 100], [0.1, 0.5]), 1: outcome([0, 100], [0.3, 0.5])}
    comparison = Comparison({"late": late, "others": others}, None)
    assert "20.0 before training" in next(comparison_tables(comparison))
    assert comparison.values("late", "curve_accuracy") == {
        0: pytest.approx(math.nan, nan_ok=True),
        1: pytest.approx(0.4),
    }
    difference = comparison.difference("late", "others", "curve_accuracy")
    assert difference.mean == pytest.approx(0.0) and math.isnan(difference.half_width)
    assert comparison.difference("late", "others", "final_accuracy").mean == pytest.approx(0.25)


def test_a_curve_is_drawn_from_its_first_evaluation_on() -> None:
    grid = np.array([0.0, 20.0, 40.0, 100.0])
    found = _read_off(grid, outcome([40, 100], [0.5, 0.9]))
    assert np.isnan(found[:2]).all() and found[2:].tolist() == [0.5, 0.9]


def test_a_figure_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    with files_of_at_most(1000), pytest.raises(OSError, match="too large"):
        draw_curves(tmp_path / "c.svg", "two", two_methods())
    assert not list(tmp_path.iterdir())


def test_an_outcome_is_what_the_metrics_say(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.1, "eval/greedy_accuracy": 0.3, "eval/response_tokens": 9},
        {"step": 1, "tokens/total": 40, "rollout/terminals": 6, "time/rollout": 1.0},
        {"step": 2, "tokens/total": 90, "rollout/terminals": 8, "update/entropy": 0.7},
        {"step": 3, "tokens/total": 99, "rollout/terminals": 10, "eval/accuracy": 0.5},
    ]
    rows[1] |= {"time/update": 2.0, "time/seconds": 50.0, "update/entropy": 0.9}
    rows[2] |= {"time/rollout": 0.25, "time/update": 0.5}
    rows[3] |= {"eval/response_tokens": 7, "eval/greedy_accuracy": 0.75, "time/rollout": 0.25}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_outcome(tmp_path)
    assert found.tokens.tolist() == [0, 99] and found.accuracy.tolist() == [0.1, 0.5]
    assert found.measures == {
        "final_accuracy": 0.5,
        "greedy_accuracy": 0.75,
        "tokens": 99,
        "steps": 3,
        "trajectories": 8,
        "response_tokens": 7,
        "entropy": 0.7,
        "seconds": 4.0,
    }


def test_an_evaluation_without_an_accuracy_is_none(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "eval/accuracy": 0.1, "eval/outages": 0},
        {"step": 1, "tokens/total": 40, "eval/accuracy": 0.3, "eval/outages": 5},
        {"step": 2, "tokens/total": 90, "eval/outages": 8},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_outcome(tmp_path)
    assert math.isnan(found.measures["final_accuracy"]) and found.outages == 13
    comparison = Comparison({"grpo": {0: found}}, None)
    assert comparison.budget == 90
    # 0.2 on 40 tokens and 0.3 on the 50 behind the last evaluation
    assert comparison.summary("grpo", "curve_accuracy").mean == pytest.approx(23 / 90)
    lines = list(comparison_tables(comparison))
    assert "Outages left 13 held-out trajectories unscored." in lines
    assert any(line.startswith("| grpo | – | –") for line in lines)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/outages": 8}))
    with pytest.raises(RunError, match="none of its evaluations has an accuracy"):
        read_outcome(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.5}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl: step 1 has no tokens/total"):
        read_outcome(tmp_path)


def test_a_curve_that_begins_later_is_averaged_from_there():
    assert mean_of_curve(np.array([10.0, 30.0]), np.array([0.2, 0.6]), 30.0) == pytest.approx(0.4)


def test_an_outcome_has_at_least_one_evaluation():
    with pytest.raises(ValueError, match="at least one"):
        Outcome(np.zeros(0), np.zeros(0), {})
