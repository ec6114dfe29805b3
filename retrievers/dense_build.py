"""Indexes of passage vectors: encoding a corpus, so that it can be interrupted, and faiss."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ModelError, ToolError
from graphpo_agent.net.checks import check_counts
from retrievers.corpus import Corpus, read_corpus
from retrievers.encoders import EncoderSettings
from retrievers.faiss_index import build_faiss, flat_vectors, map_faiss, parse_type
from retrievers.index_build import Build, build_directory, corpus_source, link, refuse_inside
from retrievers.index_files import finish_index, relative_path
from retrievers.progress import progress

__all__ = ["VECTORS_FILE", "build_dense", "has_vectors", "kept_vectors", "write_dense"]

_INDEX_FILE = "index.faiss"
VECTORS_FILE = "vectors.f32"
"""[num_docs, dimension] little-endian float32, in corpus order."""
_CHUNK_BATCHES = 16
"""Batches between two checkpoints; within a chunk texts of like length go together."""

_BLOCK_ROWS = 1 << 14
_FLAT = ("Flat", "IndexFlat", "IndexFlatIP")

Embed = Callable[[Sequence[str]], NDArray[np.float32]]


def build_dense(
    corpus_path: Path,
    directory: Path,
    encoder: EncoderSettings,
    *,
    index_type: str = "Flat",
    batch_size: int = 64,
    device: str = "cpu",
    keep_vectors: bool = True,
    faiss_index: Path | str | None = None,
) -> dict[str, Any]:
    """Index a corpus by the vectors of its passages; the directory appears only when complete.

    The same call goes on where an interrupted one stopped encoding, as long as corpus and encoder
    are as they were.

    Args:
        corpus_path: Search-R1's corpus JSONL; it must stay where it is, unchanged.
        directory: where the index goes; an index that is there is replaced.
        encoder: of passages now and of queries later; see ``resolve_encoder``.
        index_type: see ``parse_type``.
        batch_size: passages per forward pass.
        device: where the encoder runs, such as ``cpu`` or ``cuda``.
        keep_vectors: keep them beside an index that is not Flat; without them it cannot be merged.
        faiss_index: a finished faiss file over the rows of this corpus (Search-R1's
            ``e5_Flat.index``), to be used where it is instead of encoding anything.

    Returns:
        The manifest; see ``finish_index``.

    Raises:
        DataError: a corpus line that cannot be used, with file, line and field.
        ModelError: there is no usable encoder, or it gives numbers that are not finite.
        ToolError: a setting that cannot be; faiss is missing; a directory that holds something
            else, or cannot be written; ``faiss_index`` has another number of rows, another metric
            than the inner product, or ids that are no row numbers.
    """
    refuse_inside(corpus_path, directory)
    check_counts("dense index", batch_size=batch_size)
    if faiss_index is not None:
        return _adopt(corpus_path, directory, encoder, Path(faiss_index))
    corpus = read_corpus(corpus_path)
    parse_type(index_type, len(corpus))
    embedder = encoder.load(encoder.passage_prefix, batch_size, device)
    with build_directory(directory, _source(corpus, encoder)) as build:
        _encode(build, corpus, embedder.embed, encoder.model, batch_size * _CHUNK_BATCHES)
        made = write_dense(build, len(corpus), index_type, encoder, keep_vectors)
        return finish_index(build.new, directory, "dense", corpus, **made)


def write_dense(
    build: Build, num_docs: int, index_type: str, encoder: EncoderSettings, keep_vectors: bool
) -> dict[str, Any]:
    """Turn the finished vectors that the build keeps into an index.

    Returns:
        The options and further entries of the manifest.
    """
    vectors = _map_vectors(build.kept, num_docs)
    type_ = parse_type(index_type, num_docs)
    build_faiss(vectors, type_, build.new / _INDEX_FILE)
    if keep_vectors and not type_.is_flat:
        link(build.kept / VECTORS_FILE, build.new / VECTORS_FILE)
    return {
        "options": {
            "index_type": index_type,
            "encoder": asdict(encoder),
            "keep_vectors": keep_vectors,
        },
        "index": _INDEX_FILE,
        "factory": type_.factory,
        "dimension": vectors.shape[1],
    }


def has_vectors(directory: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether a finished index still has the vectors as the encoder gave them."""
    return (directory / VECTORS_FILE).exists() or manifest["factory"] in _FLAT


def kept_vectors(directory: Path, manifest: Mapping[str, Any]) -> Iterator[NDArray[np.float32]]:
    """The vectors of an index that ``has_vectors``, in blocks of [num_rows, dimension]."""
    if (directory / VECTORS_FILE).exists():
        yield from _blocks(_map_vectors(directory, manifest["num_docs"]))
    else:
        index = map_faiss(directory / manifest["index"])  # held as long as its vectors are read
        yield from _blocks(flat_vectors(index))


def _blocks(vectors: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    for start in range(0, len(vectors), _BLOCK_ROWS):
        yield np.array(vectors[start : start + _BLOCK_ROWS])


def _map_vectors(directory: Path, num_docs: int) -> NDArray[np.float32]:
    flat = np.memmap(directory / VECTORS_FILE, dtype="<f4", mode="r")
    return flat.reshape(num_docs, -1)


def _adopt(
    corpus_path: Path, directory: Path, encoder: EncoderSettings, faiss_index: Path
) -> dict[str, Any]:
    """An index around a finished faiss file, which stays where it is."""
    refuse_inside(faiss_index, directory)
    index = map_faiss(faiss_index)
    corpus = read_corpus(corpus_path)
    if index.ntotal != len(corpus):
        raise ToolError(
            f"{faiss_index}: holds {index.ntotal} vectors but {corpus.path} has {len(corpus)} rows"
        )
    with build_directory(directory) as build:
        return finish_index(
            build.new,
            directory,
            "dense",
            corpus,
            {"index_type": None, "encoder": asdict(encoder), "keep_vectors": False},
            index=relative_path(faiss_index, directory),
            factory=type(index).__name__,
            dimension=index.d,
        )


def _encode(build: Build, corpus: Corpus, embed: Embed, model: str, chunk_rows: int) -> None:
    """Append the vectors that are missing."""
    with progress("encoding", len(corpus), "doc", initial=build.rows) as bar:
        for start in range(build.rows, len(corpus), chunk_rows):
            vectors = embed(corpus.texts(start, start + chunk_rows))
            if not np.isfinite(vectors).all():
                raise ModelError(
                    f"encoder {model!r}: gives numbers that are not finite for rows {start} to "
                    f"{start + len(vectors) - 1} of {corpus.path}"
                )
            rows = start + len(vectors)
            build.record(rows, {VECTORS_FILE: vectors.astype("<f4").tobytes()})
            bar.update(len(vectors))


def _source(corpus: Corpus, encoder: EncoderSettings) -> dict[str, Any]:
    """All that the vectors depend on."""
    return {
        "kind": "dense",
        **corpus_source(corpus),
        "encoder": asdict(encoder),
        "encoder_files": _files_digest(Path(encoder.model)),
    }


def _files_digest(model: Path) -> str | None:
    """What tells a changed model directory; None for a model that is known by name."""
    if not model.is_dir():
        return None
    files = sorted(path for path in model.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(model)), path.stat()) for path in files]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
