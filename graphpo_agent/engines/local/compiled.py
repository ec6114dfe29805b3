"""Loops over numbers, compiled; once on a machine, not once in every run."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[F], F]:
    """Compile a function at its first call, and keep the code where a file can be written.

    Numbers of other modules are to be arguments: code that was kept does not see them change.

    Args:
        **options: of ``numba.njit``.
    """

    def decorate(function: F) -> F:
        made: Any
        try:
            made = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # neither beside the source nor in the user's own directory
            made = numba.njit(**options)(function)
        return made

    return decorate
