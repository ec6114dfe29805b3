"""An output that is made task by task: an interruption costs only the tasks that are under way."""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from graphpo_agent.config import RunConfig, SftConfig
from graphpo_agent.data.jsonl import append_line, checked_row, parse_json
from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.locks import file_lock

__all__ = [
    "PartialOutput",
    "check_name",
    "inputs_name",
    "output_name",
    "partial_output",
    "partial_path",
]


_SAMPLES, _SAMPLE_BYTES = 64, 2**14
"""Of a file of weights: other training changes nearly all of them."""

Row = dict[str, Any]
K = TypeVar("K")


class PartialOutput(Generic[K]):
    """What is finished of an output, in ``<path>.partial``, one JSON line per task.

    Its first line says what decides the output.

    Attributes:
        output: where the whole of it belongs.
        path: where it is until then.
        kept: of what an interruption left, by task; of the latest where one was done again.
    """

    def __init__(self, output: Path, name: Mapping[str, Any], keep: Callable[[Row], K]) -> None:
        """Begin, or go on with what an interruption left; see ``partial_output``."""
        self.output = output
        self.path = partial_path(output)
        self.kept: dict[str, K] = {}
        self._places: dict[str, int] = {}
        name = json.loads(json.dumps(name))
        lines = self._lines()
        _, whole, begun = next(lines, (0, 0, {}))
        for place, end, row in lines:
            if not self.kept:
                check_name(self.path, begun, name)
            self._places[row["task"]], whole = place, end
            self.kept[row["task"]] = keep(row)
        os.truncate(self.path, whole if self.kept else 0)
        if not self.kept:
            append_line(self.path, json.dumps(name))

    def _lines(self) -> Iterator[tuple[int, int, Row]]:
        """The bytes at which each whole line begins and has ended, and what it holds."""
        place = 0
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.endswith(b"\n"):
                        where = f"{self.path}:{number}"
                        row = checked_row(where, parse_json(where, line), escaped=False)
                        yield place, place + len(line), row
                    place += len(line)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error

    def add(self, row: Mapping[str, Any]) -> None:
        """Append what is finished of a task, ``{"task": its id, …}``.

        Raises:
            OSError: it cannot be written; names the file.
        """
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        self._places[row["task"]] = append_line(self.path, line)

    def read(self, task: str) -> Row:
        """What was added of a task, from disk.

        Raises:
            OSError: it cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(self._places[task])
            return json.loads(file.readline())


@contextmanager
def partial_output(
    output: Path, name: Mapping[str, Any], keep: Callable[[Row], K]
) -> Iterator[PartialOutput[K]]:
    """Begin an output, or go on with what an interruption left of it.

    It is removed where the ``with`` block succeeds, which then has written the whole.

    Args:
        output: the file.
        name: what decides it, as JSON; with another the finished tasks would not be its own.
        keep: what of a row is held in memory.

    Raises:
        ConfigError: what is there is of another name, or another process is writing it.
        DataError: it cannot be read or written.
    """
    path = partial_path(output)
    busy = ConfigError(f"{path} is in use: another process writes {output}; name another --out")
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(path, busy))
        except OSError as error:
            raise DataError(f"{path}: cannot be written ({error.strerror})") from error
        yield PartialOutput(output, name, keep)
        path.unlink(missing_ok=True)


def partial_path(output: Path) -> Path:
    """Where an output is until it is whole."""
    return output.with_name(f"{output.name}.partial")


def check_name(path: Path, begun: Mapping[str, Any], name: Mapping[str, Any]) -> None:
    """Raise ConfigError where what an interruption left has not this name; says what differs."""
    keys = begun.keys() | name.keys()
    differ = sorted(key for key in keys if begun.get(key) != name.get(key))
    if differ:
        raise ConfigError(
            f"{path} was left by an interrupted command with other {', '.join(differ)}: "
            "remove it, or name another output"
        )


def output_name(
    verb: str,
    config: RunConfig | SftConfig,
    unused: Collection[str],
    files: Mapping[str, Sequence[Path]],
    **flags: int,
) -> dict[str, Any]:
    """What decides the output of a verb; two that agree in it are one.

    The policy goes by its path and by samples of what is in its files.

    Args:
        verb: which.
        config: with which settings.
        unused: those of its sections that change nothing.
        files: which it reads, by the section that names them; their contents decide.
        flags: of the command line.
    """
    settings = config.model_dump(mode="json", exclude=set(unused))
    return settings | inputs_name(config.model.path, files) | {"verb": verb} | flags


def inputs_name(model: str, files: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """What is read, by name: digests of ``weights`` and files.

    Args:
        model: the policy's directory or name.
        files: by a name of theirs.
    """
    digests = {
        name: [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        for name, paths in files.items()
    }
    return digests | {"weights": _sampled_digest(Path(model))}


def _sampled_digest(directory: Path) -> str:
    """Of the names and sizes of its files, and of what is in each at places all over it."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.glob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}/{size}/".encode())
        with path.open("rb") as file:
            for k in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * k // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
