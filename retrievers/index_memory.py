"""What an index will need, told before it is built or opened."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpo_agent.errors import DataError
from retrievers.faiss_index import parse_type
from retrievers.jvm import heap_bytes

__all__ = ["Needs", "estimate_num_docs", "machine_memory", "predict_memory", "readable"]

_SAMPLE_BYTES = 1 << 20
_OFFSET_BYTES = 16
_DENSE_BUFFERS = 300e6
"""Training sample and chunks, on top of the index itself."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that an index needs, without the corpus, Python itself and the encoder's weights.

    Example: ``str(Needs(80e9, 10e9, 9.7e9))`` is ``"80.0 GB of memory to build, 10.0 GB on disk,
    up to 9.7 GB of memory to search"``.
    """

    build_bytes: float
    """Memory at the worst moment of building."""
    disk_bytes: float
    """The finished directory."""
    search_bytes: float
    """Memory once every page was touched; mapped files share it and give it back when needed."""

    def __str__(self) -> str:
        return (
            f"{readable(self.build_bytes)} of memory to build, {readable(self.disk_bytes)} on "
            f"disk, up to {readable(self.search_bytes)} of memory to search"
        )


def predict_memory(
    kind: str,
    *,
    num_docs: int,
    corpus_bytes: int,
    options: Mapping[str, Any],
    dimension: int | None = None,
) -> Needs:
    """What an index of a kind will need.

    Exact to a few per cent for dense indexes; the others depend on the language and the length of
    the documents: within about a factor of 2 on English passages of 100 words.

    Args:
        kind: bm25, lucene or dense.
        num_docs: documents in the corpus.
        corpus_bytes: size of the corpus file.
        options: those of the builder: ``index_type`` and ``keep_vectors`` of dense, ``store_raw``
            and ``heap`` of lucene.
        dimension: length of the encoder's vectors (dense).
    """
    offsets = _OFFSET_BYTES * num_docs
    if kind == "bm25":
        arrays = 0.9 * corpus_bytes
        return Needs(7 * corpus_bytes, arrays + offsets, arrays)
    if kind == "lucene":
        index = (0.7 if options["store_raw"] else 0.25) * corpus_bytes
        return Needs(heap_bytes(options["heap"]), index + offsets, index)
    assert dimension is not None
    type_ = parse_type(options["index_type"], num_docs)
    index = type_.bytes(num_docs, dimension)
    kept = 4 * num_docs * dimension if options["keep_vectors"] and not type_.is_flat else 0
    return Needs(index + _DENSE_BUFFERS, index + kept + offsets, index)


def estimate_num_docs(corpus: Path) -> int:
    """About how many documents a corpus has, from the lines of its first MiB.

    Raises:
        DataError: the file cannot be read or is empty.
    """
    try:
        with corpus.open("rb") as file:
            head = file.read(_SAMPLE_BYTES)
        size = corpus.stat().st_size
    except OSError as error:
        raise DataError(f"{corpus}: cannot be read ({error.strerror})") from error
    if not head:
        raise DataError(f"{corpus}: holds no documents")
    return max(1, round(max(1, head.count(b"\n")) / len(head) * size))


def machine_memory() -> str:
    """How much memory this machine has, for comparison."""
    return readable(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def readable(size: float) -> str:
    """Bytes for people: ``readable(2.5e9) == "2.5 GB"``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
