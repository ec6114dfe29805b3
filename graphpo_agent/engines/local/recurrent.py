"""What layers that read from states have in common.

Shapes: N tokens of a row, C channels of the convolution, W tokens that it spans, H value heads,
K key dimension, V value dimension.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["Recurrence", "RecurrentSizes"]


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
