"""One index from the indexes of a corpus' shards."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphpo_agent.errors import DataError, ToolError
from retrievers.corpus import Corpus, read_corpus
from retrievers.index_build import Build, build_directory
from retrievers.index_files import finish_index, open_corpus, read_manifest
from retrievers.progress import progress

__all__ = ["merge_indexes"]

_CORPUS_FILE = "corpus.jsonl"


def merge_indexes(directories: Sequence[Path | str], out: Path | str) -> dict[str, Any]:
    """One index of all documents, in the order of the directories; the corpora become one inside.

    The result is what building over the merged corpus gives. Nothing is encoded again: dense
    indexes pass their vectors on. The scores of bm25 depend on all documents, and Lucene's
    documents are numbered by row, so that these two are built anew.

    Args:
        directories: two or more indexes, of one kind and built with the same options.
        out: where the merged index goes, when it is complete; an index that is there is replaced.

    Returns:
        The manifest.

    Raises:
        DataError: an id is in two of the corpora.
        ToolError: the indexes do not go together, one is incomplete or has lost its corpus, a
            dense one has not kept its vectors, or ``out`` cannot be written.
    """
    places = [Path(directory) for directory in directories]
    out = Path(os.path.realpath(out))  # of a link, what it leads to
    manifests = [read_manifest(place) for place in places]
    _check_alike(places, manifests, out)
    kind, options = manifests[0]["kind"], manifests[0]["options"]
    shards = list(zip(places, manifests, strict=True))
    if kind == "dense":
        _check_vectors(shards)
    corpora = [open_corpus(*shard) for shard in shards]
    with build_directory(out) as build:
        corpus = _merge_corpora(corpora, build.new / _CORPUS_FILE)
        if kind == "bm25":
            made = _merge_bm25(build, corpus, options)
        elif kind == "lucene":
            made = _merge_lucene(build, corpus, options)
        else:
            made = _merge_dense(build, corpus, options, shards)
        return finish_index(build.new, out, kind, corpus, **made)


def _check_alike(places: Sequence[Path], manifests: Sequence[Mapping[str, Any]], out: Path) -> None:
    if len(places) < 2:
        raise ToolError(f"index merge: needs at least 2 indexes, found {len(places)}")
    for place, manifest in zip(places, manifests, strict=True):
        for field in ("kind", "options"):
            if manifest[field] != manifests[0][field]:
                raise ToolError(
                    f"index merge: {places[0]} and {place} differ in {field}: "
                    f"{manifests[0][field]} and {manifest[field]}"
                )
        if place.resolve() == out.resolve():
            raise ToolError(f"index merge: {out} is one of the merged; choose another directory")


def _merge_corpora(corpora: Sequence[Corpus], path: Path) -> Corpus:
    """The rows of all corpora in one file."""
    total = sum(map(len, corpora))
    with path.open("wb") as file, progress("merging the corpora", total, "doc") as bar:
        for corpus in corpora:
            for row in range(len(corpus)):
                file.write(corpus.line(row).rstrip(b"\r\n") + b"\n")
                bar.update()
    try:
        return read_corpus(path)
    except DataError as error:
        names = ", ".join(str(corpus.path) for corpus in corpora)
        where = str(error).replace(f"{path}:", "line ")
        raise DataError(
            f"index merge: {names} do not go together ({where}, counted through all)"
        ) from error


def _merge_bm25(build: Build, corpus: Corpus, options: Mapping[str, Any]) -> dict[str, Any]:
    from retrievers.bm25 import write_bm25

    return write_bm25(build, corpus, **options)


def _merge_lucene(build: Build, corpus: Corpus, options: Mapping[str, Any]) -> dict[str, Any]:
    from retrievers.lucene_build import write_lucene

    return write_lucene(build, corpus, **options)


def _merge_dense(
    build: Build,
    corpus: Corpus,
    options: Mapping[str, Any],
    shards: Sequence[tuple[Path, Mapping[str, Any]]],
) -> dict[str, Any]:
    from retrievers.dense_build import VECTORS_FILE, kept_vectors, write_dense
    from retrievers.encoders import EncoderSettings

    with (build.kept / VECTORS_FILE).open("wb") as file:
        for place, manifest in shards:
            for block in kept_vectors(place, manifest):
                file.write(block.astype("<f4").tobytes())
    encoder = EncoderSettings(**options["encoder"])
    index_type = options["index_type"] or "Flat"
    return write_dense(build, len(corpus), index_type, encoder, options["keep_vectors"])


def _check_vectors(shards: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    from retrievers.dense_build import has_vectors

    for place, manifest in shards:
        if not has_vectors(place, manifest):
            raise ToolError(f"{place}: has not kept its vectors; build it with keep_vectors")
