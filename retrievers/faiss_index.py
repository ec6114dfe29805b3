"""Nearest vectors by inner product with faiss: types of index, building, mapping, searching."""

import importlib
import importlib.util
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ToolError
from retrievers.progress import progress

__all__ = ["IndexType", "build_faiss", "flat_vectors", "map_faiss", "parse_type", "search_faiss"]

_TYPES = re.compile(r"(Flat)|(SQ8)|IVF(\d*),SQ8|HNSW(\d*)")
_CHUNK_ROWS = 1 << 14
_TRAINED_ON = 64
"""Vectors per inverted list that the lists are trained on."""
_POINTS_PER_LIST = 39
"""faiss wants at least so many vectors per inverted list."""


@dataclass(frozen=True, slots=True)
class IndexType:
    """A faiss index type with its sizes resolved.

    Example: ``IndexType("IVF1024,SQ8", lists=1024)``; ``links`` belongs to HNSW.
    """

    factory: str
    lists: int | None = None
    links: int | None = None

    @property
    def is_flat(self) -> bool:
        """The index holds every vector as it is."""
        return self.factory == "Flat"

    def bytes(self, num_docs: int, dimension: int) -> int:
        """Size of the index file, and of the memory it fills once all of it was touched."""
        if self.lists is not None:
            return num_docs * (dimension + 8) + self.lists * (4 * dimension + 32)
        if self.links is not None:
            return num_docs * (4 * dimension + 8 * self.links + 20)
        return num_docs * dimension * (4 if self.is_flat else 1)


def parse_type(name: str, num_docs: int) -> IndexType:
    """The type that a name stands for.

    Args:
        name: ``Flat`` (exact), ``SQ8`` (8 bits a number), ``IVF4096,SQ8`` (searches the nearest of
            4096 lists) or ``HNSW32`` (a graph of 32 links a vector). Without a number IVF has
            about 4 sqrt(num_docs) lists and HNSW 32 links.
        num_docs: vectors that will be in it.

    Raises:
        ToolError: no such type, or more lists than vectors.
    """
    found = _TYPES.fullmatch(name)
    if not found:
        raise ToolError(
            f"dense index: type must be Flat, SQ8, IVF,SQ8, IVF<lists>,SQ8, HNSW or HNSW<links>, "
            f"found {name!r}"
        )
    if found[3] is not None:
        lists = int(found[3] or _default_lists(num_docs))
        if not 1 <= lists <= num_docs:
            raise ToolError(
                f"dense index: {lists} lists need as many documents, the corpus has {num_docs}"
            )
        return IndexType(f"IVF{lists},SQ8", lists=lists)
    if found[4] is not None:
        links = int(found[4] or 32)
        if links < 2:
            raise ToolError(f"dense index: HNSW needs at least 2 links, found {links}")
        return IndexType(f"HNSW{links}", links=links)
    return IndexType(name)


