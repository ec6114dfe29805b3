"""Several retrievers as one: reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from graphpo_agent.errors import ToolError
from graphpo_agent.net.checks import check_counts
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.protocols import Retriever
from graphpo_agent.types import Document
from retrievers.together import Answer, answers_of, settle

__all__ = ["HybridRetriever", "fuse"]


class HybridRetriever:
    """A ``Retriever`` that asks several ones over the same documents and fuses their rankings.

    Example::

        HybridRetriever([Bm25Retriever("bm25"), DenseRetriever("dense")], depth=100)
    """

    def __init__(self, retrievers: Sequence[Retriever], depth: int = 100, k: float = 60.0) -> None:
        """Fuse the first ``depth`` documents of each.

        Args:
            retrievers: two or more; equal ids mean the same document.
            depth: documents asked of each retriever, or ``topk`` if that is more.
            k: how little the first ranks stand out; 60 in the paper.

        Raises:
            ToolError: an argument that cannot be.
        """
        if len(retrievers) < 2:
            raise ToolError(f"hybrid: needs at least 2 retrievers, found {len(retrievers)}")
        for retriever in retrievers:
            if not isinstance(retriever, Retriever):
                raise ToolError(f"hybrid: retriever {retriever!r} has no search method")
        check_counts("hybrid", depth=depth)
        if not 0 <= k < math.inf:
            raise ToolError(f"hybrid: k must not be below 0, found {k}")
        self._retrievers = tuple(retrievers)
        self._depth = depth
        self._k = k

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query the documents with the highest fused score, at most ``topk``.

        Raises:
            PartlyFailed: one of the retrievers gave no answer to a query.
        """
        depth = max(self._depth, topk)
        answers = [answers_of(retriever, queries, depth) for retriever in self._retrievers]
        return settle([self._fused(each, topk) for each in zip(*answers, strict=True)])

    def _fused(self, answers: Sequence[Answer], topk: int) -> Answer:
        """One query's answers as one; a failure where there is one."""
        rankings: list[list[Document]] = []
        for answer in answers:
            if isinstance(answer, CallFailed):
                return answer
            rankings.append(answer)
        return fuse(rankings, self._k)[:topk]


def fuse(rankings: Sequence[Sequence[Document]], k: float) -> list[Document]:
    """All documents of some rankings by the sum of ``1 / (k + rank)``, ranks from 1.

    Their scores are these sums. Equal sums are in the order in which they were met, the rankings
    one after the other.

    Example: with k = 0 the rankings (a, b) and (b) give b with 1.5, then a with 1.
    """
    documents: dict[str, Document] = {}
    terms: dict[str, list[float]] = {}
    for ranking in rankings:
        for rank, document in enumerate(ranking, start=1):
            documents.setdefault(document.id, document)
            terms.setdefault(document.id, []).append(1 / (k + rank))
    scores = {id_: math.fsum(own) for id_, own in terms.items()}  # equal whatever the order
    best = sorted(scores, key=lambda id_: -scores[id_])
    return [replace(documents[id_], score=scores[id_]) for id_ in best]
