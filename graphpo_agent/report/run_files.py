"""The files of a run directory, read for the report."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import RunError, json_mistake, json_reason
from graphpo_agent.yaml_text import NotYaml, parse_yaml

__all__ = ["Metrics", "RunFiles", "flatten", "read_run"]


@dataclass(frozen=True, slots=True)
class Metrics:
    """metrics.jsonl as columns, in order of steps.

    Example: two rows, the second without an evaluation::

        steps   = [0, 1]
        columns = {"eval/accuracy": [0.2, nan], "reward/mean": [nan, 0.3]}

    Attributes:
        steps: [num_rows] float64, strictly rising.
        columns: per metric [num_rows] float64, NaN where the row has none.
    """

    steps: NDArray[np.float64]
    columns: Mapping[str, NDArray[np.float64]]

    def defined(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Steps and values of a metric where it is a number; both empty if it never is."""
        values = self.columns.get(name, np.full(len(self.steps), np.nan))
        known = np.isfinite(values)
        return self.steps[known], values[known]

    def last(self, name: str) -> float:
        """The latest defined value; NaN if there is none."""
        _, values = self.defined(name)
        return float(values[-1]) if len(values) else math.nan

    def beside(self, name: str, other: str) -> float:
        """``other`` in the row of the latest defined ``name``; NaN if there is none."""
        rows = np.flatnonzero(np.isfinite(self.columns[name])) if name in self.columns else []
        return (
            float(self.columns[other][rows[-1]])
            if len(rows) and other in self.columns
            else math.nan
        )

    def at_end(self, name: str) -> float:
        """The value in the last row; NaN if it has none."""
        return float(self.columns[name][-1]) if name in self.columns else math.nan


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run directory says about its run; files that are missing give empty fields.

    Attributes:
        name: the directory's name.
        metrics: every step's numbers.
        config: the resolved configuration, nested as in the file.
        manifest: versions, commit, seeds, machine and command.
    """

    name: str
    metrics: Metrics
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]


def read_run(run_dir: Path) -> RunFiles:
    """Read metrics.jsonl, config.yaml and manifest.json of a run directory.

    Raises:
        RunError: the directory is none of a run, or a file cannot be read or parsed; the message
            names the file and the line.
    """
    names = ("metrics.jsonl", "config.yaml", "manifest.json")
    texts = {name: _read_text(run_dir / name) for name in names}
    if all(text is None for text in texts.values()):
        raise RunError(f"{run_dir}: not a run directory (it holds none of {', '.join(names)})")
    return RunFiles(
        name=run_dir.resolve().name,
        metrics=_parse_metrics(run_dir / "metrics.jsonl", texts["metrics.jsonl"] or ""),
        config=_parse_yaml(run_dir / "config.yaml", texts["config.yaml"] or ""),
        manifest=_parse_json(run_dir / "manifest.json", texts["manifest.json"] or ""),
    )


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and printed values of a nested mapping; lists and null as in JSON.

    >>> flatten({"method": {"name": "graphpo", "schedule": [6, 2]}, "threads": None})
    {'method.name': 'graphpo', 'method.schedule': '[6, 2]', 'threads': 'null'}
    """
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[f"{prefix}{key}"] = text
    return flat


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise RunError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from None


def _parse_metrics(path: Path, text: str) -> Metrics:
    rows: dict[float, dict[str, float]] = {}
    whole = text.rpartition("\n")[0]  # a run that was killed may leave half a line
    for number, line in enumerate(whole.split("\n"), start=1):
        if line.strip():
            row = _parse_row(f"{path}:{number}", line)
            rows[row["step"]] = row
    steps = sorted(rows)
    names = dict.fromkeys(name for step in steps for name in rows[step])
    columns = {name: np.array([rows[step].get(name, math.nan) for step in steps]) for name in names}
    return Metrics(np.array(steps, dtype=np.float64), columns)


def _parse_row(where: str, line: str) -> dict[str, float]:
    row = _from_json(where, line)
    if not isinstance(row, dict):
        raise RunError(f"{where}: a row of metrics is a JSON object, this is not")
    for name, value in row.items():
        if value is not None and not isinstance(value, (int, float)):
            raise RunError(f"{where}: {name!r} is not a number: {json.dumps(value)[:60]}")
    if not isinstance(row.get("step"), int):
        raise RunError(f"{where}: the row has no whole-numbered 'step'")
    try:
        return {name: math.nan if value is None else float(value) for name, value in row.items()}
    except OverflowError:
        raise RunError(f"{where}: the row holds a number that is too large") from None


def _from_json(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RunError(f"{where}: not JSON: {json_mistake(error)}") from None
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise RunError(f"{where}: not JSON that can be read: {json_reason(error)}") from None


def _parse_yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        data = parse_yaml(text)
    except NotYaml as error:
        raise RunError(f"{path}: not YAML: {error}") from None
    return _mapping(path, data)


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text) if text.strip() else None
    except json.JSONDecodeError as error:
        raise RunError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # too many digits, or nested too deeply
        raise RunError(f"{path}: not JSON that can be read: {json_reason(error)}") from None
    return _mapping(path, data)


def _mapping(path: Path, data: Any) -> dict[str, Any]:
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise RunError(f"{path}: expected a mapping of keys to values")
    return data
