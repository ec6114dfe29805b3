"""How an attention layer weighs the tokens that it attends to.

Shapes: H query heads.
"""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Scoring"]


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Of one layer.

    Attributes:
        scaling: factor on the dot products.
        window: tokens that are attended to at most, a token itself included; None: all before it.
        sinks: [H] scores of an attention sink, which takes its share of the weights and gives
            nothing for it; None: there is none.
        cap: what no score s goes beyond, either way: it is ``cap * tanh(s / cap)``; None: no bound.
    """

    scaling: float
    window: int | None = None
    sinks: Tensor | None = None
    cap: float | None = None

    def bounded(self, scores: Tensor) -> Tensor:
        """Scores with the bound; -inf becomes the least of them and has to be set again."""
        return scores if self.cap is None else (scores / self.cap).tanh() * self.cap
