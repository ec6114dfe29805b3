"""A run's own logs, written by verl's trainer process. Nothing here imports verl."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphpo_agent.data.jsonl import append_line
from graphpo_agent.rollout.tally import Tally

__all__ = ["RunLog", "renamed", "step_metrics"]

_NAMES = {
    "actor/loss": "update/loss",
    "actor/grad_norm": "update/grad_norm",
    "actor/lr": "update/learning_rate",
    "actor/pg_clipfrac": "update/clip_fraction",
    "actor/ppo_kl": "update/kl",
    "actor/entropy": "update/entropy",
    "actor/reference_kl": "update/reference_kl",
    "timing_s/gen": "time/rollout",
    "timing_s/update_actor": "time/update",
    "timing_s/testing": "time/eval",
    "timing_s/update_weights": "time/weight_sync",
    "timing_s/save_checkpoint": "time/checkpoint",
}
_COUNT = "count:"
"""Before the name of what a run's parts have counted, which may be any, while verl holds it."""


class RunLog:
    """``metrics.jsonl`` and ``graphs.jsonl`` of a run directory, as a tracker of verl's.

    What verl measures has our name where the other engines measure the same, and ``verl/`` before
    its own name otherwise.
    """

    def __init__(self, run: Path, steps: int) -> None:
        """Args: the run directory, and the run's last step."""
        self._run = run
        self._steps = steps
        self._tokens = _tokens_so_far(run / "metrics.jsonl")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Append one row of metrics."""
        row = renamed(data)
        self._tokens += row.get("tokens/generated", 0.0)
        row["tokens/total"] = self._tokens
        head = {"step": step, "progress": step / self._steps}
        append_line(self._run / "metrics.jsonl", json.dumps(head | row))

    def log_graph(self, notes: Sequence[Mapping[str, Any]]) -> None:
        """Append the longest of the graphs that came as a line."""
        lines = [note["line"] for note in notes if note.get("line")]
        if lines:
            append_line(self._run / "graphs.jsonl", max(lines, key=len))


def renamed(data: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among verl's metrics, under the names of a run's metrics.

    Example: ``{"actor/grad_norm": 0.5, "perf/x": 2}`` → ``{"update/grad_norm": 0.5, "verl/perf/x":
    2.0}``.
    """
    row: dict[str, float] = {}
    for name, value in data.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            row[_name(name)] = number
    return row


def step_metrics(notes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A step's metrics from the tallies of its graphs.

    What a run's parts have counted gets its own name in the log, and one before it until then.
    """
    merged = sum((Tally(**note["tally"]) for note in notes if "tally" in note), Tally()).metrics
    for note in notes:
        for name, count in note.get("counts", {}).items():
            merged[_COUNT + name] = merged.get(_COUNT + name, 0) + count
    return merged


def _name(name: str) -> str:
    if name.startswith(_COUNT):
        return name.removeprefix(_COUNT)
    own = ("eval/", "reward/", "rollout/", "tokens/", "budget/", "credit/", "update/")
    return name if name.startswith(own) else _NAMES.get(name, f"verl/{name}")


def _tokens_so_far(metrics: Path) -> float:
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return json.loads(lines[-1]).get("tokens/total", 0.0) if lines else 0.0
