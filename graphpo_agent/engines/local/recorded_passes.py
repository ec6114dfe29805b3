"""Decoding passes on a GPU, recorded as CUDA graphs.

A pass over one token of every row is hundreds of kernels so small that starting them takes longer
than running them. It is the same kernels on the same memory every time, as long as a shelf stays
where it is: recorded once, all of them start together. Rows and columns are padded to powers of
two, so that a few recordings serve a whole rollout. A pass that also computes prefixes is never
the same and is not recorded: where most continuations run, prefixes wait for every fourth pass.

Shapes: R rows in use, P padded rows, d hidden size.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.local.shelves import Shelf
from graphpo_agent.errors import first_line
from graphpo_agent.graph.arrays import IntArray

__all__ = ["RecordedPasses"]

DecodingPass = Callable[[Shelf, Tensor, int], Tensor]
"""``compute(shelf, inputs, num_columns)``: [P, d] hidden states of [2, P] tokens and columns."""

_FEWEST_ROWS = 8
_FEWEST_COLUMNS = 64
_LONGEST_WAIT = 3
"""Recorded passes for which prefixes wait."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """A graph, the [2, P] inputs that it reads and the [P, d] hidden states that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    hidden: Tensor


@dataclass(slots=True)
class _Place:
    """Where a shelf's rows are, and by (rows, columns) the passes that have run there.

    None: it has run once and is not recorded yet.
    """

    address: tuple[tuple[int, ...], int]
    recordings: dict[tuple[int, int], _Recording | None] = field(default_factory=dict)


class RecordedPasses:
    """Runs the passes of shelves: the first of a size as it is, from the second on recorded.

    A model whose pass cannot be recorded, such as one that looks at its numbers to decide what to
    compute, runs as it is, and a warning says so.
    """

    def __init__(self, compute: DecodingPass) -> None:
        """Args: what computes a pass, always in the same memory for the same shelf."""
        self._compute = compute
        self._places: dict[int, _Place] = {}
        self._stream: torch.cuda.Stream | None = None
        self._works = True
        self._waited = 0

    def come_first(self, num_rows: int, num_waiting: int) -> bool:
        """Whether the next pass leaves the prefixes out that continuations wait for.

        Args:
            num_rows: continuations that run.
            num_waiting: those whose prefix is still to be computed.
        """
        waits = self._works and num_rows > num_waiting > 0 and self._waited < _LONGEST_WAIT
        self._waited = self._waited + 1 if waits else 0
        return waits

    def clear(self) -> None:
        """Forget all recordings and free their memory; to be called before the weights move."""
        self._places = {}

    def hidden(self, shelf: Shelf, token_ids: IntArray) -> Tensor:
        """[R, d] hidden states of the next token of every row of a shelf that has begun.

        They are overwritten by the shelf's next pass.
        """
        num_rows = len(token_ids)
        rows = min(shelf.num_held, max(_FEWEST_ROWS, _power_of_two(num_rows)))
        longest = int(shelf.lengths.max())
        columns = min(shelf.capacity, max(_FEWEST_COLUMNS, _power_of_two(longest)))
        inputs = np.zeros((2, rows), np.int64)
        inputs[0, :num_rows], inputs[1, :num_rows] = token_ids, shelf.lengths - 1
        return self._run(shelf, torch.from_numpy(inputs), columns)[:num_rows]

    def _run(self, shelf: Shelf, inputs: Tensor, columns: int) -> Tensor:
        recordings, key = self._of(shelf), (inputs.shape[1], columns)
        if self._works and key in recordings:
            recording = recordings[key] or self._record(shelf, inputs, columns)
            if recording is not None:
                recordings[key] = recording
                recording.inputs.copy_(inputs)
                recording.graph.replay()
                return recording.hidden
        recordings[key] = None
        return self._compute(shelf, inputs.to(shelf.device), columns)

    def _of(self, shelf: Shelf) -> dict[tuple[int, int], _Recording | None]:
        """The recordings of a shelf where it is; those of where it has been are forgotten."""
        address = (shelf.address, shelf.num_held)
        place = self._places.get(shelf.capacity)
        if place is None or place.address != address:
            place = self._places[shelf.capacity] = _Place(address)
        return place.recordings

    def _record(self, shelf: Shelf, inputs: Tensor, columns: int) -> _Recording | None:
        """None where the pass cannot be recorded."""
        own = inputs.to(shelf.device)
        try:
            graph = torch.cuda.CUDAGraph()
            hidden = self._captured(graph, lambda: self._compute(shelf, own, columns), shelf.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            warnings.warn(
                "the passes of the sampler are not recorded and run slower: " + first_line(error),
                stacklevel=2,
            )
            self._works = False
            self.clear()
            return None
        return _Recording(graph, own, hidden)

    def _captured(
        self, graph: torch.cuda.CUDAGraph, compute: Callable[[], Tensor], device: torch.device
    ) -> Tensor:
        """What a graph writes; a stream of another GPU than the shelf's would record nothing."""
        with torch.cuda.device(device):
            self._stream = self._stream or torch.cuda.Stream()
            before = torch.cuda.current_stream()
            try:
                # Other threads, such as a reward model's, may use the GPU meanwhile.
                with torch.cuda.graph(
                    graph, stream=self._stream, capture_error_mode="thread_local"
                ):
                    return compute()
            finally:
                torch.cuda.set_stream(before)  # torch forgets to where the recording fails


def _power_of_two(number: int) -> int:
    """The least one that is not smaller."""
    return 1 << (number - 1).bit_length()
