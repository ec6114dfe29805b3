"""Memory that runs out: told in a line, with what to change."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphpo_agent.errors import ModelError, first_line

__all__ = ["within_memory"]

_ON_A_CPU = "can't allocate memory"
_SHOWN = 200
"""Characters of torch's message; the rest is about its allocator."""


@contextmanager
def within_memory(doing: str, mend: str) -> Iterator[None]:
    """Around what takes most of the memory; or as a decorator.

    Example: ``with within_memory("the update", "lower update.max_tokens_per_batch"):``

    Args:
        doing: what it is.
        mend: what takes less.

    Raises:
        ModelError: memory ran out, on a GPU or here.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's own is a RuntimeError
        short = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not short and _ON_A_CPU not in str(error):
            raise
        raise ModelError(
            f"no memory is left for {doing}: {first_line(error)[:_SHOWN]}; {mend}"
        ) from error
