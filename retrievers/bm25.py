r"""BM25 over a corpus on disk, with bm25s.

The corpus is Search-R1's JSONL, one ``{"id": "0", "contents": "\"Title\"\ntext"}`` per line. The
index directory holds bm25s' arrays, the byte offset of every corpus line and ``manifest.json``.
A loaded index keeps none of these in memory: arrays and corpus are memory-mapped.
"""

import hashlib
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import Stemmer
from numpy.typing import NDArray

from graphpo_agent.errors import DataError, ToolError
from graphpo_agent.types import Document

__all__ = ["Bm25Retriever", "build_bm25"]

_HEAD_BYTES = 1 << 20
_MEND = "build it with `graphpo index build bm25 --corpus CORPUS --out DIR`"


def build_bm25(
    corpus_path: Path,
    directory: Path,
    *,
    k1: float = 0.9,
    b: float = 0.4,
    stemmer: str | None = "english",
    stopwords: str | None = "english",
) -> dict[str, Any]:
    """Index a corpus; the directory appears, or is replaced, only when complete.

    Example: ``build_bm25(Path("corpus.jsonl"), Path("index"))["num_docs"]`` is the number of lines.

    Args:
        corpus_path: Search-R1's corpus JSONL; it must stay where it is, unchanged.
        directory: where the index goes; an index that is there is replaced.
        k1: how fast repeated words stop counting; Lucene's default in Search-R1.
        b: how much long documents are marked down, in [0, 1].
        stemmer: a Snowball language, or None.
        stopwords: a bm25s stop word list, or None.

    Returns:
        The manifest: kind, corpus (relative to the index), its size and the SHA-256 of its first
        MiB, num_docs and the options.

    Raises:
        DataError: a corpus line that cannot be used, with file, line and field.
        ToolError: a directory that holds something else, or cannot be written.
    """
    contents, offsets = _read_corpus(corpus_path)
    options = {"k1": k1, "b": b, "stemmer": stemmer, "stopwords": stopwords}
    manifest = {
        "kind": "bm25",
        "corpus": os.path.relpath(corpus_path.resolve(), directory.resolve()),
        **_fingerprint(corpus_path),
        "num_docs": len(contents),
        "options": options,
        "bm25s": bm25s.__version__,
    }
    index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
    index.index(_tokenize(contents, stemmer, stopwords), show_progress=False)
    _save(directory, index, offsets, manifest)
    return manifest


