"""Warm-starting a policy on demonstrations, with the engine that trains it later."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from graphpo_agent.errors import RunError
from graphpo_agent.outputs import check_above
from graphpo_agent.protocols import Engine
from graphpo_agent.types import Demonstration

__all__ = ["check_model_output", "warm_start", "with_observations"]


def warm_start(
    engine: Engine,
    demonstrations: Sequence[Demonstration],
    steps: int,
    batch_size: int,
    seed: int,
    show: Callable[[int, dict[str, float]], None],
) -> dict[str, float]:
    """``steps`` supervised updates on batches drawn epoch by epoch; returns the last metrics.

    Args:
        engine: learns through ``imitate``.
        demonstrations: at least one.
        steps: updates.
        batch_size: demonstrations per update.
        seed: of the order in which they are met.
        show: told the step (from 1) and its metrics.
    """
    rng = np.random.default_rng(seed)
    order: list[int] = []
    metrics: dict[str, float] = {}
    for step in range(1, steps + 1):
        while len(order) < batch_size:
            order += rng.permutation(len(demonstrations)).tolist()
        batch, order = order[:batch_size], order[batch_size:]
        metrics = engine.imitate([demonstrations[i] for i in batch])
        show(step, metrics)
    return metrics


def with_observations(demonstration: Demonstration) -> Demonstration:
    """The demonstration with every piece trained, observations included."""
    pieces = tuple(replace(piece, trained=True) for piece in demonstration.pieces)
    return replace(demonstration, pieces=pieces)


def check_model_output(output: Path) -> None:
    """Raise RunError unless a model can be put there; ask before the work whose result it is.

    A model directory may be there and would be replaced, anything else may not.
    """
    if output.exists() and not (output / "config.json").is_file():
        raise RunError(f"{output} exists and is no model directory: set another output")
    check_above(output)
