"""How an index comes to be: beside its place, by one process, going on where it was stopped."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphpo_agent.atomic import replace_directory
from graphpo_agent.errors import DataError, ToolError, first_line
from graphpo_agent.locks import directory_lock
from retrievers.corpus import Corpus
from retrievers.progress import say

__all__ = [
    "Build",
    "build_directory",
    "check_replaceable",
    "corpus_source",
    "finished_rows",
    "link",
    "refuse_inside",
]

_CHECKPOINT_FILE = "checkpoint.json"
_NEW = "new"


class Build:
    """The two directories of a build, and how far it has come.

    Example: ``build.record(20_000, {"words.i32": data})`` appends to ``build.kept / "words.i32"``;
    should the process die, the next one's ``build.rows`` is 20,000.

    Attributes:
        new: empty at first; becomes the index.
        kept: files that outlive an interrupted build; goes when the index is in its place.
        rows: of the corpus, from the first on, that need no more work than ``kept`` holds.
    """

    def __init__(self, home: Path, source: Mapping[str, Any] | None) -> None:
        """Take up what an interrupted build of the same source left; empty ``home`` otherwise."""
        self.kept = home
        self.new = home / _NEW
        self._source = source
        self.rows, self._sizes = _interrupted(home, source)
        if self.rows:
            say(f"going on after {self.rows:,} documents of an interrupted build")
            for name, size in self._sizes.items():
                os.truncate(home / name, size)
            shutil.rmtree(self.new, ignore_errors=True)
        else:
            _remove_entries(home)
        self.new.mkdir()

    def record(self, rows: int, appended: Mapping[str, bytes] | None = None) -> None:
        """Append to files in ``kept``, and note that ``rows`` rows are finished by it."""
        for name, data in (appended or {}).items():
            with (self.kept / name).open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                self._sizes[name] = file.tell()
        checkpoint = {"rows": rows, "sizes": self._sizes, "source": self._source}
        new = self.kept / f"{_CHECKPOINT_FILE}.new"
        new.write_text(json.dumps(checkpoint))
        new.replace(self.kept / _CHECKPOINT_FILE)
        self.rows = rows


@contextmanager
def build_directory(directory: Path, source: Mapping[str, Any] | None = None) -> Iterator[Build]:
    """A hidden directory beside ``directory`` to fill, which at the end takes its place.

    One process at a time can be inside; what it starts with inheritable descriptors counts as it.

    Args:
        directory: the index to be.
        source: all that the finished rows depend on, as JSON has it. What they are kept in then
            outlives an error or a kill, and a build of an equal source goes on from it. None:
            nothing is taken up and nothing stays behind.

    Raises:
        ToolError: ``directory`` holds something else than an index, cannot be written, or another
            process is building it.
    """
    check_replaceable(directory)
    home = _home(directory)
    resumes = ""
    try:
        busy = ToolError(f"{directory}: another process is building it; wait for it")
        with directory_lock(home, busy, inherit=True):
            build = Build(home, source)
            try:
                yield build
            except BaseException as error:
                recorded = (home / _CHECKPOINT_FILE).exists()
                if source is None or not recorded or isinstance(error, DataError):
                    shutil.rmtree(home)
                else:
                    resumes = "; make room and repeat the command, it goes on where it stopped"
                raise
            replace_directory(directory, build.new)
            shutil.rmtree(home, ignore_errors=True)
    except OSError as error:
        raise ToolError(f"{directory}: cannot be written ({first_line(error)}){resumes}") from error


def corpus_source(corpus: Corpus) -> dict[str, Any]:
    """What tells another corpus, for ``build_directory``: the SHA-256 of the whole file.

    Raises:
        DataError: the corpus is not what was opened any more.
    """
    with corpus.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    corpus.check_unchanged()
    return {"corpus_sha256": digest, "num_docs": len(corpus)}


def finished_rows(directory: Path) -> tuple[int, int] | None:
    """Documents that an unfinished build of an index has behind it, and all; None: there is none.

    The build may still be running.
    """
    checkpoint = _read_checkpoint(_home(directory))
    if checkpoint is None or checkpoint["source"] is None:
        return None
    return checkpoint["rows"], checkpoint["source"]["num_docs"]


def check_replaceable(directory: Path) -> None:
    """Raise ToolError if something else than an index is there."""
    if os.path.exists(directory) and not _holds_index(directory):
        raise ToolError(f"{directory}: exists and is not an index; choose another directory")


def refuse_inside(path: Path, directory: Path) -> None:
    """Raise ToolError if ``path`` lies in a directory that is about to be replaced."""
    if directory.resolve() in path.resolve().parents:
        raise ToolError(f"{path}: lies in {directory}, which is to be replaced; choose another")


def link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system knows no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _holds_index(directory: Path) -> bool:
    """Whether a directory has an index's manifest; runs and others have one, too."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and {"kind", "corpus"} <= manifest.keys()


def _home(directory: Path) -> Path:
    return directory.parent / f".{directory.name}.building"


def _interrupted(home: Path, source: Mapping[str, Any] | None) -> tuple[int, dict[str, int]]:
    """Rows that an interrupted build of an equal source finished, and its files' sizes then."""
    checkpoint = _read_checkpoint(home)
    if source is None or checkpoint is None:
        return 0, {}
    if checkpoint["source"] != json.loads(json.dumps(source)):
        say("an interrupted build of another corpus or other options is here: starting over")
        return 0, {}
    sizes = checkpoint["sizes"]
    if any(not _has(home / name, size) for name, size in sizes.items()):
        say("an interrupted build is here and has lost files: starting over")
        return 0, {}
    return checkpoint["rows"], sizes


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size >= size


def _read_checkpoint(home: Path) -> dict[str, Any] | None:
    """What ``Build.record`` wrote; None: nothing that can be used."""
    try:
        checkpoint = json.loads((home / _CHECKPOINT_FILE).read_text())
    except (OSError, ValueError):
        return None
    return checkpoint if {"rows", "sizes", "source"} <= checkpoint.keys() else None


def _remove_entries(directory: Path) -> None:
    """Leave a directory empty; what says that there is something in it goes first."""
    (directory / _CHECKPOINT_FILE).unlink(missing_ok=True)
    for entry in directory.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
