"""Trackers of a run: they follow its ``metrics.jsonl``, and none of them can stop it."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphpo_agent.errors import ConfigError, errors_at, first_line
from graphpo_agent.named import constructed
from graphpo_agent.protocols import Tracker

__all__ = ["Tail", "build_trackers", "tracked"]


class Tail:
    """The rows of a growing log, each one once.

    Args:
        path: of the log.
        start: bytes at its beginning that are not read.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self._path, self._read = path, start

    def rows(self) -> list[dict[str, float]]:
        """Those that are complete and new."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines, end, _ = file.read().rpartition(b"\n")
        self._read += len(lines) + len(end)
        return [json.loads(line) for line in lines.splitlines()]


def build_trackers(specs: Sequence[Mapping[str, Any]]) -> list[Tracker]:
    """Those that a configuration names.

    Raises:
        ConfigError: one cannot be built, or lacks a method; the message says which.
    """
    built: list[Tracker] = []
    for place, spec in enumerate(specs):
        with errors_at(f"trackers[{place}]"):
            built.append(constructed(spec, ("start", "log", "finish")))
    return built


@contextmanager
def tracked(
    trackers: Sequence[Tracker], run: Path, config: Mapping[str, Any], resumed: bool
) -> Iterator["Following"]:
    """Tell trackers of a run from its first row until the ``with`` block ends.

    Args:
        trackers: of ``build_trackers``.
        run: its directory.
        config: as in its ``config.yaml``.
        resumed: whether it goes on.

    Raises:
        ConfigError: one cannot start, which costs nothing yet.
    """
    following = Following(run / "metrics.jsonl")
    complete = False
    try:
        for place, tracker in enumerate(trackers):
            following.start(f"trackers[{place}]", tracker, run, config, resumed)
        yield following
        complete = True
    finally:
        following.finish(complete)


class Following:
    """Trackers that have started.

    Attributes:
        told: what they say where they can be looked at.
    """

    def __init__(self, metrics: Path) -> None:
        self.told: list[str] = []
        self._tail = Tail(metrics)
        self._trackers: dict[str, Tracker] = {}

    def start(
        self, name: str, tracker: Tracker, run: Path, config: Mapping[str, Any], resumed: bool
    ) -> None:
        """Start one more."""
        try:
            self.told.append(tracker.start(run, config, resumed))
        except Exception as error:
            raise ConfigError(f"{name}: it cannot start: {first_line(error)}") from error
        self._trackers[name] = tracker

    def log(self) -> None:
        """Tell them the rows that are new; one that fails is left out from then on."""
        rows = self._tail.rows() if self._trackers else []
        for row in rows:
            metrics = {name: value for name, value in row.items() if name != "step"}
            for name, tracker in list(self._trackers.items()):
                try:
                    tracker.log(int(row["step"]), metrics)
                except Exception as error:
                    del self._trackers[name]
                    warnings.warn(
                        f"{name} failed at step {row['step']:g} and is told no more: "
                        f"{first_line(error)}; metrics.jsonl has everything",
                        stacklevel=1,
                    )

    def finish(self, complete: bool) -> None:
        """Tell them what is left, and that the run ended."""
        self.log()
        for name, tracker in self._trackers.items():
            try:
                tracker.finish(complete)
            except Exception as error:
                warnings.warn(f"{name} failed at the end: {first_line(error)}", stacklevel=1)
