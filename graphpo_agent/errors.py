"""The error vocabulary: one class per border that a mistake can cross.

Every class here is a *user's* mistake or the outside world's: the command line prints it as one
line on stderr and exits with status 2. A bug is any other exception, and it crashes.
"""

from collections.abc import Generator
from contextlib import contextmanager
from json import JSONDecodeError

__all__ = [
    "ConfigError",
    "DataError",
    "GraphError",
    "GraphPOError",
    "ModelError",
    "QuotaError",
    "RewardError",
    "RunError",
    "ToolError",
    "errors_at",
    "first_line",
    "first_sentence",
    "json_mistake",
    "json_reason",
]

_GZIP = b"\x1f\x8b"
"""What a file begins with that gzip made."""


class GraphPOError(Exception):
    """What went wrong, where, and how to mend it, in one line."""


class ConfigError(GraphPOError):
    """A configuration file or override that cannot be used."""


class DataError(GraphPOError):
    """A task, demonstration or corpus file with a row that cannot be used (file, line, field)."""


class GraphError(GraphPOError):
    """A graph file or an in-memory graph that breaks the schema ``graphpo.graph/1``."""


class ModelError(GraphPOError):
    """A model that is missing, incomplete, does not fit its tokenizer or whose numbers diverged."""


class RewardError(GraphPOError):
    """A reward function that returned something else than a number in [0, 1]."""


class RunError(GraphPOError):
    """A run directory that cannot be written, resumed or reported on."""


class ToolError(GraphPOError):
    """A tool or retriever that is misconfigured or unreachable; a failed call is data instead."""


class QuotaError(ToolError):
    """A paid or limited service has been used up: going on would train on its refusals."""


@contextmanager
def errors_at(key: str) -> Generator[None]:
    """Whatever is wrong with what a key of the configuration names is said with the key.

    Raises:
        ConfigError: the one that was raised inside, with the key before it.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def first_line(error: BaseException) -> str:
    """What a library's error says, in one line; its kind where it says nothing.

    A line that ends with a colon goes on with the next one. What the operating system says is the
    reason alone, without its number and file.

    Example: "No space left on device"
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first, *more = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first


def first_sentence(error: BaseException) -> str:
    """What is wrong with a file; torch's second sentence recommends to load it with less care."""
    return first_line(error).split(". ")[0]


def json_reason(error: Exception) -> str:
    """Why bytes are not JSON, as ``json_mistake`` where they are a line; or that they are packed.

    Example: "it is compressed; unpack it with gunzip"
    """
    if isinstance(error, UnicodeDecodeError) and error.object.startswith(_GZIP):
        return "it is compressed; unpack it with gunzip"
    if isinstance(error, JSONDecodeError) and error.lineno == 1:
        return json_mistake(error)
    return str(error).partition("; use sys.")[0]  # of too many digits: advice to programmers


def json_mistake(error: JSONDecodeError) -> str:
    """What is wrong with a line of JSON, and in which column; its place in a file names the line.

    Example: "Unterminated string starting at column 34"
    """
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"
