"""Warm-starting a policy on demonstrations, with the engine that trains it later."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from graphpo_agent.errors import RunError
from graphpo_agent.outputs import check_above
from graphpo_agent.partial_output import check_name, partial_path
from graphpo_agent.protocols import Engine
from graphpo_agent.report.checkpoints import Checkpoints, read_progress, step_of
from graphpo_agent.report.run_dir import locked
from graphpo_agent.types import Demonstration

__all__ = [
    "FinishedSteps",
    "check_model_output",
    "finished_steps",
    "warm_start",
    "with_observations",
]

_TIMES_AS_LONG = 30
"""As a checkpoint took to write, the steps before the next one do: it costs 3 % of the time."""


def warm_start(
    engine: Engine,
    demonstrations: Sequence[Demonstration],
    steps: int,
    batch_size: int,
    seed: int,
    finished: Callable[[int, dict[str, float]], None],
    done: int = 0,
) -> None:
    """``steps`` supervised updates on batches drawn epoch by epoch.

    Args:
        engine: learns through ``imitate``.
        demonstrations: at least one.
        steps: updates.
        batch_size: demonstrations per update.
        seed: of the order in which they are met.
        finished: told the step (from 1) and its metrics.
        done: the first so many steps are left out: the engine has made them before.
    """
    rng = np.random.default_rng(seed)
    order: list[int] = []
    for step in range(1, steps + 1):
        while len(order) < batch_size:
            order += rng.permutation(len(demonstrations)).tolist()
        batch, order = order[:batch_size], order[batch_size:]
        if step > done:
            finished(step, engine.imitate([demonstrations[i] for i in batch]))


class FinishedSteps:
    """The steps of a warm start that an interruption does not take away: a checkpoint of them.

    Attributes:
        path: where it is, ``<output>.partial``.
        count: how many an interruption has left.
    """

    def __init__(self, engine: Engine, output: Path, name: Mapping[str, Any]) -> None:
        """Begin, or put what an interruption left into the engine; see ``finished_steps``."""
        self.path = partial_path(output)
        self.count = 0
        self._engine, self._name = engine, name
        self._checkpoints = Checkpoints(self.path)
        for newest in self._checkpoints.whole()[-1:]:
            check_name(self.path, read_progress(newest), name)
            engine.load_checkpoint(newest)
            self.count = step_of(newest)
        self._saved = self._saving = 0.0

    def add(self, step: int) -> None:
        """Keep the first step, and those since the last one that was kept if they took long.

        Raises:
            RunError: the checkpoint cannot be written.
            OSError: a file of it cannot; names the file.
        """
        began = time.monotonic()
        if began - self._saved < self.interval:
            return
        self._checkpoints.save(step, self._name, 1, self._engine.save_checkpoint)
        self._saved = time.monotonic()
        self._saving = self._saved - began

    @property
    def interval(self) -> float:
        """Seconds of steps from one that is kept to the next."""
        return _TIMES_AS_LONG * self._saving

    def clear(self) -> None:
        """Forget them: the model is written."""
        self._checkpoints.clear()


@contextmanager
def finished_steps(
    engine: Engine, output: Path, name: Mapping[str, Any]
) -> Iterator[FinishedSteps]:
    """Begin a warm start, or go on with what an interruption left of it.

    It is removed where the ``with`` block succeeds, which then has written the model.

    Args:
        engine: learns; goes on from where it was, bit for bit.
        output: the model's directory.
        name: what decides the model (``output_name``); with another the steps would not be its own.

    Raises:
        ConfigError: what is there is of another name.
        RunError: it is damaged, or another process is making this model.
    """
    with locked(partial_path(output)):
        try:
            steps = FinishedSteps(engine, output, name)
            yield steps
            steps.clear()
        finally:
            with suppress(OSError):  # where something is in it, that stays
                partial_path(output).rmdir()


def with_observations(demonstration: Demonstration) -> Demonstration:
    """The demonstration with every piece trained, observations included; none of them ends it."""
    pieces = tuple(replace(piece, trained=True) for piece in demonstration.pieces)
    ends = demonstration.ends and demonstration.pieces[-1].trained
    return replace(demonstration, pieces=pieces, ends=ends)


def check_model_output(output: Path) -> None:
    """Raise RunError unless a model can be put there; ask before the work whose result it is.

    A model directory may be there and would be replaced, anything else may not.
    """
    if output.exists() and not (output / "config.json").is_file():
        raise RunError(f"{output} exists and is no model directory: set another output")
    check_above(output)
