"""What can be chosen about an index, when it is built and when it is opened."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphpo_agent.errors import ToolError

__all__ = ["BUILD_OPTIONS", "SEARCH_OPTIONS", "Option", "check_bm25", "choose"]


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that can be chosen about an index.

    Example: ``Option("k1", float, 0.9, "how fast repeated words stop counting")``
    """

    name: str
    type: type
    default: Any
    """None: decided otherwise, or required where ``help`` says so."""
    help: str


BUILD_OPTIONS: Mapping[str, tuple[Option, ...]] = {
    "bm25": (
        Option("k1", float, 0.9, "how fast repeated words stop counting"),
        Option("b", float, 0.4, "how much long documents are marked down, in [0, 1]"),
        Option("stemmer", str, "english", "a Snowball language (porter: Lucene's), or none"),
        Option("stopwords", str, "english", "the language of a stop word list, or none"),
    ),
    "lucene": (
        Option("threads", int, 2, "threads that index"),
        Option("store_raw", bool, False, "keep the documents in the index, for pyserini's use"),
        Option("heap", str, "2g", "Java's memory"),
        Option("lucene_index", str, None, "pyserini's index of this corpus, to be used as is"),
    ),
    "dense": (
        Option("model", str, None, "the encoder, a directory or a name on the hub (required)"),
        Option("index_type", str, "Flat", "Flat, SQ8, IVF,SQ8, IVF<lists>,SQ8, HNSW, HNSW<links>"),
        Option("preset", str, None, "e5, bge or plain; otherwise by the model's name"),
        Option("pooling", str, None, "mean, cls or last, instead of the preset's"),
        Option("query_prefix", str, None, "written before queries, instead of the preset's"),
        Option("passage_prefix", str, None, "written before passages, instead of the preset's"),
        Option("normalize", bool, None, "vectors of length 1, instead of the preset's"),
        Option("max_tokens", int, None, "where passages and queries are cut; presets have 256"),
        Option("batch_size", int, 64, "passages per forward pass"),
        Option("device", str, "cpu", "where the encoder runs: cpu, cuda, cuda:1 …"),
        Option("keep_vectors", bool, True, "keep the vectors too, without which it cannot merge"),
        Option(
            "faiss_index", str, None, "a finished faiss file over this corpus, to be used as is"
        ),
    ),
}
"""By kind, what ``build_index`` takes."""

SEARCH_OPTIONS: Mapping[str, tuple[Option, ...]] = {
    "bm25": (Option("backend", str, "numpy", "auto, numpy or numba"),),
    "lucene": (
        Option("k1", float, 0.9, "how fast repeated words stop counting"),
        Option("b", float, 0.4, "how much long documents are marked down, in [0, 1]"),
        Option("threads", int, 2, "threads that search the queries of one call"),
        Option("heap", str, "2g", "Java's memory"),
    ),
    "dense": (
        Option("model", str, None, "where the index' encoder is now, if it has moved"),
        Option("device", str, "cpu", "where queries are encoded: cpu, cuda, cuda:1 …"),
        Option("index_device", str, "cpu", "where vectors are compared; cuda for type Flat only"),
        Option("nprobe", int, 32, "lists an IVF index looks into"),
        Option("ef_search", int, 64, "candidates an HNSW index keeps"),
        Option("batch_size", int, 32, "queries per forward pass"),
        Option("cached_queries", int, 10_000, "vectors of the latest queries that are kept"),
    ),
}
"""By kind, what ``open_index`` takes."""


def choose(
    table: Mapping[str, tuple[Option, ...]], kind: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of a kind, with the given values in place of the defaults.

    Raises:
        ToolError: an unknown kind or option, or a value of another type.
    """
    if kind not in table:
        raise ToolError(f"index: kind must be one of {', '.join(table)}, found {kind!r}")
    options = {option.name: option for option in table[kind]}
    for name, value in given.items():
        if name not in options:
            raise ToolError(
                f"{kind} index: there is no option {name!r}; choose from {', '.join(options)}"
            )
        _check_type(kind, options[name], value)
    return {name: option.default for name, option in options.items()} | dict(given)


def check_bm25(kind: str, k1: float, b: float) -> None:
    """Raise ToolError unless these can be BM25's two parameters."""
    for name, value, most in (("k1", k1, sys.float_info.max), ("b", b, 1)):
        if type(value) not in (int, float) or not 0 <= value <= most:
            limits = "at least 0" if name == "k1" else "in [0, 1]"
            raise ToolError(f"{kind}: {name} must be {limits}, found {value!r}")


def _check_type(kind: str, option: Option, value: Any) -> None:
    accepted = {option.type, int} if option.type is float else {option.type}
    if option.default is None:
        accepted.add(type(None))
    if type(value) not in accepted:
        raise ToolError(
            f"{kind} index: {option.name} must be of type {option.type.__name__}, found {value!r}"
        )
