"""What every index directory has: a manifest, the corpus' byte ranges, and how it comes to be."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from graphpo_agent.errors import ToolError
from retrievers.corpus import Corpus, corpus_fingerprint

__all__ = [
    "build_directory",
    "finish_index",
    "open_corpus",
    "read_manifest",
    "refuse_inside",
    "relative_path",
    "remove_entries",
]

_FIELDS: Mapping[str, type] = {
    "corpus": str,
    "corpus_bytes": int,
    "corpus_head_sha256": str,
    "num_docs": int,
    "options": dict,
}
_OWN_FIELDS: Mapping[str, Mapping[str, type]] = {
    "bm25": {},
    "lucene": {"index": str},
    "dense": {"index": str, "factory": str, "dimension": int},
}
"""What a manifest holds, and what one of each kind holds besides."""
_MEND = "build it with `graphpo index build KIND --corpus CORPUS --out DIR`"


@contextmanager
def build_directory(directory: Path, *, resumable: bool = False) -> Iterator[Path]:
    """A hidden directory beside ``directory`` to fill, which at the end takes its place.

    It is empty at first and goes when the block raises; unless ``resumable``: then it holds what
    an interrupted build left, and keeps what this one wrote. One process at a time can be inside.

    Raises:
        ToolError: ``directory`` holds something else than an index, cannot be written, or another
            process is building it.
    """
    if directory.exists() and not (directory / "manifest.json").exists():
        raise ToolError(f"{directory}: exists and is not an index; choose another directory")
    work = directory.parent / f".{directory.name}.building"
    try:
        with _locked(work, directory):
            if not resumable:
                remove_entries(work)
            try:
                yield work
            except BaseException:
                if not resumable:
                    shutil.rmtree(work)
                raise
            _replace(directory, work)
    except OSError as error:
        reason = error.strerror or error
        raise ToolError(f"{directory}: cannot be written ({reason})") from error


def refuse_inside(path: Path, directory: Path) -> None:
    """Raise ToolError if ``path`` lies in a directory that is about to be replaced."""
    if directory.resolve() in path.resolve().parents:
        raise ToolError(f"{path}: lies in {directory}, which is to be replaced; choose another")


def finish_index(
    work: Path,
    directory: Path,
    kind: str,
    corpus: Corpus,
    options: Mapping[str, Any],
    **versions: Any,
) -> dict[str, Any]:
    """Write the byte ranges and the manifest of an index into its build directory.

    Returns:
        The manifest: kind, corpus (relative to the index), its size and the SHA-256 of its first
        MiB, num_docs, options, and ``versions``.
    """
    np.save(work / "offsets.npy", corpus.ranges)
    home = work if work.resolve() in corpus.path.resolve().parents else directory
    manifest = {
        "kind": kind,
        "corpus": relative_path(corpus.path, home),
        **corpus_fingerprint(corpus.path),
        "num_docs": len(corpus),
        "options": dict(options),
        **versions,
    }
    (work / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(directory: Path, kind: str | None = None) -> dict[str, Any]:
    """What ``finish_index`` wrote.

    Raises:
        ToolError: there is no index, one of another kind, or its manifest misses a field.
    """
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ToolError(f"{directory}: holds no index ({error}); {_MEND}") from error
    given = manifest if isinstance(manifest, dict) else {}
    found = str(given.get("kind"))
    if found not in _OWN_FIELDS or kind not in (None, found):
        wanted = kind or ", ".join(_OWN_FIELDS)
        raise ToolError(f"{path}: field 'kind' must be {wanted}, found {found}; {_MEND}")
    for field, type_ in {**_FIELDS, **_OWN_FIELDS[found]}.items():
        if not isinstance(given.get(field), type_):
            raise ToolError(f"{path}: field '{field}' must be a {type_.__name__}; {_MEND}")
    return given


def open_corpus(directory: Path, manifest: Mapping[str, Any]) -> Corpus:
    """The corpus of an index, which must be as it was when it was indexed.

    Raises:
        ToolError: it has gone or changed, or the index is incomplete.
    """
    path = Path(os.path.normpath(directory.resolve() / manifest["corpus"]))
    try:
        found = corpus_fingerprint(path)
    except OSError as error:
        raise ToolError(
            f"{directory}: its corpus {path} cannot be read ({error.strerror}); {_MEND}"
        ) from error
    if found != {name: manifest[name] for name in found}:
        raise ToolError(f"{directory}: {path} has changed since it was indexed; {_MEND}")
    try:
        return Corpus(path, np.load(directory / "offsets.npy", mmap_mode="r"))
    except (OSError, ValueError) as error:
        raise ToolError(f"{directory}: the index cannot be read ({error}); {_MEND}") from error


def relative_path(path: Path, directory: Path) -> str:
    """``path`` as seen from ``directory``, so that both may move together."""
    return os.path.relpath(path.resolve(), directory.resolve())


def remove_entries(directory: Path) -> None:
    """Leave a directory empty."""
    for entry in directory.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@contextmanager
def _locked(work: Path, directory: Path) -> Iterator[None]:
    """Make the build directory and hold it; the system lets go of it when the process dies."""
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ToolError(f"{directory}: another process is building it; wait for it") from error
    finally:
        os.close(descriptor)


def _replace(directory: Path, work: Path) -> None:
    old = work.with_suffix(".replaced")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    work.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
