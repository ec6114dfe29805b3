"""Means over the trained tokens and the optimiser steps of one update."""

from collections import defaultdict

import numpy as np
from torch import Tensor

from graphpo_agent.graph.arrays import Float32Array, FloatArray

__all__ = ["MetricSums", "mismatch"]


class MetricSums:
    """Sums that become means.

    Example::

        sums = MetricSums()
        sums.add_tokens(loss, entropy=entropies)    # for every flat row of every minibatch
        sums.add_step(grad_norm, learning_rate)     # for every optimiser step
        sums.means("update")    # {"update/loss": …, "update/entropy": …, "update/grad_norm": …, …}
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._steps = 0
        self._over_tokens: defaultdict[str, float] = defaultdict(float)
        self._over_steps: defaultdict[str, float] = defaultdict(float)

    def add_tokens(self, loss: Tensor, **values: Tensor) -> None:
        """Add one row: its share [] of the minibatch's loss, and named values [M] of its tokens."""
        self._over_steps["loss"] += float(loss.detach())
        for name, value in values.items():
            self._over_tokens[name] += float(value.detach().double().sum())
        self._tokens += len(next(iter(values.values())))

    def add_step(self, grad_norm: float, learning_rate: float) -> None:
        """End a minibatch."""
        self._over_steps["grad_norm"] += grad_norm
        self._over_steps["learning_rate"] += learning_rate
        self._steps += 1

    def means(self, prefix: str) -> dict[str, float]:
        """``prefix/name`` → mean over tokens, or over optimiser steps for loss, norm and rate."""
        steps = {f"{prefix}/{k}": total / self._steps for k, total in self._over_steps.items()}
        tokens = {f"{prefix}/{k}": total / self._tokens for k, total in self._over_tokens.items()}
        return steps | tokens


def mismatch(recorded: Float32Array, recomputed: FloatArray) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the trainer's, where both are known.

    Args:
        recorded: [M] what the sampler recorded.
        recomputed: [M] those of the trainer; NaN where there is none of either.
    """
    log_ratio = recomputed.astype(np.float64) - recorded
    log_ratio = log_ratio[~np.isnan(log_ratio)]
    if not len(log_ratio):
        return {}
    kl = np.exp(log_ratio) - 1.0 - log_ratio
    return {
        "update/mismatch": float(np.abs(log_ratio).mean()),
        "update/mismatch_kl": float(kl.mean()),
    }
