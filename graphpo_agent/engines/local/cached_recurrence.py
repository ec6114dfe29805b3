"""What linear attention layers need to know of one pass of the sampler.

The pass falls into chains: the new token of every running row, and the next tokens of every run. A
chain begins with a state in the pool; it is cut where a node ends, whose state stays in the pool
for what may follow it.

Shapes: N tokens of the pass, R of them of rows, E ends (of rows and stretches), C channels and W
tokens of a convolution, H heads, V value dimension.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.cached_pass import Piece
from graphpo_agent.engines.local.recurrence import convolved, row_order, run_groups
from graphpo_agent.engines.local.state_pool import StatePool
from graphpo_agent.graph.arrays import IntArray

__all__ = ["CachedRecurrence", "RowStates"]


class RowStates:
    """Which state each running continuation reads next, and which it writes.

    Example: one that starts behind a node whose state is in slot 4 reads it once, and from then on
    what it has written to slot 9.
    """

    def __init__(self, pool: StatePool) -> None:
        """Args: where the states are."""
        self._pool = pool
        self._read = self._write = np.zeros(0, np.int64)

    def add(self, places: IntArray, states: Sequence[int]) -> None:
        """Continuations at some places start from their nodes' states."""
        missing = int(places.max()) + 1 - len(self._read)
        if missing > 0:
            more = np.zeros(max(16, missing, len(self._read)), np.int64)
            self._read = np.concatenate([self._read, more])
            self._write = np.concatenate([self._write, more])
        self._read[places], self._write[places] = states, 0

    def begin(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """[R] slots that the next pass reads and [R] that it writes."""
        new = places[self._write[places] == 0]
        self._write[new] = self._pool.allocate(len(new))
        read, write = self._read[places], self._write[places]
        self._read[places] = write
        return read, write

    def own(self, place: int) -> int:
        """The slot of what a continuation has written; 0: nothing."""
        return int(self._write[place])


class _Stretch(NamedTuple):
    """Tokens ``start`` up to ``end`` of a pass between two states in the pool.

    ``level``: how many stretches of its chain come before it.
    """

    start: int
    end: int
    reads: int
    writes: int
    level: int


class CachedRecurrence:
    """A pass's ``recurrence.Recurrence``.

    Example: two running rows and a prompt of five tokens, an observation of three behind it: N is
    10, there are three chains, and the last has two stretches, one behind the other.
    """

    def __init__(
        self, pool: StatePool, reads: IntArray, writes: IntArray, pieces: Sequence[Piece]
    ) -> None:
        """Set up.

        Args:
            pool: where the states are.
            reads: [R] slots of the rows' states.
            writes: [R] slots where they go.
            pieces: of the runs, in the order of the pass, whose first R tokens are the rows'.
        """
        self._pool = pool
        device, count = pool.device, len(reads)
        chains = _chains(pieces, count)
        own, zero = np.arange(count), np.zeros(count, np.int64)
        rows = np.stack([own, own + 1, reads, writes, zero], axis=1)
        stretches = [one for chain in chains for one in chain]
        together = np.concatenate([rows, np.array(stretches, np.int64).reshape(-1, 5)])
        starts, ends, all_reads, all_writes, level = together.T
        lengths = ends - starts
        groups = [
            group
            for number in range(level.max() + 1)
            for group in run_groups(starts, lengths, np.flatnonzero(level == number), device)
        ]
        self._groups = [
            (group, *(to_device(x[group.members], device) for x in (all_reads, all_writes)))
            for group in groups
        ]
        self._order = to_device(row_order(groups, starts, lengths), device)
        begins = [*reads, *(chain[0].reads for chain in chains)]
        self._begins = to_device(np.array(begins, np.int64), device)
        taps, kept = _past(count, chains, pool.width)
        # A slot inside a node that goes on is written twice: the last one counts.
        slots, last = np.unique(all_writes[::-1], return_index=True)
        self._ends, self._kept = to_device(slots, device), to_device(kept[::-1][last], device)
        self._taps = to_device(taps, device)
        self._layer = -1

    def convolve(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """[N, C]; see ``recurrence.Recurrence``."""
        self._layer += 1
        held = self._pool.inputs(self._layer)
        before = held.index_select(0, self._begins).flatten(0, 1)
        known = torch.cat([inputs, before])
        held.index_copy_(0, self._ends, known[self._kept])
        return convolved(known, self._taps, weight)

    def recall(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        """[N, H, V]; see ``recurrence.Recurrence``."""
        memories = self._pool.memories(self._layer)
        outputs: list[Tensor] = []
        for group, reads, writes in self._groups:
            before = memories.index_select(0, reads)
            out, after = group.recall(query, key, value, log_decay, beta, before)
            memories.index_copy_(0, writes, after)
            outputs.append(out)
        return torch.cat(outputs).index_select(0, self._order)


def _chains(pieces: Sequence[Piece], first: int) -> list[list[_Stretch]]:
    """The stretches of every run of some pieces, the first of which begins at ``first``."""
    of_run: dict[int, list[tuple[Piece, int]]] = {}
    for piece in pieces:
        of_run.setdefault(id(piece.run), []).append((piece, first - piece.start))
        first += piece.num_queries
    chains: list[list[_Stretch]] = []
    for own in of_run.values():
        chain: list[_Stretch] = []
        for piece, shift in sorted(own, key=lambda one: one[0].start):
            run, start = piece.run, piece.start
            for end in [*(end for end in run.ends if start < end < piece.end), piece.end]:
                slots = run.memory_at(start), run.memory_at(end)
                chain.append(_Stretch(start + shift, end + shift, *slots, len(chain)))
                start = end
        chains.append(chain)
    return chains


def _past(
    num_rows: int, chains: Sequence[Sequence[_Stretch]], width: int
) -> tuple[IntArray, IntArray]:
    """Places among the inputs of a pass, and behind them those that rows and chains begin with.

    Returns:
        [N, W - 1] what comes before each token, nearest first, and [E, W - 1] what is kept where
        a row or a stretch ends.
    """
    num_tokens = num_rows + sum(one.end - one.start for chain in chains for one in chain)
    begins = np.arange(num_rows + len(chains))[:, None] * (width - 1) + np.arange(width - 1)
    begins += num_tokens
    rows = np.concatenate([begins[:num_rows], np.arange(num_rows)[:, None]], axis=1)
    taps = np.empty((num_tokens, width - 1), np.int64)
    taps[:num_rows] = rows[:, -2::-1]
    kept = [rows[:, 1:]]
    for begin, chain in zip(begins[num_rows:], chains, strict=True):
        own = np.concatenate([np.arange(one.start, one.end) for one in chain])
        windows = sliding_window_view(np.concatenate([begin, own]), width - 1)
        taps[own] = windows[:-1, ::-1]
        kept.append(windows[np.cumsum([one.end - one.start for one in chain])])
    return taps, np.concatenate(kept)
