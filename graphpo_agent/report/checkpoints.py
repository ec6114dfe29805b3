"""The checkpoints of what trains, each whole or not there."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphpo_agent.atomic import write_atomically
from graphpo_agent.errors import RunError, first_line

__all__ = [
    "PROGRESS",
    "BestModel",
    "Checkpoints",
    "accuracy_of",
    "read_json",
    "read_progress",
    "step_of",
]

PROGRESS = "progress.json"
"""Where what trains stands, beside the weights and optimiser state of a checkpoint."""


class Checkpoints:
    """Directories ``step-000010/`` with weights, optimiser state and ``progress.json``."""

    def __init__(self, path: Path) -> None:
        """Those in ``path``, where there need be none yet."""
        self._path = path
        self._scratch = path / ".partial"

    def save(
        self, step: int, progress: Mapping[str, Any], keep: int, save: Callable[[Path], None]
    ) -> None:
        """Write a checkpoint whole or not at all, then delete older ones, but never the best.

        Args:
            step: after which it is written.
            progress: what ``read_progress`` gives back, as JSON; ``accuracy`` tells the best.
            keep: newest checkpoints to keep.
            save: writes a directory with weights and optimiser state, whole or not at all.
        """
        final = self._path / f"step-{step:06d}"
        partial = self._scratch / final.name
        with self._clean():
            save(partial)
            write_atomically(partial / PROGRESS, json.dumps(progress))
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            best = self.best()
            self._discard([path for path in self.whole()[:-keep] if path != best])

    def whole(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        found = [path.parent for path in self._path.glob(f"step-*/{PROGRESS}")]
        return sorted((path for path in found if _suffix(path).isdecimal()), key=step_of)

    def best(self) -> Path | None:
        """The one with the highest ``accuracy``, of equal ones the oldest; None where none has."""
        measured = {path: accuracy_of(path) for path in self.whole()}
        known = {path: accuracy for path, accuracy in measured.items() if accuracy is not None}
        return max(known, key=known.__getitem__, default=None)

    def clear(self) -> None:
        """Delete all of them."""
        with self._clean():
            self._discard(self.whole())

    def sweep(self) -> None:
        """Delete what a kill has left: half of a checkpoint, or one that was to be deleted."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    @contextmanager
    def _clean(self) -> Iterator[None]:
        """Without what a kill has left; leaves nothing itself, also where an interrupt ends it."""
        self.sweep()
        try:
            yield
        finally:
            self.sweep()

    def _discard(self, checkpoints: Sequence[Path]) -> None:
        """Delete checkpoints, of which a kill leaves no half in sight."""
        for checkpoint in checkpoints:
            self._scratch.mkdir(exist_ok=True)
            checkpoint.rename(self._scratch / checkpoint.name)
        self.sweep()


class BestModel:
    """The best model of a run whose checkpoints another program makes and deletes.

    Args:
        path: it is kept there, as ``step-000010/``.
    """

    def __init__(self, path: Path) -> None:
        self._kept = Checkpoints(path)

    def offer(self, step: int, accuracy: float, model: Path) -> None:
        """Keep a model if it is the best so far; its files, which do not change, take no room."""
        best = self._kept.best()
        if best is None or accuracy > (accuracy_of(best) or 0.0):
            progress = {"step": step, "accuracy": float(accuracy)}
            self._kept.save(step, progress, 1, lambda to: _linked(model, to))


def _linked(model: Path, to: Path) -> None:
    def link(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:  # not every file system can
            shutil.copy2(source, target)
        return target

    shutil.copytree(model, to, copy_function=link)


def step_of(checkpoint: Path) -> int:
    """After which step a checkpoint was written."""
    return int(_suffix(checkpoint))


def accuracy_of(checkpoint: Path) -> float | None:
    """What was measured of a checkpoint; None: nothing was, or it cannot be read."""
    try:
        accuracy = read_progress(checkpoint).get("accuracy")
    except RunError:
        return None
    return accuracy if isinstance(accuracy, float) else None


def _suffix(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix("step-")


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint was saved with.

    Raises:
        RunError: it is damaged.
    """
    path = checkpoint / PROGRESS
    progress = read_json(path)
    if not isinstance(progress, dict):
        raise RunError(f"{path} is damaged (it holds no object); delete that checkpoint")
    return progress


def read_json(path: Path) -> Any:
    """What a file of a checkpoint holds.

    Raises:
        RunError: it is not there or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({first_line(error)}); delete that checkpoint") from None
