"""What a command says on stderr, a line each: a mistake, a warning."""

import warnings

__all__ = ["as_line", "warn_in_lines"]


def as_line(message: str) -> str:
    r"""A message as one line.

    Example: ``as_line("no space\n left")`` is ``"graphpo: no space left\n"``.
    """
    return f"graphpo: {' '.join(message.split())}\n"


def warn_in_lines() -> None:
    """Show this process's warnings so; what is no warning to a user says where it comes from."""
    warnings.formatwarning = _format_warning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, number: int, *_: object
) -> str:
    if issubclass(category, UserWarning):
        return as_line(str(message))
    return as_line(f"{filename}:{number}: {category.__name__}: {message}")
