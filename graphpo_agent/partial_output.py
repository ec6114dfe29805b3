"""An output that is made task by task: an interruption costs only the tasks that are under way."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from graphpo_agent.data.jsonl import append_line, checked_row, parse_json
from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.locks import file_lock

__all__ = [
    "PartialOutput",
    "check_name",
    "partial_output",
    "partial_path",
]

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