class Bm25Retriever:
    r"""A ``Retriever`` over an index that ``build_bm25`` made. Threads may share it.

    Example::

        Bm25Retriever(Path("index")).search(["Karo Venner mentor"], topk=1)
        # [[Document(id="17", contents='"Karo Venner"\n...', score=9.3)]]
    """

    def __init__(self, directory: Path | str) -> None:
        """Map the index into memory.

        Raises:
            ToolError: the index is missing, incomplete, or its corpus has gone or changed.
        """
        directory = Path(directory)
        self.manifest = _load_manifest(directory)
        corpus_path = Path(os.path.normpath(directory.resolve() / self.manifest["corpus"]))
        _check_corpus(directory, corpus_path, self.manifest)
        try:
            self._index = bm25s.BM25.load(directory, mmap=True, show_progress=False)
            self._offsets = np.load(directory / "offsets.npy", mmap_mode="r")
            with corpus_path.open("rb") as file:
                self._corpus = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ToolError(f"{directory}: the index cannot be read ({error}); {_MEND}") from error

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query the documents with the highest score above 0, at most ``topk``.

        Equal scores are in corpus order. A query without a word of the corpus finds nothing.
        """
        options = self.manifest["options"]
        tokens = _tokenize(list(queries), options["stemmer"], options["stopwords"])
        return [self._search_one(words, topk) for words in tokens]

    def _search_one(self, words: Sequence[str], topk: int) -> list[Document]:
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = np.asarray(self._index.get_scores(known))
        return [self._document(row, float(scores[row])) for row in _best(scores, topk)]

    def _document(self, row: int, score: float) -> Document:
        start, end = self._offsets[row]
        line = json.loads(self._corpus[int(start) : int(end)])
        return Document(line["id"], line["contents"], score)


def _best(scores: NDArray[np.float32], topk: int) -> list[int]:
    """Rows of the ``topk`` highest scores above 0, best first, equal scores in row order."""
    rows = np.flatnonzero(scores > 0)
    if len(rows) > topk:
        least = np.partition(scores[rows], len(rows) - topk)[len(rows) - topk]
        rows = rows[scores[rows] >= least]
    order = np.lexsort((rows, -scores[rows]))
    return rows[order][:topk].tolist()


def _tokenize(texts: list[str], stemmer: str | None, stopwords: str | None) -> list[list[str]]:
    """Words as they are indexed. Threads may not share a stemmer, so each call has its own."""
    if not texts:
        return []
    tokens = bm25s.tokenize(
        texts,
        stopwords=stopwords or [],
        stemmer=Stemmer.Stemmer(stemmer) if stemmer else None,  # pyright: ignore[reportArgumentType]
        return_ids=False,
        show_progress=False,
    )
    return tokens  # pyright: ignore[reportReturnType]


def _read_corpus(path: Path) -> tuple[list[str], NDArray[np.int64]]:
    """The contents of every document, and the [num_docs, 2] byte range of its line."""
    contents: list[str] = []
    ranges: list[tuple[int, int]] = []
    seen: set[str] = set()
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    document = _parse_document(f"{path}:{number}", line, seen)
                    contents.append(document)
                    ranges.append((start, start + len(line)))
                start += len(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not contents:
        raise DataError(f"{path}: holds no documents")
    return contents, np.array(ranges, dtype=np.int64)


def _parse_document(place: str, line: bytes, seen: set[str]) -> str:
    """The contents of one corpus line; its id joins ``seen``."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, found {type(row).__name__}")
    for field in ("id", "contents"):
        if not isinstance(row.get(field), str):
            raise DataError(f"{place}: field '{field}' must be a string")
    if row["id"] in seen:
        raise DataError(f"{place}: field 'id' repeats '{row['id']}'")
    seen.add(row["id"])
    return row["contents"]


def _fingerprint(corpus_path: Path) -> dict[str, Any]:
    """What tells a changed corpus from the indexed one without reading all of it."""
    with corpus_path.open("rb") as file:
        head = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
    return {"corpus_bytes": corpus_path.stat().st_size, "corpus_head_sha256": head}


def _save(
    directory: Path, index: bm25s.BM25, offsets: NDArray[np.int64], manifest: dict[str, Any]
) -> None:
    """Write everything beside the directory, then put it in the directory's place."""
    if directory.exists() and not (directory / "manifest.json").exists():
        raise ToolError(f"{directory}: exists and is not an index; choose another directory")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=directory.parent, prefix=f".{directory.name}."
        ) as name:
            new, old = Path(name) / "new", Path(name) / "old"
            index.save(new)
            np.save(new / "offsets.npy", offsets)
            (new / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
            if directory.exists():
                directory.rename(old)
            new.rename(directory)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise ToolError(f"{directory}: cannot be written ({error.strerror})") from error


def _load_manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ToolError(f"{directory}: holds no index ({error}); {_MEND}") from error
    if manifest.get("kind") != "bm25":
        raise ToolError(f"{path}: field 'kind' must be 'bm25', found {manifest.get('kind')!r}")
    return manifest


def _check_corpus(directory: Path, corpus_path: Path, manifest: dict[str, Any]) -> None:
    try:
        found = _fingerprint(corpus_path)
    except OSError as error:
        raise ToolError(
            f"{directory}: its corpus {corpus_path} cannot be read ({error.strerror}); {_MEND}"
        ) from error
    if found != {name: manifest[name] for name in found}:
        raise ToolError(f"{directory}: {corpus_path} has changed since it was indexed; {_MEND}")
