"""What a batch of continuations has drawn so far, and which of them have ended.

Everything is per batch and per step; Python looks at a single row only where a drawn token can
complete a stop string.

Shapes: R continuations, N most new tokens of any of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.engines.local.drawing import StopFinder, uniforms
from graphpo_agent.types import FinishReason

__all__ = ["Continuation", "Transcript"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """One row of a decode batch: a request whose prefix is computed.

    Example: a prompt of 12 tokens that may be continued by 20, in a context of at most 4096::

        Continuation(node=0, num_tokens=12, seed=7, max_new_tokens=20, stop=("</search>",),
                     min_new_tokens=0)
    """

    node: int
    num_tokens: int
    seed: int
    max_new_tokens: int
    """At least 1, and never beyond the context limit."""
    stop: tuple[str, ...]
    min_new_tokens: int


class Transcript:
    """The drawn tokens of R continuations.

    Attributes:
        token_ids: [R, N]; row r is meaningful up to ``lengths[r]``.
        logprobs: [R, N] likewise.
        lengths: [R] tokens drawn; 0 while the continuation runs.
    """

    def __init__(
        self, rows: Sequence[Continuation], eos_ids: frozenset[int], stops: StopFinder
    ) -> None:
        """Args: the continuations, the tokens that end any, and who finds stop strings."""
        self._limits = np.array([row.max_new_tokens for row in rows])
        self._min_new_tokens = np.array([row.min_new_tokens for row in rows])
        self._eos = np.array(sorted(eos_ids))
        self._stops = stops
        self._stop_strings = [row.stop for row in rows]
        kinds = sorted(set(self._stop_strings))
        self._stop_kind = np.array([kinds.index(stop) for stop in self._stop_strings])
        self._can_stop = np.stack([stops.table(stop) for stop in kinds])
        shape = (len(rows), int(self._limits.max()))
        self.uniforms = np.zeros(shape)
        for r, row in enumerate(rows):
            self.uniforms[r, : row.max_new_tokens] = uniforms(row.seed, row.max_new_tokens)
        self.token_ids = np.zeros(shape, np.int64)
        self.logprobs = np.zeros(shape)
        self.lengths = np.zeros(len(rows), np.int64)
        self._reasons: list[FinishReason] = ["length"] * len(rows)

    def record(
        self,
        step: int,
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        logprobs: NDArray[np.float64],
    ) -> NDArray[np.bool_]:
        """Take the ``step``-th token of ``rows``; return which of them have ended by now."""
        self.token_ids[rows, step] = token_ids
        self.logprobs[rows, step] = logprobs
        running = self.lengths[rows] == 0
        is_eos = running & np.isin(token_ids, self._eos)
        is_stop = running & ~is_eos & self._stopped(rows, token_ids, running, step)
        self._end(rows[is_eos], "eos", step)
        self._end(rows[is_stop], "stop", step)
        full = running & (self._limits[rows] == step + 1) & ~is_eos & ~is_stop
        self._end(rows[full], "length", step)
        return self.lengths[rows] > 0

    def reason(self, row: int) -> FinishReason:
        """Why a continuation ended."""
        return self._reasons[row]

    def _end(self, rows: NDArray[np.int64], reason: FinishReason, step: int) -> None:
        self.lengths[rows] = step + 1
        for r in rows:
            self._reasons[r] = reason

    def _stopped(
        self,
        rows: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        running: NDArray[np.bool_],
        step: int,
    ) -> NDArray[np.bool_]:
        """Whether the token completes a stop string at or after the least number of tokens."""
        possible = running & self._can_stop[self._stop_kind[rows], token_ids]
        possible &= step + 1 >= self._min_new_tokens[rows]
        for b in np.flatnonzero(possible):
            row = int(rows[b])
            drawn = self.token_ids[row, : step + 1].tolist()
            possible[b] = self._stops.completes(drawn, self._stop_strings[row])
        return possible
