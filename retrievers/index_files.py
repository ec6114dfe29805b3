"""What every index directory has: a manifest and the corpus' byte ranges."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np

from graphpo_agent.errors import ToolError, first_sentence
from retrievers.corpus import Corpus
from retrievers.index_build import finished_rows

__all__ = ["finish_index", "open_corpus", "read_manifest", "reason_of", "relative_path"]

_Fields = Mapping[str, type | UnionType]

_FIELDS: _Fields = {
    "corpus": str,
    "corpus_bytes": int,
    "corpus_head_sha256": str,
    "num_docs": int,
    "options": dict,
}
_OWN_FIELDS: Mapping[str, _Fields] = {
    "bm25": {
        "options.k1": float | int,
        "options.b": float | int,
        "options.stemmer": str | None,
        "options.stopwords": str | None,
    },
    "lucene": {
        "index": str,
        "options.threads": int,
        "options.store_raw": bool,
        "options.heap": str,
    },
    "dense": {
        "index": str,
        "factory": str,
        "dimension": int,
        "options.index_type": str | None,
        "options.keep_vectors": bool,
        "options.encoder.model": str,
        "options.encoder.pooling": str,
        "options.encoder.query_prefix": str,
        "options.encoder.passage_prefix": str,
        "options.encoder.normalize": bool,
        "options.encoder.max_tokens": int,
    },
}
"""What a manifest holds, and what one of each kind holds besides."""
_MEND = "build it with `graphpo index build KIND --corpus CORPUS --out DIR`"


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

    Raises:
        DataError: the corpus is not what was opened any more.
    """
    corpus.check_unchanged()
    np.save(work / "offsets.npy", corpus.ranges)
    home = work if work.resolve() in corpus.path.resolve().parents else directory
    manifest = {
        "kind": kind,
        "corpus": relative_path(corpus.path, home),
        **corpus.fingerprint,
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
        if (unfinished := finished_rows(directory)) is not None:
            rows, num_docs = unfinished
            raise ToolError(
                f"{directory}: holds no index yet: its build has {rows:,} of {num_docs:,} "
                "documents behind it; wait for it, or repeat its command to go on from there"
            ) from error
        raise ToolError(f"{directory}: holds no index ({reason_of(error)}); {_MEND}") from error
    given = manifest if isinstance(manifest, dict) else {}
    found = str(given.get("kind"))
    if found not in _OWN_FIELDS or kind not in (None, found):
        wanted = kind or ", ".join(_OWN_FIELDS)
        raise ToolError(f"{path}: field 'kind' must be {wanted}, found {found}; {_MEND}")
    for field, type_ in {**_FIELDS, **_OWN_FIELDS[found]}.items():
        if not isinstance(_value(given, field), type_):
            wanted = type_.__name__ if isinstance(type_, type) else type_
            raise ToolError(f"{path}: field '{field}' must be a {wanted}; {_MEND}")
    return given


def _value(manifest: Mapping[str, Any], field: str) -> Any:
    """What a manifest has at a path of names; ``...``: nothing."""
    value: Any = manifest
    for name in field.split("."):
        value = value.get(name, ...) if isinstance(value, dict) else ...
    return value


def open_corpus(directory: Path, manifest: Mapping[str, Any]) -> Corpus:
    """The corpus of an index, which must be as it was when it was indexed.

    Raises:
        ToolError: it has gone or changed, or the index is incomplete.
    """
    path = Path(os.path.normpath(directory.resolve() / manifest["corpus"]))
    try:
        ranges = np.load(directory / "offsets.npy", mmap_mode="r")
        if ranges.shape != (manifest["num_docs"], 2):
            raise ValueError("offsets.npy is that of another index")
    except (OSError, ValueError, EOFError) as error:
        reason = reason_of(error)
        raise ToolError(f"{directory}: the index cannot be read ({reason}); {_MEND}") from error
    try:
        corpus = Corpus(path, ranges)
    except OSError as error:
        raise ToolError(
            f"{directory}: its corpus {path} cannot be read ({error.strerror}); {_MEND}"
        ) from error
    if corpus.fingerprint != {name: manifest[name] for name in corpus.fingerprint}:
        raise ToolError(f"{directory}: {path} has changed since it was indexed; {_MEND}")
    return corpus


def reason_of(error: Exception) -> str:
    """Why a file of an index cannot be read, in short.

    Example: ``offsets.npy: No such file or directory``.
    """
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return f"a file is damaged: {first_sentence(error)}"


def relative_path(path: Path, directory: Path) -> str:
    """``path`` as seen from ``directory``, so that both may move together."""
    return os.path.relpath(path.resolve(), directory.resolve())
