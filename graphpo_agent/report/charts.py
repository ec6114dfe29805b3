"""Learning curves as inline SVG that follows the page's light or dark colours."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from graphpo_agent.report.render import render

__all__ = ["Line", "line_chart", "moving_mean", "ticks"]

WIDTH, HEIGHT = 380.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 366.0, 10.0, 164.0
MAX_POINTS = 300
SMOOTH_FROM = 30
"""Points from which a noisy line is drawn faint, under its moving mean."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart.

    Example: ``Line("greedy", x=[0, 10], y=[0.2, 0.6], noisy=False)``.

    Attributes:
        label: its name in legend and tooltip.
        x: [num_points] rising and finite.
        y: [num_points] finite.
        noisy: measured on few samples, so that a moving mean helps the eye.
        half_width: [num_points] half the width of its confidence band (NaN: none); None: no band.
    """

    label: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    noisy: bool
    half_width: NDArray[np.float64] | None = None


_TINY = 1e-100


@dataclass(frozen=True, slots=True)
class _Drawn:
    label: str
    raw: str
    """SVG path; empty where only the smooth line is drawn."""
    smooth: str
    """SVG path of the moving mean; empty for a line without one."""
    band: str
    dots: tuple[tuple[float, float], ...]


def line_chart(title: str, lines: Sequence[Line], write: Callable[[float], str]) -> Markup:
    """Lines over steps on one pair of axes.

    Args:
        title: said to screen readers, with where every line begins and ends.
        lines: at least one, each with at least one point.
        write: how a value is written on the axis and in the tooltip.
    """
    shown = [_thinned(line) for line in lines]
    last_step = max(1.0, *(float(line.x[-1]) for line in shown))
    x_ticks = ticks(0.0, last_step, min(4, round(last_step)))
    y_ticks = _y_ticks(shown)
    x_end = x_ticks[-1]

    def place_x(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * value / x_end, 1)

    def place_y(value: float) -> float:
        share = (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(BOTTOM - (BOTTOM - TOP) * share, 1)

    points = [
        _points(drawn, _spans(line), place_x, place_y, write)
        for line, drawn in zip(lines, shown, strict=True)
    ]
    return Markup(
        render(
            "chart.svg",
            width=WIDTH,
            height=HEIGHT,
            box=(LEFT, TOP, RIGHT, BOTTOM),
            summary=f"{title}: " + "; ".join(_summary(line, write) for line in lines),
            x_ticks=[(place_x(x), f"{x:g}") for x in x_ticks],
            y_ticks=[(place_y(y), write(y)) for y in y_ticks],
            lines=[_draw(line, place_x, place_y) for line in shown],
            points=json.dumps(points),
        )
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers, evenly spaced, the first at or below ``low``, the last at or above ``high``.

    Three significant digits tell them apart.

    >>> ticks(0.0, 0.63, 3), ticks(1231.0, 1234.0, 3)
    ([0.0, 0.2, 0.4, 0.6, 0.8], [1230.0, 1240.0])
    """
    span = high - low
    if span <= max(1e-9 * max(abs(low), abs(high)), _TINY):  # equal but for rounding
        span = abs(high) if abs(high) > _TINY else 1.0
    rough = span / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * min((1, 2, 5, 10), key=lambda multiple: abs(multiple * unit - rough))
    largest = max(abs(low), abs(low + span))
    step = max(step, 10.0 ** (math.floor(math.log10(largest)) - 2))
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def moving_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of each value and the ``window - 1`` before it (fewer at the start).

    >>> moving_mean(np.array([1.0, 3.0, 5.0]), 2).tolist()
    [1.0, 2.0, 4.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _y_ticks(lines: Sequence[Line]) -> list[float]:
    edges = [line.y for line in lines]
    for line in lines:
        if line.half_width is not None:
            width = np.nan_to_num(line.half_width)
            edges += [np.maximum(line.y - width, 0.0), line.y + width]
    values = np.concatenate(edges)
    low, high = float(values.min()), float(values.max())
    if 0 <= low <= 0.5 * high or low == high:
        low, high = min(low, 0.0), max(high, 0.0)
    return ticks(low, high, 3)


def _thinned(line: Line) -> Line:
    """At most ``MAX_POINTS`` points, each the mean of its neighbours."""
    if len(line.x) <= MAX_POINTS:
        return line
    starts = _starts(line)
    sizes = np.diff([*starts, len(line.x)])
    x, y = (np.add.reduceat(values, starts) / sizes for values in (line.x, line.y))
    width = None if line.half_width is None else line.half_width[starts]
    return Line(line.label, x, y, line.noisy, width)


def _starts(line: Line) -> NDArray[np.int64]:
    """[points drawn] the first of the values whose mean each point is."""
    count = len(line.x)
    return np.linspace(0, count, min(count, MAX_POINTS), endpoint=False).astype(np.int64)


def _spans(line: Line) -> list[str]:
    """The step of each point drawn; where it is a mean, of which steps."""
    starts = _starts(line)
    ends = np.append(starts[1:], len(line.x)) - 1
    pairs = zip(line.x[starts].tolist(), line.x[ends].tolist(), strict=True)
    return [f"{a:.0f}" if a == b else f"{a:.0f}–{b:.0f}, mean" for a, b in pairs]


def _draw(
    line: Line, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> _Drawn:
    xs = [place_x(x) for x in line.x.tolist()]
    ys = [place_y(y) for y in line.y.tolist()]
    smooth = ""
    if line.noisy and len(xs) >= SMOOTH_FROM:
        means = moving_mean(line.y, window=max(5, len(xs) // 20))
        smooth = _path(xs, [place_y(y) for y in means.tolist()])
    band = ""
    if line.half_width is not None:
        width = np.nan_to_num(line.half_width)
        above = [place_y(y) for y in (line.y + width).tolist()]
        below = [place_y(y) for y in np.maximum(line.y - width, 0.0).tolist()]
        band = _path(xs + xs[::-1], above + below[::-1]) + "Z"
    dots = tuple(zip(xs, ys, strict=True)) if len(xs) <= 15 else ()
    return _Drawn(line.label, _path(xs, ys), smooth, band, dots)


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in zip(xs, ys, strict=True))


def _points(
    line: Line,
    spans: Sequence[str],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    write: Callable[[float], str],
) -> dict[str, object]:
    """What the tooltip needs: pixel positions and the texts to show there."""
    return {
        "label": line.label,
        "x": [place_x(x) for x in line.x.tolist()],
        "y": [place_y(y) for y in line.y.tolist()],
        "step": spans,
        "value": [write(y) for y in line.y.tolist()],
    }


def _summary(line: Line, write: Callable[[float], str]) -> str:
    first, last = write(float(line.y[0])), write(float(line.y[-1]))
    return (
        f"{line.label} {first} at step {line.x[0]:.0f}, {last} at step {line.x[-1]:.0f}"
        if len(line.x) > 1
        else f"{line.label} {first} at step {line.x[0]:.0f}"
    )
