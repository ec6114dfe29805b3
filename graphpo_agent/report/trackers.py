"""Where a run's metrics can be watched beside its own files: TensorBoard, Weights & Biases."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from graphpo_agent.atomic import write_atomically
from graphpo_agent.errors import ConfigError
from graphpo_agent.installed import installed_version
from graphpo_agent.yaml_text import to_yaml

__all__ = ["TensorBoard", "Wandb"]


class TensorBoard:
    """A ``Tracker`` that writes ``<run>/tensorboard``; needs the extra ``tensorboard``.

    A run that goes on writes the steps that it kept anew, so that none stands there twice.

    Example: ``tensorboard --logdir runs`` then shows all runs below ``runs``.
    """

    def __init__(self) -> None:
        """Write nothing yet.

        Raises:
            ConfigError: tensorboard is not installed.
        """
        _require("tensorboard")

    def start(self, run: Path, config: Mapping[str, Any], resumed: bool) -> str:
        """Begin an empty log."""
        from torch.utils.tensorboard import SummaryWriter

        directory = run / "tensorboard"
        if directory.exists():
            shutil.rmtree(directory)
        self._writer = SummaryWriter(str(directory))
        lines = to_yaml(dict(config)).splitlines()
        self._writer.add_text("config", "\n".join("    " + line for line in lines))
        return f"tensorboard --logdir {directory}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row through to the disk."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, complete: bool) -> None:
        """Close the log."""
        self._writer.close()


class Wandb:
    """A ``Tracker`` of Weights & Biases; needs the extra ``wandb``, and its key where it is online.

    A run that goes on continues its own record, in which the steps that are there stay as they are.

    Example: ``Wandb(project="search", tags=["kb"])``
    """

    def __init__(
        self,
        *,
        project: str = "graphpo-agent",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        """Send nothing yet.

        Args:
            project: that the run belongs to.
            entity: a user or team; None: the key's own.
            name: what the run is called; None: as its directory is.
            group: of runs that are shown together.
            tags: to find it by.
            mode: ``offline`` keeps everything in ``<run>/wandb``, for ``wandb sync``.

        Raises:
            ConfigError: wandb is not installed.
        """
        _require("wandb")
        self._project, self._entity, self._name = project, entity, name
        self._group, self._tags = group, tags
        self._mode: Literal["online", "offline"] = mode

    def start(self, run: Path, config: Mapping[str, Any], resumed: bool) -> str:
        """Begin a record, or open the one that the run began with."""
        import wandb

        known = run / "wandb-id.txt"
        began = known.read_text().strip() if resumed and known.exists() else None
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=self._name or str(run),
            group=self._group,
            tags=self._tags,
            id=began,
            resume=None if began is None else "allow",
            mode=self._mode,
            dir=run,
            config=dict(config),
            settings=wandb.Settings(console="off", quiet=True),
        )
        write_atomically(known, self._run.id)
        if self._mode == "offline":
            return f"wandb sync {Path(self._run.dir).parent}"
        return f"wandb: {self._run.url}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a row, unless the record is past it."""
        if step >= self._run.starting_step:
            self._run.log(dict(metrics), step=step)

    def finish(self, complete: bool) -> None:
        """Send what is left."""
        self._run.finish(exit_code=0 if complete else 1)


def _require(package: str) -> None:
    if installed_version(package) is None:
        raise ConfigError(f"{package} is not installed; run pip install 'graphpo-agent[{package}]'")
