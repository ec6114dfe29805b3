"""Learning curves with confidence bands over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from matplotlib.typing import RcKeyType
from numpy.typing import NDArray

__all__ = ["Curve", "confidence_half_width", "curve_with_band", "draw_legend", "t_quantile"]

COLORS = ("#1f6fd0", "#d9541e", "#13946a", "#b07a00", "#c94f86", "#5a47b8")
"""Distinguishable with every common colour blindness; the dashes tell the lines apart in print."""
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), "-.", (0, (6, 2, 1, 2, 1, 2)), (0, (1, 1)))
_ROOM = 0.02
"""Beyond 0 and 1, for the width of a line there: of the height that is shown."""
STYLE: dict[RcKeyType, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7a7972",
    "axes.labelcolor": "#55544f",
    "xtick.color": "#7a7972",
    "ytick.color": "#7a7972",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e3de",
    "axes.axisbelow": True,
    "svg.hashsalt": "graphpo",
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One method's curve, measured once per seed at the same places.

    Example, two seeds at three budgets::

        Curve("graphpo", x=[0, 1e5, 2e5], y=[[0.2, 0.4, 0.6], [0.2, 0.5, 0.5]])

    Attributes:
        label: its name in the legend.
        x: [num_points] generated tokens, rising.
        y: [num_seeds, num_points] accuracy, NaN where a seed has no value.
    """

    label: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def curve_with_band(path: Path, curves: Sequence[Curve], *, title: str) -> None:
    """Write a figure of mean held-out accuracies over seeds with their 95 % confidence bands.

    A point that fewer than two seeds reached has a mean but no band; one that none reached is
    left out. The axis ends where accuracies do, at 0 and 1, however wide a band of few seeds is.

    Args:
        path: the figure; its suffix (``.png`` or ``.svg``) decides the format.
        curves: at most six, so that their colours stay apart.
        title: the figure's heading.

    Raises:
        OSError: the figure cannot be written.
    """
    assert len(curves) <= len(COLORS)
    with mpl.rc_context(rc=STYLE):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        lines = [_draw(axes, curve, i) for i, curve in enumerate(curves)]
        low, high = axes.get_ylim()
        room = _ROOM * (min(high, 1.0) - max(low, 0.0))
        axes.set_ylim(max(low, -room), min(high, 1.0 + room))
        axes.set_title(title, loc="left", fontweight="bold", parse_math=False)
        axes.set_xlabel("generated tokens")
        axes.set_ylabel("held-out accuracy")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        draw_legend(axes, lines, [curve.label for curve in curves], loc="best")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=200, metadata=metadata)


def draw_legend(
    parent: Axes | Figure, lines: Sequence[Line2D], labels: Sequence[str], **where: Any
) -> None:
    """Name lines with whatever labels: matplotlib leaves out ``_name``, and typesets ``$``."""
    legend = parent.legend(lines, labels, frameon=False, **where)
    for text in legend.get_texts():
        text.set_parse_math(False)


def confidence_half_width(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Half the width of the 95 % Student-t confidence interval of each column's mean.

    Args:
        y: [num_seeds, num_points], NaN where absent.

    Returns:
        [num_points]; NaN where fewer than two values are present.
    """
    counts = np.isfinite(y).sum(axis=0)
    half_width = np.full(y.shape[1], np.nan)
    for count in np.unique(counts[counts >= 2]).tolist():
        columns = np.flatnonzero(counts == count)
        error = np.nanstd(y[:, columns], axis=0, ddof=1) / np.sqrt(count)
        half_width[columns] = t_quantile(count - 1) * error
    return half_width


def t_quantile(degrees_of_freedom: int, confidence: float = 0.95) -> float:
    """The t that Student's T stays within, in size, with probability ``confidence``.

    With T = √ν tan θ the density becomes proportional to cos^(ν-1) θ, which is smooth on
    [0, π/2], so a cumulative trapezoid sum inverts it to about six digits.

    >>> round(t_quantile(4), 3)
    2.776
    """
    angles = np.linspace(0.0, np.pi / 2, 100_001)
    density = np.cos(angles) ** (degrees_of_freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp(confidence, mass / mass[-1], angles)
    return float(np.sqrt(degrees_of_freedom) * np.tan(angle))


def _draw(axes: Axes, curve: Curve, slot: int) -> Line2D:
    reached = np.isfinite(curve.y).any(axis=0)
    x, y = curve.x[reached], curve.y[:, reached]
    mean, half_width = np.nanmean(y, axis=0), confidence_half_width(y)
    color = COLORS[slot]
    (line,) = axes.plot(x, mean, color=color, linestyle=DASHES[slot], linewidth=2)
    axes.fill_between(x, mean - half_width, mean + half_width, color=color, alpha=0.15, linewidth=0)
    return line
