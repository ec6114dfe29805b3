"""The figure of a calibration: several measures over the merge threshold, one line per choice."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from graphpo_agent.report.plots import COLORS, DASHES, STYLE, draw_legend

__all__ = ["Curve", "CurvePanel", "draw_panels"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One choice in one panel.

    Example, with a bound at the second of three thresholds only::

        Curve("text", y=[0.4, 0.2, nan], upper=[nan, 0.3, nan])

    Attributes:
        label: its name in the legend.
        y: [thresholds], NaN where undefined.
        upper: [thresholds] upper confidence bounds, NaN where there is none; None: none at all.
    """

    label: str
    y: NDArray[np.float64]
    upper: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class CurvePanel:
    """One measure.

    Attributes:
        title: what it is.
        lines: one per choice, the same choices in the same order in every panel.
        level: a level to compare with and what it is; None: there is none.
    """

    title: str
    lines: Sequence[Curve]
    level: tuple[float, str] | None = None


def draw_panels(path: Path, thresholds: Sequence[float], panels: Sequence[CurvePanel]) -> None:
    """Write the figure, two panels to a row. The thresholds are spaced evenly.

    Args:
        path: the figure; its suffix (``.png`` or ``.svg``) decides the format.
        thresholds: ascending.
        panels: at least one.

    Raises:
        OSError: the figure cannot be written.
    """
    rows = -(-len(panels) // 2)
    with mpl.rc_context(rc=STYLE):
        figure = Figure(figsize=(10.0, 3.2 * rows + 0.6), layout="constrained")
        FigureCanvasAgg(figure)
        for k, panel in enumerate(panels):
            axes = figure.add_subplot(rows, 2, k + 1)
            lines = _draw(axes, thresholds, panel)
            if k == 0:
                labels = [curve.label for curve in panel.lines]
                columns = min(len(labels), 4)
                draw_legend(figure, lines, labels, loc="outside lower center", ncols=columns)
            if k >= len(panels) - 2:
                axes.set_xlabel("merge threshold κ")
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw(axes: Axes, thresholds: Sequence[float], panel: CurvePanel) -> list[Line2D]:
    places, drawn = np.arange(len(thresholds)), list[Line2D]()
    for k, line in enumerate(panel.lines):
        color = COLORS[k % len(COLORS)]
        dash = DASHES[(k + k // len(COLORS)) % len(DASHES)]
        drawn += axes.plot(places, line.y, color=color, linestyle=dash, linewidth=1.8, marker=".")
        if line.upper is not None:
            axes.fill_between(places, line.y, line.upper, color=color, alpha=0.12, linewidth=0)
    if panel.level is not None:
        axes.axhline(panel.level[0], color="#7a7972", linewidth=1, linestyle=":")
        axes.annotate(
            panel.level[1],
            (0, panel.level[0]),
            textcoords="offset points",
            xytext=(0, 3),
            color="#55544f",
            fontsize=8,
        )
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xticks(places, [f"{threshold:g}" for threshold in thresholds], rotation=60, fontsize=8)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    return drawn
