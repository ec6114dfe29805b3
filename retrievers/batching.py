"""Waiting requests searched together: one call of the retriever for several of them.

An encoder costs little more for thirty queries than for one. Nothing is delayed for it: a free
worker takes what waits at that moment, so batches grow only while all workers are busy.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphpo_agent.types import Document

__all__ = ["Batcher"]

Search = Callable[[Sequence[str], int], list[list[Document]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A part of one request, small enough for a batch; ``answer`` gets one list per query."""

    queries: Sequence[str]
    topk: int
    answer: "asyncio.Future[list[list[Document]]]"


class Batcher:
    """Threads that search for the coroutines of one event loop.

    Example::

        batcher = Batcher(retriever.search, workers=2, max_batch=64, observe=print)
        [documents] = await batcher.search(["Karo Venner"], topk=3)
    """

    def __init__(
        self, search: Search, *, workers: int, max_batch: int, observe: Callable[[int], object]
    ) -> None:
        """Start the workers.

        Args:
            search: a retriever's; called from ``workers`` threads at once.
            workers: batches searched at once.
            max_batch: queries in one call at most; longer requests are searched in parts.
            observe: told the number of queries of every batch.
        """
        self._search = search
        self._max_batch = max_batch
        self._observe = observe
        self._waiting: deque[_Piece] = deque()
        self._changed = threading.Condition()
        self._open = True
        for number in range(workers):
            threading.Thread(target=self._work, name=f"search-{number}", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Queries that no worker has begun."""
        with self._changed:
            return sum(len(piece.queries) for piece in self._waiting)

    async def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """The documents of each query, in order; raises what the retriever raised.

        A search whose coroutine is cancelled before a worker begins it is never made.
        """
        loop = asyncio.get_running_loop()
        pieces = [
            _Piece(queries[start : start + self._max_batch], topk, loop.create_future())
            for start in range(0, len(queries), self._max_batch)
        ]
        with self._changed:
            self._waiting.extend(pieces)
            self._changed.notify(len(pieces))
        found = await asyncio.gather(*(piece.answer for piece in pieces))
        return [documents for each in found for documents in each]

    def close(self) -> None:
        """End the workers; one that is searching ends when that search does, unheard."""
        with self._changed:
            self._open = False
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while batch := self._next_batch():
            self._observe(sum(len(piece.queries) for piece in batch))
            self._answer(batch)

    def _next_batch(self) -> list[_Piece]:
        """Pieces with one ``topk``, in order of arrival; empty: the end."""
        with self._changed:
            while True:
                while self._open and not self._waiting:
                    self._changed.wait()
                if not self._open:
                    return []
                if batch := self._take():
                    return batch

    def _take(self) -> list[_Piece]:
        batch: list[_Piece] = []
        room = self._max_batch
        while self._waiting:
            piece = self._waiting[0]
            if not piece.answer.done():  # else nobody waits for it any more
                if len(piece.queries) > room or (batch and piece.topk != batch[0].topk):
                    break
                room -= len(piece.queries)
                batch.append(piece)
            self._waiting.popleft()
        return batch

    def _answer(self, batch: list[_Piece]) -> None:
        """Search; pieces that fail together are searched alone, so that none spoils another."""
        unique = list(dict.fromkeys(query for piece in batch for query in piece.queries))
        try:
            found = dict(zip(unique, self._search(unique, batch[0].topk), strict=True))
        except Exception as error:
            if len(batch) == 1:
                self._deliver([(batch[0].answer, error)])
            else:
                for piece in batch:
                    self._answer([piece])
            return
        self._deliver([(p.answer, [found[query] for query in p.queries]) for p in batch])

    def _deliver(
        self,
        answers: Sequence[
            "tuple[asyncio.Future[list[list[Document]]], list[list[Document]] | Exception]"
        ],
    ) -> None:
        with self._changed:  # not while the loop is being closed
            if self._open:
                answers[0][0].get_loop().call_soon_threadsafe(_set_all, answers)


def _set_all(
    answers: Sequence[
        "tuple[asyncio.Future[list[list[Document]]], list[list[Document]] | Exception]"
    ],
) -> None:
    for future, outcome in answers:
        if future.done():
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
