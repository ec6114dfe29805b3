"""What linear attention layers need to know of a flat row of an update.

The row falls into runs of tokens without a branch, and the runs into levels: the state behind a run
is where its children on the next level start. All runs of a level that are of similar length are
computed together, and each token of the row once.

Shapes: N tokens of the row, C channels and W tokens of a convolution, E runs of a group, H heads,
K key dimension, V value dimension.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphpo_agent.engines.local.arrays import levels, to_device
from graphpo_agent.engines.local.linear_attention import conv_width
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.engines.local.recurrence import RunGroup, convolved, row_order, run_groups
from graphpo_agent.graph.arrays import IntArray

__all__ = ["FlatRecurrence", "recurrence_of"]


@dataclass(frozen=True, slots=True)
class FlatRecurrence:
    """A row's ``recurrence.Recurrence``.

    Example: a prompt at 0 and 1, and behind it the edges at 2 to 3 and at 4: the first level is the
    run 0, the second one group of two runs, which both begin with the state behind run 0.

    Attributes:
        taps: [N, W - 1] for each token the places of those before it on its path, nearest first;
            N where there is none.
        levels: of each level the groups, and for each of them [E] which of the states behind the
            level above, group after group, its runs begin with; on the first level there is one,
            of zeros.
        order: [N] for every token of the row its place among the groups' tokens, flattened.
    """

    taps: Tensor
    levels: tuple[tuple[tuple[RunGroup, Tensor], ...], ...]
    order: Tensor

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """[N, C]; see ``recurrence.Recurrence``."""
        nothing = inputs.new_zeros(1, inputs.shape[1])
        return convolved(torch.cat([inputs, nothing]), self.taps, weight)

    def recall(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        """[N, H, V]; see ``recurrence.Recurrence``."""
        states = value.new_zeros(1, *query.shape[1:], value.shape[2])
        outputs: list[Tensor] = []
        for level in self.levels:
            behind: list[Tensor] = []
            for group, begins in level:
                before = states.index_select(0, begins)
                out, after = group.recall(query, key, value, log_decay, beta, before)
                outputs.append(out)
                behind.append(after)
            states = torch.cat(behind)
        return torch.cat(outputs).index_select(0, self.order)


def recurrence_of(
    model: PreTrainedModel, batch: PackedBatch, device: torch.device
) -> FlatRecurrence | None:
    """Of a row, for the linear layers of a model; None where it has none."""
    width = conv_width(model.config.get_text_config())
    if not width:
        return None
    previous, num_tokens = batch.previous, len(batch.previous)
    followers = np.bincount(previous[previous >= 0], minlength=num_tokens)
    goes_on = (previous >= 0) & (previous == np.arange(-1, num_tokens - 1))
    goes_on &= followers[previous] == 1
    starts, run_of = np.flatnonzero(~goes_on), np.cumsum(~goes_on) - 1
    lengths = np.diff(starts, append=num_tokens)
    parent = np.where(previous[starts] >= 0, run_of[previous[starts]], -1)
    made: list[tuple[tuple[RunGroup, Tensor], ...]] = []
    states = np.zeros(len(starts), np.int64)  # which of its level's each run leaves behind
    for level in levels(parent):
        begins = np.where(parent >= 0, states[parent], 0)
        groups = list(run_groups(starts, lengths, level, device))
        members = np.concatenate([group.members for group in groups])
        states[members] = np.arange(len(members))
        made.append(tuple((group, to_device(begins[group.members], device)) for group in groups))
    order = row_order([group for level in made for group, _ in level], starts, lengths)
    return FlatRecurrence(
        to_device(_taps(previous, width), device), tuple(made), to_device(order, device)
    )


def _taps(previous: IntArray, width: int) -> IntArray:
    """[N, width - 1] places of the tokens before each, nearest first; N where there is none."""
    num_tokens = len(previous)
    before = np.append(np.where(previous >= 0, previous, num_tokens), num_tokens)
    taps = np.empty((num_tokens, width - 1), np.int64)
    column = np.arange(num_tokens)
    for distance in range(width - 1):
        column = before[column]
        taps[:, distance] = column
    return taps
