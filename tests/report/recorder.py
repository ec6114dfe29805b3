"""A tracker of one's own, for tests of whole runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Recorder:
    """Writes what it is told into ``<run>/recorded.jsonl``.

    Args:
        fails_at: the step at which it does not work any more.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        self._fails_at = fails_at

    def start(self, run: Path, config: Mapping[str, Any], resumed: bool) -> str:
        self._path = run / "recorded.jsonl"
        if config["seed"] == 13:
            raise OSError(13, "no seat\nfor thirteen")
        self._write({"resumed": resumed, "method": config["method"]["name"]})
        return f"recorded in {self._path}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self._fails_at:
            raise ConnectionError("the line is\ndown")
        self._write({"step": step, **metrics})

    def finish(self, complete: bool) -> None:
        self._write({"complete": complete})

    def _write(self, told: Mapping[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(told) + "\n")


def recorded(run: Path) -> list[dict[str, Any]]:
    """What a run's recorder was told."""
    return [json.loads(line) for line in (run / "recorded.jsonl").read_text().splitlines()]
