"""Whether an output can be put where it is named: asked before the work whose result it holds."""

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from graphpo_agent.errors import ConfigError, DataError, GraphPOError, RunError

__all__ = [
    "check_above",
    "check_apart",
    "check_output",
    "check_parent",
    "check_place",
    "is_no_file",
]

_PROTECTED = (errno.EACCES, errno.EPERM, errno.EROFS)


def is_no_file(path: Path) -> bool:
    """Whether something else than a file lies there, such as a device, or the path names nothing.

    Renaming a new file onto ``/dev/null`` would take it away from the whole machine.
    """
    return not path.name or (os.path.exists(path) and not os.path.isfile(path))


def check_apart(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Raise ConfigError where writing an output would lose an input or another output.

    Links are followed: what counts is the file.
    """
    taken = list(inputs)
    for path in outputs:
        if any(_is_same(path, other) for other in taken):
            raise ConfigError(f"output {path} is also an input or another output; name another")
        taken.append(path)


def _is_same(path: Path, other: Path) -> bool:
    there = os.path.exists(path) and os.path.exists(other)
    return os.path.samefile(path, other) if there else path.resolve() == other.resolve()


def check_place(path: Path) -> None:
    """Raise DataError where no file can be put, with the directories above it made if need be.

    Those above the file that a link points to are not made.
    """
    if is_no_file(path):
        raise DataError(
            f"output {str(path)!r} is not a file and cannot be written over; name another"
        )
    _try(path, _linked(path) or _existing_above(path), DataError)


def check_output(path: Path) -> None:
    """Raise RunError unless a file can be put there, in a directory that is there."""
    if not path.name or path.is_dir():
        raise RunError(f"output {str(path)!r} is a directory: name a file")
    if is_no_file(path):
        raise RunError(f"output {path} is a device or pipe: name a file")
    check_parent(path, RunError)
    _try(path, _linked(path) or path.parent, RunError)


def check_parent(path: Path, error: type[GraphPOError]) -> None:
    """Raise an error unless the directory that a path names is there."""
    if not path.parent.is_dir():
        raise error(f"output {path}: there is no directory {path.parent}")


def check_above(directory: Path) -> None:
    """Raise RunError unless a directory can be made there, with those above it."""
    above = _existing_above(directory)
    if not above.is_dir():
        raise RunError(f"output {directory}: {above} is no directory")
    _try(directory, above, RunError)


def _linked(path: Path) -> Path | None:
    """The directory of the file that a link points to; None for anything but a link."""
    return Path(os.path.realpath(path)).parent if os.path.islink(path) else None


def _existing_above(path: Path) -> Path:
    """The nearest place above a path where something is."""
    return next(parent for parent in path.absolute().parents if os.path.exists(parent))


def _try(path: Path, above: Path, error: type[GraphPOError]) -> None:
    """Raise an error unless a file can be made above an output, by making one that goes at once.

    Rights do not tell: a superuser has all of them in ``/proc``, where nothing can be made. Its
    name is as long as an output's is while it is written.
    """
    name = os.path.basename(os.path.realpath(path))
    try:
        tempfile.NamedTemporaryFile(dir=above, prefix=f".{name}.").close()
    except OSError as failure:
        protected = failure.errno in _PROTECTED
        reason = f"{above} is protected" if protected else failure.strerror
        raise error(f"{path}: cannot be written ({reason}); name another") from failure
