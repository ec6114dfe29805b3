"""What ``graphpo calibrate`` leaves behind: a table, the numbers and a figure."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from graphpo_agent.atomic import write_atomically
from graphpo_agent.config_state import StateConfig
from graphpo_agent.evals.calibrate import FEWEST_PAIRS, Calibration, ThresholdRow
from graphpo_agent.graph.arrays import FloatArray
from graphpo_agent.report.calibration_plot import Curve, CurvePanel, draw_panels
from graphpo_agent.report.numbers import in_table
from graphpo_agent.report.run_dir import command_line

__all__ = ["summary", "write_calibration"]

_COLUMNS = """\
`right`: merged pairs whose values are not shown to differ (permutation tests, false discovery rate
5 %); few continuations show large differences only. `difference`: root mean square difference of
values in merged pairs, noise removed. `spread`: its square over that of any two states of a graph,
in brackets its 95 % bound; 0: merged states are worth the same, 1: they might as well be merged at
random. `error of S`: mean squared error of the node scores against the values. `precision`: share
of merged pairs with equal reference keys. `recall`: share of pairs with equal reference keys that
merge; some cannot, or classes would form a cycle.\
"""


def write_calibration(out: Path, states: Mapping[str, StateConfig], found: Calibration) -> None:
    """``calibration.json``, ``calibration.md`` and ``calibration.png``, all or none of them.

    Raises:
        OSError: the directory cannot be written.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        record = _record(states, found)
        write_atomically(partial / "calibration.json", json.dumps(record, indent=1) + "\n")
        write_atomically(partial / "calibration.md", "\n".join(summary(found)) + "\n")
        draw_panels(partial / "calibration.png", *_panels(found))
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _record(states: Mapping[str, StateConfig], found: Calibration) -> dict[str, Any]:
    """What ``calibration.json`` holds; undefined numbers are null."""
    choices = {
        name: {
            "state": states[name].model_dump(mode="json"),
            "recommended": None if choice.recommended is None else _defined(choice.recommended),
            "rows": [_defined(row) for row in choice.rows],
        }
        for name, choice in found.choices.items()
    }
    return {
        "command": command_line(),
        "options": asdict(found.options),
        "graphs": found.num_graphs,
        "candidate_pairs": found.candidate_pairs,
        "measured_states": found.measured_states,
        "difference": _or_null(found.difference),
        "score_error": _or_null(found.score_error),
        "choices": choices,
    }


def _defined(row: ThresholdRow) -> dict[str, float | None]:
    return {name: _or_null(value) for name, value in asdict(row).items()}


def _or_null(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def summary(found: Calibration) -> list[str]:
    """The tables, in Markdown."""
    options = found.options
    lines = [
        f"{found.num_graphs} graphs, {found.candidate_pairs:,} pairs of states that could merge; "
        f"{found.measured_states:,} states measured, {options.continuations} continuations each.",
        f"The values of two states of a graph differ by {found.difference:.3f} (root mean square, "
        f"noise removed). Squared error of S with nothing merged: {found.score_error:.4f}.",
        "Recommended: the smallest κ with a spread inside classes of at most "
        f"{options.tolerance:g} of that between any two states, with 95 % confidence and "
        f"{FEWEST_PAIRS} measured pairs or more.",
        "",
        *_table(list(_recommendations(found))),
        "",
        *_COLUMNS.splitlines(),
    ]
    for name, choice in found.choices.items():
        lines += ["", f"### {name}", "", *_table([_cells(row) for row in choice.rows])]
    return lines


def _recommendations(found: Calibration) -> Iterator[dict[str, str]]:
    """Per choice: the recommended row; dashes where there is none."""
    for name, choice in found.choices.items():
        row = choice.recommended
        if row is None:
            bounds = [r.spread_upper for r in choice.rows if r.is_known]
            best = min(filter(math.isfinite, bounds), default=math.nan)
            cells = dict.fromkeys(_cells(choice.rows[0]), "–") | {"κ": "none"}
            cells["spread (bound)"] = f"– ({_number(best, '.2f')} at best)"
        else:
            cells = _cells(row)
        yield {"choice": in_table(name), **cells}


def _cells(row: ThresholdRow) -> dict[str, str]:
    cells = {
        "κ": "any" if row.threshold is None else f"{row.threshold:g}",
        "merged pairs": f"{row.merged_pairs:,}",
        "merged states": f"{row.merged_states:,}",
        "measured": f"{row.measured_pairs:,}",
        "right": f"{_number(row.right * row.merged_pairs, ',.0f')} ({_number(row.right, '.1%')})",
        "difference": _number(row.difference, ".3f"),
        "spread (bound)": f"{_number(row.spread, '.2f')} ({_number(row.spread_upper, '.2f')})",
        "error of S": _number(row.score_error, ".4f"),
    }
    if math.isfinite(row.recall):
        cells |= {
            "precision": _number(row.precision, ".1%"),
            "recall": _number(row.recall, ".1%"),
        }
    return cells


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A Markdown table whose columns are aligned in plain text too."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    padded = [[c.rjust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    return [f"| {' | '.join(line)} |" for line in padded]


def _panels(found: Calibration) -> tuple[list[float], list[CurvePanel]]:
    """All thresholds and four measures over them; a choice of keys alone is a level line."""
    named = {row.threshold for choice in found.choices.values() for row in choice.rows}
    thresholds = sorted(kappa for kappa in named if kappa is not None)
    thresholds = thresholds or sorted(found.options.thresholds)

    def panel(
        title: str,
        value: Callable[[ThresholdRow], float],
        upper: Callable[[ThresholdRow], float] | None = None,
        level: tuple[float, str] | None = None,
    ) -> CurvePanel:
        def values(rows: Sequence[ThresholdRow], of: Callable[[ThresholdRow], float]) -> FloatArray:
            one_for_all = len(rows) < len(thresholds)
            return np.array([of(row) for row in rows] * (len(thresholds) if one_for_all else 1))

        lines = [
            Curve(
                name,
                values(choice.rows, value),
                None if upper is None else values(choice.rows, upper),
            )
            for name, choice in found.choices.items()
        ]
        return CurvePanel(title, lines, level)

    return thresholds, [
        panel("states merged with another", lambda row: row.merged_states),
        panel("share of merged pairs not shown to differ", lambda row: row.right),
        panel(
            "spread inside classes (shaded: to its upper bound)",
            lambda row: row.spread,
            lambda row: row.spread_upper,
            (found.options.tolerance, "tolerance"),
        ),
        panel(
            "squared error of S",
            lambda row: row.score_error,
            level=(found.score_error, "nothing merged"),
        ),
    ]
