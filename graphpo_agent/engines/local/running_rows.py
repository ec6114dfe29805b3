"""The rows of the continuations that are being drawn: what the sampler asks of them.

A row is one continuation's path as attention sees it. Where its keys and values lie is the rows'
own affair: ``PagedRows`` leave them in the pool, ``Shelves`` copy them to where a pass reads them
in one go.

Shapes: R rows in use, H query heads, K key/value heads, D dimensions of a key, Dv of a
value.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.graph.arrays import BoolArray, IntArray

__all__ = ["AttendingRows", "RunningRows"]


class AttendingRows(Protocol):
    """Rows as the attention layers of one forward pass see them."""

    @property
    def num_looking(self) -> int:
        """R: rows of the pass, those not in use included where it is padded."""
        ...

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
    ) -> Tensor:
        """Attention of every row's new token to its row, its own key and value written first.

        Args:
            layer: whose turn it is.
            queries: [R, H, D] of the new tokens.
            keys: [R, K, D].
            values: [R, K, Dv].
            scoring: the layer's.

        Returns:
            [R, H, Dv].
        """
        ...


class RunningRows(AttendingRows, Protocol):
    """The rows of a sampler."""

    @property
    def members(self) -> IntArray:
        """[R] which continuation each row belongs to, in the order of a pass."""
        ...

    @property
    def lengths(self) -> IntArray:
        """[R] tokens whose keys and values each row holds; of a pass, those it computes too."""
        ...

    def columns(self, num_tokens: int, max_new_tokens: int) -> int:
        """Tokens for which a row takes memory: a context of ``num_tokens``, what may follow it."""
        ...

    def add(self, members: IntArray, prefixes: Sequence[IntArray], columns: IntArray) -> None:
        """One row more for each member, holding the tokens at its prefix's pool slots.

        Args:
            members: [A].
            prefixes: pool slots of each.
            columns: [A] what ``columns`` said of each.
        """
        ...

    def begin(self) -> None:
        """A pass begins: one token more in every row."""
        ...

    def look(self) -> None:
        """Prepare for the attention layers of the pass."""
        ...

    def end(self, ended: BoolArray) -> list[IntArray]:
        """Give up rows; ``ended`` is [R].

        Returns:
            For each of them, in order, the pool slots of the tokens behind its prefix.
        """
        ...

    def clear(self) -> None:
        """Give up all rows and what they hold."""
        ...
