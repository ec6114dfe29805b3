"""vLLM's rotation of queries and keys on a CPU, for models that keep their heads apart.

Loaded where vLLM is. Its kernel takes the next head of three-dimensional queries (LFM2) for the
next token; here it sees two dimensions, in the same memory.
"""

from typing import Any

from torch import Tensor
from vllm import _custom_ops

__all__ = ["rotate_heads_together"]

_rotate: Any = _custom_ops.rotary_embedding


def rotate_heads_together() -> None:
    """From now on, in this process."""
    operations: Any = _custom_ops
    operations.rotary_embedding = _rotate_together


def _rotate_together(
    positions: Tensor, query: Tensor, key: Tensor | None, *others: Any, **named: Any
) -> None:
    together = (x if x is None else x.view(positions.numel(), -1) for x in (query, key))
    _rotate(positions, *together, *others, **named)
