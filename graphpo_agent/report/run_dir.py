"""The run directory: what a run leaves behind, written so that a crash loses nothing before it.

``config.yaml`` (resolved), ``manifest.json``, ``metrics.jsonl``, ``graphs.jsonl``,
``checkpoints/step-000010/`` and ``report.html``.
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphpo_agent.atomic import write_atomically
from graphpo_agent.data.jsonl import append_line
from graphpo_agent.errors import RunError, first_line
from graphpo_agent.installed import installed_version
from graphpo_agent.locks import directory_lock
from graphpo_agent.machine import usable_cpus
from graphpo_agent.report.checkpoints import PROGRESS, Checkpoints, read_progress

__all__ = [
    "Progress",
    "RunDirectory",
    "command_line",
    "locked",
]

_PACKAGES = ("graphpo-agent", "torch", "transformers", "tokenizers", "numpy", "bm25s")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after a step; what a checkpoint needs beside weights and optimiser."""

    step: int = 0
    tasks_drawn: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    accuracy: float | None = None
    """Held-out, where it was measured after this step."""


class RunDirectory:
    """Paths and writers of one run.

    Raises:
        RunError: the directory already holds a run, or holds none to resume.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.graphs_path = path / "graphs.jsonl"
        self.config_path = path / "config.yaml"
        self.manifest_path = path / "manifest.json"
        self.checkpoints_path = path / "checkpoints"
        self._checkpoints = Checkpoints(self.checkpoints_path)
        self.best_path = self.checkpoints_path / "best"  # of a run through verl
        # Verl's own file with the step of its newest checkpoint, written once that is complete.
        self.verl_newest_path = self.checkpoints_path / "latest_checkpointed_iteration.txt"

    @classmethod
    def create(
        cls,
        path: Path,
        config_yaml: str,
        seed: int,
        command: Sequence[str],
        inputs: Mapping[str, Any] | None = None,
    ) -> "RunDirectory":
        """Start a run in a directory: manifest and resolved configuration are written first.

        A run that ended before its first checkpoint left nothing to keep and is replaced.

        Args:
            path: the directory.
            config_yaml: its configuration.
            seed: of the run.
            command: how it was called.
            inputs: what it reads (``inputs_name``).
        """
        run = cls(path)
        run.check_new()
        manifest = _manifest(seed, command) | {"inputs": dict(inputs or {})}
        run.checkpoints_path.mkdir(parents=True, exist_ok=True)
        write_atomically(run.manifest_path, json.dumps(manifest, indent=2))
        run.metrics_path.write_text("")
        run.graphs_path.write_text("")
        write_atomically(run.config_path, config_yaml)
        return run

    def check_new(self) -> None:
        """Raise RunError where starting a run would lose another one's results, or a file."""
        if self.checkpoints() or self.verl_newest_path.exists():
            raise RunError(
                f"{self.path} already holds a run: continue it with --resume {self.path}, "
                "or set output=…"
            )
        begun = self.manifest_path.exists() and "seed" in self._read_manifest()
        page = self.path / "report.html"
        own = (self.manifest_path, self.config_path, self.metrics_path, self.graphs_path, page)
        foreign = [] if begun else [path for path in own if path.exists()]
        if foreign:
            raise RunError(f"{foreign[0]} is there and no run wrote it: set another output=…")

    @classmethod
    def existing(cls, path: Path) -> "RunDirectory":
        """A run that was started before."""
        run = cls(path)
        if not run.config_path.is_file():
            raise RunError(
                f"{path} holds no run (config.yaml is missing): name the output of one that began"
            )
        return run

    def log_metrics(self, row: Mapping[str, float]) -> None:
        """Append one step's metrics; values that are not finite are left out."""
        finite = {name: value for name, value in row.items() if math.isfinite(value)}
        append_line(self.metrics_path, json.dumps(finite))

    def log_graph(self, line: str) -> None:
        """Append one graph (``graphpo.graph/1``)."""
        append_line(self.graphs_path, line)

    def save_checkpoint(self, progress: Progress, keep: int, save: Callable[[Path], None]) -> None:
        """Write a checkpoint whole or not at all; the ``keep`` newest are kept, and the best.

        Args:
            progress: where the run stands.
            keep: checkpoints to keep besides that with the highest accuracy.
            save: writes a directory with weights and optimiser state, whole or not at all.
        """
        state = asdict(progress) | {
            "metrics_bytes": self.metrics_path.stat().st_size,
            "graphs_bytes": self.graphs_path.stat().st_size,
        }
        self._checkpoints.save(progress.step, state, keep, save)

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return self._checkpoints.whole()

    def best_checkpoint(self) -> Path | None:
        """The one with the highest held-out accuracy; None where none was measured."""
        return self._checkpoints.best() or Checkpoints(self.best_path).best()

    def latest_checkpoint(self) -> Path:
        """The newest complete checkpoint."""
        checkpoints = self.checkpoints()
        if not checkpoints:
            raise RunError(
                f"{self.path} ended before its first checkpoint: start it again without --resume"
            )
        return checkpoints[-1]

    def rewind(self, checkpoint: Path) -> Progress:
        """Cut the logs back to where a checkpoint was written, and say where that was.

        What a kill has left beside the checkpoints is deleted.
        """
        state = read_progress(checkpoint)
        try:
            sizes = {
                self.metrics_path: int(state.pop("metrics_bytes")),
                self.graphs_path: int(state.pop("graphs_bytes")),
            }
            progress = Progress(**state)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{checkpoint / PROGRESS} is damaged ({error}); delete that checkpoint"
            ) from None
        for log, size in sizes.items():
            if not log.is_file() or log.stat().st_size < size:
                raise RunError(
                    f"{log} is shorter than when {checkpoint.name} was written; put it back, or "
                    "delete that checkpoint to go on from the one before"
                )
        for log, size in sizes.items():
            os.truncate(log, size)
        self._checkpoints.sweep()
        return progress

    def check_manifest(self) -> None:
        """Raise RunError where nothing could be added to the manifest."""
        self._read_manifest()

    def other_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Names of those that the run began with others of; none where it did not say.

        Raises:
            RunError: the manifest is missing or damaged.
        """
        begun = self._read_manifest().get("inputs")
        begun = begun if isinstance(begun, dict) else {}
        return sorted(name for name in begun if begun[name] != inputs.get(name))

    def record_resume(self, config_yaml: str, command: Sequence[str]) -> None:
        """Keep the configuration with which the run goes on, and how it was called."""
        manifest = self._read_manifest()
        manifest.setdefault("resumed", []).append(list(command))
        write_atomically(self.manifest_path, json.dumps(manifest, indent=2))
        write_atomically(self.config_path, config_yaml)

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads(self.manifest_path.read_text(encoding="utf-8"))
            if isinstance(manifest, dict) and isinstance(manifest.get("resumed", []), list):
                return manifest
            reason = "it is not as a run writes it"
        except FileNotFoundError:
            raise RunError(
                f"{self.path} holds no run to resume (manifest.json is missing): start one without "
                f"--resume, or put {{}} into {self.manifest_path} if it was lost"
            ) from None
        except (OSError, ValueError) as error:
            reason = first_line(error)
        raise RunError(
            f"{self.manifest_path} is damaged ({reason}); put {{}} into it to go on without"
        )


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a run directory, which is made where it is not there; the process's end lets go of it.

    Raises:
        RunError: another process holds it, or it cannot be made.
    """
    busy = RunError(f"{directory} is in use: another process trains there")
    with ExitStack() as stack:
        try:
            stack.enter_context(directory_lock(directory, busy))
        except OSError as error:
            raise RunError(f"cannot create run directory {directory}: {error.strerror}") from None
        yield


def _manifest(seed: int, command: Sequence[str]) -> dict[str, object]:
    return {
        "command": list(command),
        "seed": seed,
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cpus": usable_cpus(),
        },
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """The commit of the checkout that holds this package's source; None of an installed package.

    An environment with the installed package may lie in a checkout of something else.
    """
    here = Path(__file__)
    commit = None
    for question in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
        try:
            done = subprocess.run(
                ["git", *question], cwd=here.parent, capture_output=True, text=True, check=False
            )
        except OSError:
            return None
        if done.returncode != 0:
            return None
        commit = done.stdout.strip()
    return commit


def command_line() -> list[str]:
    """How this process was called."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
