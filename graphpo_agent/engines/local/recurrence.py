"""What layers that read from states know of what comes before: runs of tokens behind states.

Shapes: N tokens of a row, C channels of a convolution, W tokens that it spans, E runs of a group,
L tokens of the longest, H value heads, K key dimension, V value dimension.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.local.arrays import ranges, to_device
from graphpo_agent.engines.local.delta_rule import gated_delta_rule
from graphpo_agent.graph.arrays import IntArray

__all__ = [
    "Recurrence",
    "RecurrentSizes",
    "RunGroup",
    "convolved",
    "row_order",
    "run_groups",
]

_SHORT = 16
"""Runs of up to so many tokens are computed together however short they are."""


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """Of a model's layers that read from states; all are alike.

    Attributes:
        width: W.
        channels: C.
        heads: H.
        key_dim: K.
        value_dim: V.
    """

    width: int
    channels: int
    heads: int
    key_dim: int
    value_dim: int


class Recurrence(Protocol):
    """Knows what comes before the tokens of a pass in every such layer; layers come in turn."""

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Each token's inputs and those of the W - 1 before it on its path, weighted and added.

        Args:
            inputs: [N, C].
            weight: [C, W], the token's own last.

        Returns:
            [N, C].
        """
        ...

    def recall(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        """[N, H, V] what the tokens read from the states that their paths have written.

        Args:
            query: [N, H, K].
            key: [N, H, K].
            value: [N, H, V].
            log_decay: [N, H].
            beta: [N, H]; None: what a state holds for a key stays beside what is written.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of similar length, none of them behind another.

    Example: runs of two tokens and one, at 2 and at 4 of a row::

        tokens = [[2, 3], [4, 4]]
        own    = [[True, True], [True, False]]

    Attributes:
        members: [E] their numbers.
        tokens: [E, L] places in the row, those of a shorter run padded with its last.
        own: [E, L] which of them count.
    """

    members: IntArray
    tokens: Tensor
    own: Tensor

    def recall(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        states: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What the runs' tokens read, and the states behind them.

        Args:
            query: [N, H, K] of the row, as ``Recurrence`` has all of these.
            key: [N, H, K].
            value: [N, H, V].
            log_decay: [N, H].
            beta: [N, H], or None.
            states: [E, H, K, V] before the runs.

        Returns:
            [E * L, H, V] and [E, H, K, V].
        """
        own = self.own[:, None]
        query, key, value, log_decay = map(self._of_runs, (query, key, value, log_decay))
        beta = None if beta is None else self._of_runs(beta)
        key, log_decay = key * own[..., None], log_decay * own
        out, after = gated_delta_rule(query, key, value, log_decay, beta, states)
        return out.transpose(1, 2).flatten(0, 1), after

    def _of_runs(self, of_row: Tensor) -> Tensor:
        """[E, H, L, ...] of [N, H, ...]."""
        taken = of_row.index_select(0, self.tokens.flatten())
        return taken.unflatten(0, self.tokens.shape).transpose(1, 2)


def run_groups(
    starts: IntArray, lengths: IntArray, members: IntArray, device: torch.device
) -> Iterator[RunGroup]:
    """Groups of some runs; single tokens are apart.

    Args:
        starts: [runs] where in the row each begins.
        lengths: [runs] tokens of each.
        members: which of the runs.
        device: of the groups.
    """
    own = lengths[members]
    label = np.where(own == 1, 0.0, np.ceil(np.log2(np.maximum(own, _SHORT))))
    for number in np.unique(label):
        group = members[label == number]
        columns = np.arange(lengths[group].max())
        last = lengths[group][:, None] - 1
        tokens = starts[group][:, None] + np.minimum(columns, last)
        yield RunGroup(group, to_device(tokens, device), to_device(columns <= last, device))


def row_order(groups: Sequence[RunGroup], starts: IntArray, lengths: IntArray) -> IntArray:
    """[N] for every token of a row its place among the groups' tokens, flattened.

    Args:
        groups: of all its runs.
        starts: [runs] where in the row each begins.
        lengths: [runs] tokens of each.
    """
    order = np.empty(int(lengths.sum()), np.int64)
    done = 0
    for group in groups:
        count, longest = group.tokens.shape
        own, within = lengths[group.members], ranges(lengths[group.members])
        first = done + np.arange(count) * longest
        order[np.repeat(starts[group.members], own) + within] = np.repeat(first, own) + within
        done += count * longest
    return order


def convolved(inputs: Tensor, taps: Tensor, weight: Tensor) -> Tensor:
    """[N, C] weighted sums of the tokens' inputs and of those before them.

    Args:
        inputs: [at least N, C]; the first N are the tokens' own.
        taps: [N, W - 1] places among ``inputs`` of what comes before each token, nearest first.
        weight: [C, W], the token's own last.
    """
    precise = inputs.to(torch.promote_types(inputs.dtype, torch.float32))  # rounded once
    *earlier, own = weight.to(precise.dtype).unbind(1)
    out = precise[: len(taps)] * own
    for places, factor in zip(taps.unbind(1), reversed(earlier), strict=True):
        out = torch.addcmul(out, precise.index_select(0, places), factor)
    return out.to(inputs.dtype)
