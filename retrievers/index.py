"""Indexes of every kind over a corpus on disk: build, open, describe, merge."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graphpo_agent.errors import ToolError
from graphpo_agent.net.checks import check_counts
from graphpo_agent.outputs import check_above
from graphpo_agent.protocols import Retriever
from retrievers.index_build import check_replaceable, refuse_inside
from retrievers.index_files import open_corpus, read_manifest
from retrievers.index_memory import estimate_num_docs, machine_memory, predict_memory, readable
from retrievers.index_merge import merge_indexes
from retrievers.index_options import BUILD_OPTIONS, SEARCH_OPTIONS, choose
from retrievers.progress import say

__all__ = ["build_index", "describe_index", "merge_indexes", "open_index"]

_ENCODER_OPTIONS = (
    "model",
    "preset",
    "pooling",
    "query_prefix",
    "passage_prefix",
    "normalize",
    "max_tokens",
)
"""Those of a dense index that are its encoder's; see ``resolve_encoder``."""


def build_index(kind: str, corpus: Path | str, out: Path | str, **options: Any) -> dict[str, Any]:
    """Index a corpus. What it will need is said on stderr, then how far it is.

    Mistakes that need no look at the whole corpus are told before.

    Example: ``build_index("dense", "corpus.jsonl", "index", model="intfloat/e5-base-v2")``

    Args:
        kind: bm25, lucene or dense.
        corpus: Search-R1's corpus JSONL; it must stay where it is, unchanged.
        out: where the index goes, when it is complete; an index that is there is replaced.
        options: see ``BUILD_OPTIONS``.

    Returns:
        The manifest.

    Raises:
        DataError: a corpus line that cannot be used, with file, line and field.
        ModelError: there is no usable encoder.
        RunError: no directory can be made where the index is to be.
        ToolError: an unknown kind or option, a value that cannot be, a missing package, or a
            directory that cannot be written or holds something else.
    """
    corpus, out = Path(corpus), Path(os.path.realpath(out))  # of a link, what it leads to
    settings = choose(BUILD_OPTIONS, kind, options)
    refuse_inside(corpus, out)
    check_replaceable(out)
    check_above(out)
    if kind == "bm25":
        from retrievers.bm25 import build_bm25, check_options

        for name in ("stemmer", "stopwords"):
            settings[name] = None if settings[name] == "none" else settings[name]
        check_options(**settings)
        _say_needs(kind, corpus, settings)
        return build_bm25(corpus, out, **settings)
    if kind == "lucene":
        from retrievers.lucene_build import build_lucene

        check_counts("lucene", threads=settings["threads"])
        if settings["lucene_index"] is None:
            _say_needs(kind, corpus, settings)
        return build_lucene(corpus, out, **settings)
    from retrievers.dense_build import build_dense
    from retrievers.encoders import check_device, encoder_dimension, resolve_encoder

    if settings["model"] is None:
        raise ToolError("dense index: needs model, the encoder of its passages")
    encoder = resolve_encoder(**{name: settings.pop(name) for name in _ENCODER_OPTIONS})
    check_counts("dense index", batch_size=settings["batch_size"])
    check_device(settings["device"])
    if settings["faiss_index"] is None:
        _say_needs(kind, corpus, settings, encoder_dimension(encoder.model))
    return build_dense(corpus, out, encoder, **settings)


def open_index(directory: Path | str, **options: Any) -> Retriever:
    """The retriever over an index, whatever its kind; what it needs is said on stderr.

    Example: ``open_index("index", nprobe=64).search(["Karo Venner mentor"], topk=3)``

    Args:
        directory: what ``build_index`` or ``merge_indexes`` wrote.
        options: see ``SEARCH_OPTIONS``.

    Raises:
        ModelError: there is no usable encoder.
        ToolError: there is no index, its corpus has gone or changed, an unknown option, a value
            that cannot be, or a missing package.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    kind = manifest["kind"]
    settings = choose(SEARCH_OPTIONS, kind, options)
    size = _size(_searched_files(directory, manifest))
    say(
        f"{directory}: {kind} index of {manifest['num_docs']:,} documents, up to "
        f"{readable(size)} of memory (this machine has {machine_memory()})"
    )
    if kind == "bm25":
        from retrievers.bm25 import Bm25Retriever

        return Bm25Retriever(directory, **settings)
    if kind == "lucene":
        from retrievers.lucene import LuceneRetriever

        return LuceneRetriever(directory, **settings)
    from retrievers.dense import DenseRetriever

    return DenseRetriever(directory, **settings)


def describe_index(directory: Path | str) -> dict[str, Any]:
    """The manifest of an index, with what it was predicted to need and what it takes.

    One of kind bm25 is opened; of the others, which need Java or an encoder, only what leads to
    their corpus.

    Returns:
        The manifest and, in bytes, ``predicted`` (see ``Needs``; None for a finished faiss file
        that was taken over) and ``actual``: ``disk_bytes`` of the directory and ``search_bytes``
        of the files that a search may touch.

    Raises:
        ToolError: there is no index, what is looked at is damaged, or its corpus has gone or
            changed.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    if manifest["kind"] == "bm25":
        from retrievers.bm25 import Bm25Retriever

        Bm25Retriever(directory)  # which reads little of it
    else:
        open_corpus(directory, manifest)
    predicted = None
    if manifest["kind"] != "dense" or manifest["options"]["index_type"] is not None:
        needs = predict_memory(
            manifest["kind"],
            num_docs=manifest["num_docs"],
            corpus_bytes=manifest["corpus_bytes"],
            options=manifest["options"],
            dimension=manifest.get("dimension"),
        )
        predicted = {name: round(value) for name, value in asdict(needs).items()}
    actual = {
        "disk_bytes": _size(path for path in directory.rglob("*") if path.is_file()),
        "search_bytes": _size(_searched_files(directory, manifest)),
    }
    return {**manifest, "predicted": predicted, "actual": actual}


def _say_needs(
    kind: str, corpus: Path, options: Mapping[str, Any], dimension: int | None = None
) -> None:
    num_docs = estimate_num_docs(corpus)
    needs = predict_memory(
        kind,
        num_docs=num_docs,
        corpus_bytes=corpus.stat().st_size,
        options=options,
        dimension=dimension,
    )
    say(
        f"{kind} index of about {num_docs:,} documents: {needs} (this machine has "
        f"{machine_memory()})"
    )


def _searched_files(directory: Path, manifest: Mapping[str, Any]) -> list[Path]:
    """The files of an index that a search may touch, the corpus left out."""
    if manifest["kind"] == "dense":
        return [directory / manifest["index"]]
    if manifest["kind"] == "lucene":
        return list((directory / manifest["index"]).glob("*"))
    return [path for path in directory.iterdir() if ".index." in path.name]


def _size(paths: Iterable[Path]) -> int:
    """Bytes of some files; one that has gone counts nothing, opening the index will tell."""
    return sum(path.stat().st_size for path in paths if path.is_file())
