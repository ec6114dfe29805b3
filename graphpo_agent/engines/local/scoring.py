"""How an attention layer weighs the tokens that it attends to.

Shapes: H query heads.
"""

from dataclasses import dataclass

__all__ = ["Scoring"]


@dataclass(frozen=True, slots=True)
class Scoring:
    """Of one layer.

    Attributes:
        scaling: factor on the dot products.
        window: tokens that are attended to at most, a token itself included; None: all before it.
    """

    scaling: float
    window: int | None = None
