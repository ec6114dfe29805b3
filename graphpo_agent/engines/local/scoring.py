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
    """

    scaling: float
    window: int | None = None
    sinks: Tensor | None = None
