"""What ``graphpo compare`` leaves behind: a table, the numbers and the learning curves."""

import json
import math
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.atomic import write_atomically
from graphpo_agent.machine import usable_cpus
from graphpo_agent.report.compare_stats import MEASURES, Comparison, Interval, Outcome, interval
from graphpo_agent.report.numbers import UNDEFINED, compact, duration, fixed, in_table, signed
from graphpo_agent.report.plots import COLORS, Curve, curve_with_band
from graphpo_agent.report.run_dir import command_line

__all__ = [
    "comparison_record",
    "comparison_tables",
    "draw_curves",
    "machine_line",
    "points",
    "write_comparison",
]

_ACCURACIES = ("final_accuracy", "greedy_accuracy", "curve_accuracy")
_HEADS = (
    "final accuracy",
    "greedy",
    "mean of the curve",
    "tokens",
    "steps",
    "trajectories",
    "response tokens",
    "entropy",
    "time",
)
_POINTS = 61
"""Places along the budget at which the curves of all seeds are read off."""


def write_comparison(out: Path, title: str, comparison: Comparison) -> None:
    """``compare.md``, ``compare.json`` and ``compare.svg``, each whole or not at all.

    More methods than the figure has colours go on in ``compare-2.svg``, …, each with the first one.

    Raises:
        OSError: the directory cannot be written.
    """
    figures = draw_curves(out / "compare.svg", title, comparison)
    lines = [
        f"# {title}",
        "",
        machine_line(),
        "",
        *comparison_tables(comparison),
        "",
        *(f"![held-out accuracy by generated tokens]({path.name})" for path in figures),
        "",
        *(f"* {head}: {MEASURES[name]}" for head, name in zip(_HEADS, MEASURES, strict=True)),
    ]
    write_atomically(out / "compare.md", "\n".join(lines) + "\n")
    record = {"title": title, "command": command_line()} | comparison_record(comparison)
    write_atomically(out / "compare.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def machine_line() -> str:
    """The machine on which the times were taken."""
    return f"{platform.platform()}, {usable_cpus()} CPUs, Python {platform.python_version()}."


def comparison_tables(comparison: Comparison) -> Iterator[str]:
    """Markdown lines: a row per method, and each method's differences to the first one."""
    first, *others = comparison.outcomes
    seeds = list(comparison.outcomes[first])
    before = interval([o.before for runs in comparison.outcomes.values() for o in runs.values()])
    yield (
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))}); mean "
        f"± 95 % confidence interval over seeds; accuracies in percent, "
        f"{fixed(100 * before.mean, 1)} before training; curves up to "
        f"{comparison.budget:,.0f} generated tokens."
    )
    outages = sum(o.outages for runs in comparison.outcomes.values() for o in runs.values())
    if outages:
        yield f"Outages left {outages:,} held-out trajectories unscored."
    yield ""
    yield f"| method | {' | '.join(_HEADS)} |"
    yield f"|{' --- |' * (len(_HEADS) + 1)}"
    for label in comparison.outcomes:
        cells = [_cell(name, comparison.summary(label, name)) for name in MEASURES]
        yield f"| {in_table(label)} | {' | '.join(cells)} |"
    if not others:
        return
    yield ""
    yield f"| difference to {in_table(first)} | {' | '.join(_HEADS[: len(_ACCURACIES)])} |"
    yield f"|{' --- |' * (len(_ACCURACIES) + 1)}"
    for label in others:
        found = [comparison.difference(label, first, name) for name in _ACCURACIES]
        yield f"| {in_table(label)} | {' | '.join(points(each, signs=True) for each in found)} |"


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """What compare.json holds: the numbers; undefined ones are null."""
    first, *others = comparison.outcomes
    return {
        "measures": MEASURES,
        "budget": comparison.budget,
        "methods": [
            {
                "method": label,
                **_intervals(comparison, label, None),
                "runs": _runs(comparison, label),
            }
            for label in comparison.outcomes
        ],
        "differences": [
            {"method": label, "to": first, **_intervals(comparison, label, first)}
            for label in others
        ],
    }


def draw_curves(path: Path, title: str, comparison: Comparison) -> list[Path]:
    """Mean held-out accuracy by generated tokens, with 95 % bands over seeds.

    Args:
        path: the figure; further ones stand beside it as ``<stem>-2<suffix>``, ….
        title: the figures' heading.
        comparison: what is drawn.

    Returns:
        The figures that were written.
    """
    grid = np.linspace(0.0, comparison.budget, _POINTS)
    curves = [
        Curve(label, grid, np.stack([_read_off(grid, o) for o in runs.values()]))
        for label, runs in comparison.outcomes.items()
    ]
    written: list[Path] = []
    for number, shown in enumerate(_figures(curves), start=1):
        target = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        partial = target.with_stem(f".{target.stem}.partial")
        try:
            curve_with_band(partial, shown, title=title)
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        written.append(target)
    return written


def _read_off(grid: NDArray[np.float64], outcome: Outcome) -> NDArray[np.float64]:
    """[places] accuracies of a run; NaN before its first one."""
    return np.interp(grid, outcome.tokens, outcome.accuracy, left=math.nan)


def _figures(curves: Sequence[Curve]) -> Iterator[list[Curve]]:
    """As many curves as there are colours, the first one in every figure."""
    first, *others = curves
    room = len(COLORS) - 1
    for start in range(0, max(1, len(others)), room):
        yield [first, *others[start : start + room]]


def _cell(measure: str, found: Interval) -> str:
    if measure in _ACCURACIES:
        return points(found, signs=False)
    if measure == "seconds":
        return duration(found.mean)
    if measure in ("tokens", "steps"):
        return compact(found.mean)
    return fixed(found.mean, 3 if measure == "entropy" else 1)


def points(found: Interval, signs: bool) -> str:
    """Percent points, ``72.4 ± 1.9``, the same from a record as from the runs."""
    if math.isnan(found.mean):
        return UNDEFINED
    share = round(100 * found.mean, 6)
    mean = signed(share, 1) if signs else fixed(share, 1)
    return f"{mean} ± {fixed(100 * found.half_width, 1)}"


def _intervals(comparison: Comparison, label: str, other: str | None) -> dict[str, Any]:
    found = {
        name: comparison.summary(label, name)
        if other is None
        else comparison.difference(label, other, name)
        for name in MEASURES
    }
    return {
        name: {"mean": _or_none(each.mean), "half_width": _or_none(each.half_width)}
        for name, each in found.items()
    }


def _runs(comparison: Comparison, label: str) -> list[dict[str, Any]]:
    values = {name: comparison.values(label, name) for name in MEASURES}
    return [
        {
            "seed": seed,
            **{name: _or_none(values[name][seed]) for name in MEASURES},
            "curve": {
                "tokens": outcome.tokens.astype(int).tolist(),
                "accuracy": outcome.accuracy.tolist(),
            },
        }
        for seed, outcome in comparison.outcomes[label].items()
    ]


def _or_none(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
