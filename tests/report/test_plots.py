import re
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import pytest
from matplotlib.figure import Figure

from graphpo_agent.report.plots import (
    Curve,
    _draw,
    confidence_half_width,
    curve_with_band,
    t_quantile,
)

# Two-sided critical values as printed in statistics books.
PRINTED = [
    (1, 0.95, 12.706), (2, 0.95, 4.303), (4, 0.95, 2.776), (9, 0.95, 2.262), (30, 0.95, 2.042),
    (4, 0.99, 4.604), (10, 0.90, 1.812), (1000, 0.95, 1.962),
]  # fmt: skip


@pytest.mark.parametrize(("degrees", "confidence", "printed"), PRINTED)
def test_quantiles_are_those_of_the_printed_table(
    degrees: int, confidence: float, printed: float
) -> None:
    assert t_quantile(degrees, confidence) == pytest.approx(printed, abs=6e-4)


def test_the_band_counts_only_seeds_that_are_there() -> None:
    y = np.array([[0.2, 0.5, 0.3], [0.4, np.nan, np.nan], [0.9, 0.7, np.nan]])
    width = confidence_half_width(y)

    assert width[0] == pytest.approx(4.303 * stdev([0.2, 0.4, 0.9]) / 3**0.5, abs=1e-3)
    assert width[1] == pytest.approx(12.706 * stdev([0.5, 0.7]) / 2**0.5, abs=1e-3)
    assert np.isnan(width[2])


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(size=(5, 4000))
    covered = np.abs(draws.mean(axis=0)) <= confidence_half_width(draws)
    assert mean(covered.tolist()) == pytest.approx(0.95, abs=0.015)


def test_a_curve_is_the_mean_of_the_seeds_that_are_there_inside_its_band() -> None:
    nan = float("nan")
    y = np.array([[0.2, 0.4, 0.6, nan], [0.4, 0.8, nan, nan]])
    axes = Figure().add_subplot()
    _draw(axes, Curve("graphpo", np.arange(4.0), y), 0)
    (line,), (band,) = axes.lines, axes.collections
    assert np.array(line.get_data()) == pytest.approx(np.array([[0, 1, 2], [0.3, 0.6, 0.6]]))
    corners = np.concatenate([path.vertices for path in band.get_paths()])
    # 12.706 · 0.2 around 0.6, where the two seeds are farthest apart
    assert corners[:, 1].min() == pytest.approx(0.6 - 2.5412, abs=1e-3)
    assert corners[:, 1].max() == pytest.approx(0.6 + 2.5412, abs=1e-3)


def test_the_axis_of_accuracies_ends_where_they_do(tmp_path: Path) -> None:
    for y, ends in ([[0.1, 0.9], [0.9, 0.1]], ("0.0", "1.0")), ([[0.0, 0.0]], ("0.00", "0.05")):
        curve = Curve("graphpo", np.array([0.0, 1e5]), np.array(y))
        curve_with_band(tmp_path / "a.svg", [curve], title="kb")
        texts = re.findall(r"<!-- (\S+) -->", (tmp_path / "a.svg").read_text())
        shares = [text for text in texts if re.fullmatch(r"\W?\d+\.\d+", text)]
        assert (shares[0], shares[-1]) == ends


def test_figures_are_written_in_both_formats_and_are_reproducible(tmp_path: Path) -> None:
    curves = [
        Curve(
            "graphpo", np.array([0.0, 1e5, 2e5]), np.array([[0.2, 0.4, 0.6], [0.3, 0.5, np.nan]])
        ),
        Curve("grpo", np.array([0.0, 1e5]), np.array([[0.2, np.nan]])),
    ]
    for name in ("a.svg", "b.svg", "a.png"):
        curve_with_band(tmp_path / name, curves, title="kb")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
