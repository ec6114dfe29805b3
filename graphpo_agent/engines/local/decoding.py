"""What the running continuations have drawn so far, and which of them have ended.

Everything is per tick, over all of them; Python looks at a single continuation only when it starts,
when it ends, and where a drawn token can complete a stop string.

Shapes: R continuations that draw a token, G of all there is room for, W tokens a continuation has
room for, U random numbers drawn ahead.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.engines.local.compiled import compiled
from graphpo_agent.engines.local.drawing import StopFinder, UniformNumbers
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.types import FinishReason, SamplingParams

__all__ = ["Continuation", "Drawn", "Running"]

_DRAWN_AHEAD = 64
_EOS, _LENGTH, _MAY_STOP = 1, 2, 4
_REASONS: tuple[FinishReason | None, ...] = (None, "eos", "length")


@dataclass(frozen=True, slots=True)
class Continuation:
    """One request, as the sampler works on it.

    Example: a prompt of 12 tokens that may be continued by 20, in a context of at most 4096::

        Continuation(ticket=3, node=0, num_tokens=12, seed=7, max_new_tokens=20,
                     stop=("</search>",), min_new_tokens=0, sampling=SamplingParams())
    """

    ticket: int
    node: int
    num_tokens: int
    seed: int
    max_new_tokens: int
    """Never beyond the context limit; 0 where the context is full."""
    stop: tuple[str, ...]
    min_new_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Drawn:
    """What an ended continuation has drawn."""

    continuation: Continuation
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: FinishReason


class Running:
    """The continuations that are being drawn, each at a place of its own.

    Attributes:
        counts: [G] tokens drawn so far.
        last: [G] the token drawn last.
        starts: [G] tokens of the context before the first drawn one.
        kinds: [G] index into ``samplings``.
        ended: [G] whether the continuation at a place has ended.
        samplings: the ways of drawing that any continuation has asked for.
    """

    def __init__(self, eos_ids: frozenset[int], stops: StopFinder) -> None:
        """Args: the tokens that end any continuation, and who finds stop strings."""
        self._is_eos = np.zeros(stops.vocab_size, np.bool_)
        self._is_eos[[token for token in eos_ids if token < stops.vocab_size]] = True
        self._stops = stops
        self._numbers = UniformNumbers()
        self.samplings: list[SamplingParams] = []
        self._stop_strings: list[tuple[str, ...]] = []
        self._can_stop = np.zeros((0, 0), np.bool_)
        self._places: list[Continuation | None] = []
        self._reasons: list[FinishReason] = []
        self._free: list[int] = []
        self.counts = self.last = self.starts = self.kinds = np.zeros(0, np.int64)
        self._limits = self._min_new_tokens = self._stop_kinds = np.zeros(0, np.int64)
        self.ended = np.zeros(0, np.bool_)
        self._uniforms = np.zeros((0, _DRAWN_AHEAD))
        self._token_ids = np.zeros((0, _DRAWN_AHEAD), np.int64)
        self._logprobs = np.zeros((0, _DRAWN_AHEAD))

    def add(self, continuation: Continuation) -> int:
        """Start a continuation; returns its place."""
        if not self._free:
            self._grow_places()
        place = self._free.pop()
        self._places[place] = continuation
        self.counts[place] = 0
        self.starts[place] = continuation.num_tokens
        self.kinds[place] = _index(self.samplings, continuation.sampling)
        self._limits[place] = continuation.max_new_tokens
        self._min_new_tokens[place] = continuation.min_new_tokens
        self._stop_kinds[place] = self._stop_kind(continuation.stop)
        self.ended[place] = False
        return place

    def uniforms(self, places: IntArray) -> FloatArray:
        """[R] the next random number of each continuation."""
        ahead = self.counts[places] % _DRAWN_AHEAD
        if not ahead.all():
            for place in places[ahead == 0].tolist():
                seed, start = self._at(place).seed, int(self.counts[place])
                self._uniforms[place] = self._numbers.take(seed, start, _DRAWN_AHEAD)
        return self._uniforms[places, ahead]

    def record(self, places: IntArray, token_ids: IntArray, logprobs: FloatArray) -> bool:
        """Take the next token of each of R continuations; whether any has ended."""
        verdicts = np.empty(len(places), np.int64)
        most = _record(
            places,
            token_ids,
            logprobs,
            self.counts,
            self.last,
            self._token_ids,
            self._logprobs,
            verdicts,
            self._is_eos,
            self._can_stop,
            self._stop_kinds,
            self._min_new_tokens,
            self._limits,
        )
        if most == self._token_ids.shape[1]:
            self._token_ids = _wider(self._token_ids)
            self._logprobs = _wider(self._logprobs)
        judged, any_ended = verdicts.nonzero()[0], False
        for place, verdict in zip(places[judged].tolist(), verdicts[judged].tolist(), strict=True):
            reason = _REASONS[verdict & ~_MAY_STOP]
            if verdict & _MAY_STOP and self._stopped(place):
                reason = "stop"
            if reason is not None:
                self.ended[place], self._reasons[place], any_ended = True, reason, True
        return any_ended

    def take(self, place: int) -> Drawn:
        """What the ended continuation at a place has drawn; its place becomes free."""
        continuation, count = self._at(place), int(self.counts[place])
        self._places[place] = None
        self._free.append(place)
        return Drawn(
            continuation,
            tuple(self._token_ids[place, :count].tolist()),
            tuple(self._logprobs[place, :count].tolist()),
            self._reasons[place],
        )

    def _at(self, place: int) -> Continuation:
        continuation = self._places[place]
        assert continuation is not None, "the place is taken"
        return continuation

    def _stopped(self, place: int) -> bool:
        """Whether the token drawn last completes a stop string."""
        drawn = self._token_ids[place, : self.counts[place]].tolist()
        return self._stops.completes(drawn, self._stop_strings[self._stop_kinds[place]])

    def _stop_kind(self, stop: tuple[str, ...]) -> int:
        kind = _index(self._stop_strings, stop)
        if kind == len(self._can_stop):
            table = self._stops.table(stop)[None]
            self._can_stop = table if kind == 0 else np.concatenate([self._can_stop, table])
        return kind

    def _grow_places(self) -> None:
        """Twice as many places."""
        held = len(self._places)
        added = max(held, 16)
        self._places += [None] * added
        self._reasons = [*self._reasons, *("length" for _ in range(added))]
        self._free += range(held + added - 1, held - 1, -1)
        self.counts = _longer(self.counts, added)
        self.last = _longer(self.last, added)
        self.starts = _longer(self.starts, added)
        self.kinds = _longer(self.kinds, added)
        self.ended = _longer(self.ended, added)
        self._limits = _longer(self._limits, added)
        self._min_new_tokens = _longer(self._min_new_tokens, added)
        self._stop_kinds = _longer(self._stop_kinds, added)
        self._uniforms = _longer(self._uniforms, added)
        self._token_ids = _longer(self._token_ids, added)
        self._logprobs = _longer(self._logprobs, added)


@compiled()
def _record(
    places: IntArray,
    token_ids: IntArray,
    logprobs: FloatArray,
    counts: IntArray,
    last: IntArray,
    drawn_ids: IntArray,
    drawn_logprobs: FloatArray,
    verdicts: IntArray,
    is_eos: BoolArray,
    can_stop: BoolArray,
    stop_kinds: IntArray,
    min_new_tokens: IntArray,
    limits: IntArray,
) -> int:
    """Write down the next token of each continuation and what it may mean for it.

    Args:
        places: [R].
        token_ids: [R].
        logprobs: [R].
        counts: [G], raised by one.
        last: [G], written.
        drawn_ids: [G, W], written; W is more than any of ``counts``.
        drawn_logprobs: [G, W], written.
        verdicts: [R], written: 0 where it goes on, ``_EOS``, or ``_LENGTH`` and ``_MAY_STOP``
            added up.
        is_eos: [V].
        can_stop: [stop kinds, V] whether a token can complete one of the strings.
        stop_kinds: [G].
        min_new_tokens: [G].
        limits: [G].

    Returns:
        The largest of the counts.
    """
    most = 0
    for i in range(len(places)):
        place, token = places[i], token_ids[i]
        count = int(counts[place])
        drawn_ids[place, count], drawn_logprobs[place, count] = token, logprobs[i]
        last[place] = token
        counts[place] = count + 1
        most = max(most, count + 1)
        verdict = 0
        if is_eos[token]:
            verdict = _EOS
        else:
            if count + 1 == limits[place]:
                verdict = _LENGTH
            if count + 1 >= min_new_tokens[place] and can_stop[stop_kinds[place], token]:
                verdict += _MAY_STOP
        verdicts[i] = verdict
    return most


def _index(known: list[Any], value: Any) -> int:
    """Where ``value`` stands in ``known``; it is added if it is new."""
    if value not in known:
        known.append(value)
    return known.index(value)


def _longer(array: NDArray[Any], added: int) -> NDArray[Any]:
    return np.concatenate([array, np.zeros((added, *array.shape[1:]), array.dtype)])


def _wider(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([array, np.zeros_like(array)], axis=1)
