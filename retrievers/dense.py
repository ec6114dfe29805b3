"""Passages whose vectors are nearest to the query's: dual encoders and faiss."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.encoder import EncoderEmbedder
from graphpo_agent.errors import ToolError
from graphpo_agent.net.checks import check_counts
from graphpo_agent.plain_text import plain_text
from graphpo_agent.types import Document
from retrievers.encoders import EncoderSettings
from retrievers.faiss_index import flat_vectors, map_faiss, search_faiss
from retrievers.index_files import open_corpus, read_manifest
from retrievers.torch_flat import TorchFlat

__all__ = ["DenseRetriever"]


class DenseRetriever:
    r"""A ``Retriever`` over an index that ``build_dense`` made. Threads may share it.

    Example::

        DenseRetriever(Path("index")).search(["Karo Venner mentor"], topk=1)
        # [[Document(id="17", contents='"Karo Venner"\n...', score=0.83)]]
    """

    def __init__(
        self,
        directory: Path | str,
        model: str | None = None,
        device: str = "cpu",
        index_device: str = "cpu",
        nprobe: int = 32,
        ef_search: int = 64,
        batch_size: int = 32,
        cached_queries: int = 10_000,
    ) -> None:
        """Map the index and load the encoder.

        Args:
            directory: what ``build_dense`` wrote.
            model: where the index' encoder is now, if it has moved.
            device: where queries are encoded, such as ``cpu`` or ``cuda``.
            index_device: where vectors are compared: ``cpu`` by faiss; on another device, for type
                Flat only, by torch, with the vectors copied there as float16.
            nprobe: lists that an IVF index looks into; more find more and take longer.
            ef_search: candidates that an HNSW index keeps; as ``nprobe``.
            batch_size: queries per forward pass.
            cached_queries: vectors of the latest queries that are kept.

        Raises:
            ToolError: the index is missing, incomplete, or its corpus has gone or changed; faiss
                is not installed; a setting that cannot be.
            ModelError: there is no usable encoder.
        """
        check_counts("dense", nprobe=nprobe, ef_search=ef_search, batch_size=batch_size)
        check_counts("dense", least=0, cached_queries=cached_queries)
        directory = Path(directory)
        self.manifest = read_manifest(directory, "dense")
        self._corpus = open_corpus(directory, self.manifest)
        self._index = _mapped(directory, self.manifest)
        self._nprobe = nprobe
        self._ef_search = ef_search
        self._on_device = (
            None if index_device == "cpu" else TorchFlat(flat_vectors(self._index), index_device)
        )
        encoder = EncoderSettings(**self.manifest["options"]["encoder"])
        if model is not None:
            encoder = replace(encoder, model=model)
        embedder = encoder.load(encoder.query_prefix, batch_size, device)
        self._encode = _QueryEncoder(embedder, cached_queries)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query the documents with the highest inner product, at most ``topk``.

        A blank query finds nothing.

        Raises:
            ToolError: the encoder's vectors do not have the length of the index'.
        """
        found: list[list[Document]] = [[] for _ in queries]
        asked = [place for place, query in enumerate(queries) if query.strip()]
        if not asked:
            return found
        vectors = self._encode([plain_text(queries[place]) for place in asked])
        if vectors.shape[1] != self.manifest["dimension"]:
            raise ToolError(
                f"dense: the encoder gives {vectors.shape[1]} numbers, the index was built with "
                f"{self.manifest['dimension']}: give the encoder it was built with"
            )
        scores, rows = self._nearest(vectors, topk)
        for place, best, at in zip(asked, scores.tolist(), rows.tolist(), strict=True):
            pairs = zip(at, best, strict=True)
            found[place] = [self._corpus.document(row, score) for row, score in pairs if row >= 0]
        return found

    def _nearest(
        self, vectors: NDArray[np.float32], topk: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if self._on_device is not None:
            return self._on_device.search(vectors, topk)
        return search_faiss(self._index, vectors, topk, self._nprobe, self._ef_search)


def _mapped(directory: Path, manifest: Mapping[str, Any]) -> Any:
    """The faiss index, which must hold a vector of the right length for each document."""
    path = directory / manifest["index"]
    index, wanted = map_faiss(path), (manifest["num_docs"], manifest["dimension"])
    if (index.ntotal, index.d) != wanted:
        raise ToolError(
            f"{path}: holds {index.ntotal} vectors of length {index.d}, where the index was built "
            f"with {wanted[0]} of length {wanted[1]}; build it again"
        )
    return index


class _QueryEncoder:
    """Vectors of queries, the latest of which are remembered. One thread at a time encodes."""

    def __init__(self, embedder: EncoderEmbedder, size: int) -> None:
        self._embedder = embedder
        self._size = size
        self._known: OrderedDict[str, NDArray[np.float32]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, queries: Sequence[str]) -> NDArray[np.float32]:
        """[num_queries, dimension]."""
        with self._lock:
            new = [query for query in dict.fromkeys(queries) if query not in self._known]
            if new:
                self._known.update(zip(new, self._embedder.embed(new), strict=True))
            for query in queries:
                self._known.move_to_end(query)
            vectors = np.stack([self._known[query] for query in queries])
            while len(self._known) > self._size:
                self._known.popitem(last=False)
        return vectors