def build_faiss(vectors: NDArray[np.float32], type_: IndexType, path: Path) -> None:
    """Write an index of [num_docs, dimension] vectors, which may be a mapped file.

    Raises:
        ToolError: faiss is not installed.
    """
    faiss = _faiss()
    index = faiss.index_factory(vectors.shape[1], type_.factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        index.train(_training_rows(vectors, type_.lists or 1))
    with progress(f"indexing ({type_.factory})", len(vectors), "doc") as bar:
        for start in range(0, len(vectors), _CHUNK_ROWS):
            chunk = np.ascontiguousarray(vectors[start : start + _CHUNK_ROWS])
            index.add(chunk)
            bar.update(len(chunk))
    with path.open("wb") as file:  # faiss's own writer is silent on a full disk
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


def map_faiss(path: Path) -> Any:
    """A faiss index of any type whose pages are read when first touched.

    Raises:
        ToolError: faiss is not installed, or the file is no index, one of another metric than the
            inner product, or one whose vectors have other numbers than their rows.
    """
    faiss = _faiss()
    if not path.is_file():
        raise ToolError(f"{path}: there is no faiss index")
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[-1]
        raise ToolError(f"{path}: the faiss index cannot be read ({reason})") from error
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ToolError(
            f"{path}: compares vectors by another metric than the inner product (faiss' metric "
            f"{index.metric_type}); build it with METRIC_INNER_PRODUCT"
        )
    if not _numbered_by_row(index):
        raise ToolError(
            f"{path}: numbers its vectors otherwise than by the rows of the corpus, from 0; "
            "build it without ids"
        )
    return index


def search_faiss(
    index: Any, queries: NDArray[np.float32], topk: int, nprobe: int, ef_search: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scores and row numbers, [num_queries, topk] each, best first; row -1 is none. Thread-safe.

    Args:
        index: see ``map_faiss``.
        queries: [num_queries, dimension].
        topk: rows for each query.
        nprobe: lists an IVF index looks into, also one within another index.
        ef_search: candidates an HNSW index keeps, at least ``topk``; as ``nprobe``.
    """
    return index.search(queries, topk, params=_parameters(index, nprobe, max(ef_search, topk)))


def flat_vectors(index: Any) -> NDArray[np.float32]:
    """[num_docs, dimension] vectors of a flat index, where faiss mapped them.

    Raises:
        ToolError: the index is not flat.
    """
    faiss = _faiss()
    if not isinstance(index, faiss.IndexFlat):
        found = type(index).__name__
        raise ToolError(f"dense index: only type Flat has the vectors themselves, found {found}")
    flat = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
    return flat.reshape(index.ntotal, index.d)


def _parameters(index: Any, nprobe: int, ef_search: int) -> Any:
    """What a search of an index is told; None: nothing. An index may be around another one."""
    faiss = _faiss()
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(nprobe=min(nprobe, index.nlist))
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(efSearch=ef_search)
    inner = _inner(index)
    parameters = None if inner is None else _parameters(inner, nprobe, ef_search)
    if parameters is not None and isinstance(index, faiss.IndexPreTransform):
        return faiss.SearchParametersPreTransform(index_params=parameters)
    if parameters is not None and isinstance(index, faiss.IndexRefine):
        return faiss.IndexRefineSearchParameters(
            k_factor=index.k_factor, base_index_params=parameters
        )
    return parameters


def _inner(index: Any) -> Any:
    """The index that another one is around: transforms, refines or numbers anew; None: none."""
    faiss = _faiss()
    if isinstance(index, faiss.IndexRefine):
        return faiss.downcast_index(index.base_index)
    if isinstance(index, (faiss.IndexPreTransform, faiss.IndexIDMap)):
        return faiss.downcast_index(index.index)
    return None


def _numbered_by_row(index: Any) -> bool:
    """Whether ids that were given to the vectors, if any, are 0, 1, 2 and so on."""
    faiss = _faiss()
    while index is not None:
        if isinstance(index, faiss.IndexIDMap):
            ids = faiss.vector_to_array(index.id_map)
            if not np.array_equal(ids, np.arange(index.ntotal)):
                return False
        index = _inner(index)
    return True


def _faiss() -> Any:
    if importlib.util.find_spec("faiss") is None:
        raise ToolError("dense index needs faiss-cpu: pip install faiss-cpu")
    return importlib.import_module("faiss")


def _default_lists(num_docs: int) -> int:
    """The power of two nearest 4 sqrt(num_docs), as far as there are vectors to train on."""
    wanted = 2 ** round(math.log2(4 * math.sqrt(num_docs)))
    return max(1, min(wanted, num_docs // _POINTS_PER_LIST))


def _training_rows(vectors: NDArray[np.float32], lists: int) -> NDArray[np.float32]:
    """The same rows for the same sizes, so that equal builds give equal indexes."""
    count = min(len(vectors), max(1 << 16, _TRAINED_ON * lists))
    rows = np.random.default_rng(0).choice(len(vectors), count, replace=False, shuffle=False)
    return np.ascontiguousarray(vectors[np.sort(rows)])
