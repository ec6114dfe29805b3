import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.report.charts import (
    MAX_POINTS,
    SMOOTH_FROM,
    Line,
    line_chart,
    moving_mean,
    ticks,
)
from graphpo_agent.report.numbers import compact, percent

FINITE = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))


@given(FINITE, FINITE, st.integers(2, 6))
def test_ticks_cover_the_values_evenly(a: float, b: float, count: int) -> None:
    low, high = min(a, b), max(a, b)
    marks = ticks(low, high, count)
    slack = 1e-6 * max(1e-3, high - low)
    assert marks[0] <= low + slack and marks[-1] >= high - slack
    assert 2 <= len(marks) <= 3 * count
    steps = np.diff(marks)
    assert steps == pytest.approx(np.full(len(steps), steps[0]), rel=1e-3)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.integers(1, 10))
def test_the_moving_mean_is_the_mean_of_the_last_values(values: list[float], window: int) -> None:
    expected = [np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    assert moving_mean(np.array(values), window) == pytest.approx(np.array(expected), abs=1e-9)


def _line(count: int, noisy: bool = True, label: str = "reward") -> Line:
    x = np.arange(count, dtype=np.float64)
    return Line(label, x, np.linspace(0.2, 0.6, count), noisy)


def _parse(lines: list[Line]) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart("Reward", lines, percent))


def test_a_chart_says_where_its_lines_begin_and_end() -> None:
    chart = _parse([_line(11), _line(11, label="greedy")])
    assert chart.attrib["aria-label"] == (
        "Reward: reward 20.0% at step 0, 60.0% at step 10; greedy 20.0% at step 0, 60.0% at step 10"
    )
    assert len(chart.findall(".//path[@class='line']")) == 2


def test_one_point_is_a_dot_and_a_constant_line_has_an_axis() -> None:
    chart = _parse([_line(1)])
    assert len(chart.findall(".//circle")) == 1
    flat = Line("mismatch", np.array([0.0, 1.0, 2.0]), np.full(3, 2e-6), False)
    texts = [e.text for e in ElementTree.fromstring(line_chart("m", [flat], compact)).iter("text")]
    assert {"0", "2e-06"} <= set(texts)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (1231, 1236),
        (10_200, 10_210),
        (0.9985, 0.9995),
        (3.1e-7, 3.9e-7),
        (2.5e-6, 2.6e-6),
        (-5, -4.99),
    ],
)
def test_no_two_marks_of_the_vertical_axis_read_alike(low: float, high: float) -> None:
    line = Line("length", np.arange(3, dtype=np.float64), np.array([low, high, low]), False)
    chart = ElementTree.fromstring(line_chart("m", [line], compact))
    marks = [e.text for e in chart.iter("text") if e.attrib["text-anchor"] == "end"]
    assert len(marks) >= 2 and len(set(marks)) == len(marks)


def test_a_learning_rate_keeps_its_digits() -> None:
    assert [compact(rate) for rate in (2.5e-4, 2.5e-6, 1.25e-7)] == [
        "0.00025",
        "2.5e-06",
        "1.25e-07",
    ]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 60, 1234])
def test_the_horizontal_axis_counts_whole_steps(steps: int) -> None:
    chart = _parse([_line(steps + 1)])
    marks = [e.text or "" for e in chart.iter("text") if e.attrib["text-anchor"] == "middle"]
    assert marks[0] == "0" and all(mark.isdecimal() for mark in marks)
    assert int(marks[-1]) >= steps


def test_only_noisy_lines_are_smoothed_and_only_when_long() -> None:
    def paths(count: int, noisy: bool) -> int:
        return len(_parse([_line(count, noisy)]).findall(".//path"))

    assert paths(SMOOTH_FROM, noisy=True) == 2
    assert paths(SMOOTH_FROM - 1, noisy=True) == paths(SMOOTH_FROM, noisy=False) == 1


def test_a_long_run_is_thinned_by_means() -> None:
    chart = _parse([_line(10 * MAX_POINTS)])
    (points,) = json.loads(chart.attrib["data-points"])
    assert len(points["x"]) == len(points["value"]) == MAX_POINTS
    assert (points["step"][0], points["step"][-1]) == ("0–9, mean", "2990–2999, mean")
    (points,) = json.loads(_parse([_line(3)]).attrib["data-points"])
    assert points["step"] == ["0", "1", "2"]


def test_points_stand_where_the_axes_say() -> None:
    line = Line("a", np.array([0.0, 3.0, 7.0]), np.array([0.2, 0.9, 0.5]), False)
    chart = _parse([line])
    (points,) = json.loads(chart.attrib["data-points"])
    texts = {
        anchor: [e for e in chart.iter("text") if e.attrib["text-anchor"] == anchor]
        for anchor in ("middle", "end")
    }
    steps = [float(e.text or "") for e in texts["middle"]]
    places = [float(e.attrib["x"]) for e in texts["middle"]]
    shares = [float((e.text or "").rstrip("%")) / 100 for e in texts["end"]]
    heights = [float(e.attrib["y1"]) for e in chart.iter("line")]
    assert points["x"] == pytest.approx(np.interp(line.x, steps, places), abs=0.2)
    assert points["y"] == pytest.approx(np.interp(line.y, shares, heights), abs=0.2)
    assert places == sorted(places) and heights == sorted(heights, reverse=True)  # y points down
    assert max(places) <= float(chart.attrib["viewBox"].split()[2])


def _band(line: Line) -> list[tuple[float, float]]:
    """The corners of a line's band: along its upper edge, and back along the lower one."""
    band = _parse([line]).find(".//path[@class='band']")
    assert band is not None
    corners = [corner.split() for corner in band.attrib["d"].strip("MZ").split("L")]
    return [(float(x), float(y)) for x, y in corners]


def test_a_band_is_as_wide_at_each_step_as_it_is_said_to_be() -> None:
    half_width = np.array([0.1, 0.3])
    line = Line("a", np.array([0.0, 1.0]), np.array([0.5, 0.5]), False, half_width)
    (x0, above0), (x1, above1), (x2, below1), (x3, below0) = _band(line)
    assert (x0, x1) == (x3, x2)
    assert below1 - above1 == pytest.approx(3 * (below0 - above0), abs=0.4) and below0 > above0

    steps = np.arange(10.0 * MAX_POINTS)
    late = np.where(steps < len(steps) / 2, 0.0, 0.3)
    corners = _band(Line("a", steps, np.full(len(steps), 0.5), False, late))
    assert corners[0][1] == corners[-1][1]
    assert corners[MAX_POINTS - 1][1] < corners[MAX_POINTS][1]


def test_the_axis_holds_the_confidence_band() -> None:
    line = Line("a", np.array([0.0, 1.0]), np.array([0.5, 0.6]), False, np.array([np.nan, 0.3]))
    chart = _parse([line])
    assert len(chart.findall(".//path[@class='band']")) == 1
    heights = [float(e.attrib["y1"]) for e in chart.findall(".//line")]
    band = chart.find(".//path[@class='band']")
    assert band is not None
    ys = [float(pair.split()[1]) for pair in band.attrib["d"].strip("MZ").split("L")]
    assert min(heights) <= min(ys) and max(ys) <= max(heights)


def test_values_that_differ_by_rounding_only_have_an_axis() -> None:
    for low in (0.1, 0.0, 3e5):
        drawn = ticks(low, np.nextafter(low, 1e9), 3)
        assert len(set(drawn)) == len(drawn) >= 2
        assert drawn[0] <= low <= drawn[-1]
