"""Documents in the order of a cross-encoder, which reads query and document together."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from graphpo_agent.errors import ModelError, ToolError
from graphpo_agent.net.checks import check_counts
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.plain_text import plain_text
from graphpo_agent.pretrained import load_pretrained, most_tokens
from graphpo_agent.protocols import Retriever
from graphpo_agent.types import Document
from retrievers.encoders import check_device
from retrievers.together import answers_of, settle

__all__ = ["RerankRetriever"]


class RerankRetriever:
    """A ``Retriever`` that sorts what another one finds. Threads may share it.

    Example::

        RerankRetriever(Bm25Retriever("index"), "BAAI/bge-reranker-base", depth=20)
    """

    def __init__(
        self,
        retriever: Retriever,
        model: str | Path,
        depth: int = 20,
        batch_size: int = 32,
        device: str = "cpu",
        max_tokens: int = 512,
    ) -> None:
        """Load the cross-encoder.

        Args:
            retriever: finds the documents to sort.
            model: a directory in the Hugging Face layout, or a model name: a sequence classifier
                with one label (its logit is the score), or two (the second's over the first's).
            depth: documents that are sorted for a query, or ``topk`` if that is more.
            batch_size: pairs per forward pass.
            device: where the cross-encoder runs.
            max_tokens: in longer pairs the longer text, as a rule the document, loses its end; no
                more than tokenizer and model allow.

        Raises:
            ModelError: there is no usable cross-encoder at ``model``.
            ToolError: an argument that cannot be, or there is no such device.
        """
        if not isinstance(retriever, Retriever):
            raise ToolError(f"rerank: retriever {retriever!r} has no search method")
        check_counts("rerank", depth=depth, batch_size=batch_size, max_tokens=max_tokens)
        check_device(device)
        self._retriever = retriever
        self._tokenizer, self._model = load_pretrained(
            "sequence classifier", str(model), AutoModelForSequenceClassification, device=device
        )
        labels = self._model.config.num_labels
        if labels not in (1, 2):
            raise ModelError(f"cross-encoder {model} has {labels} labels; it must have 1 or 2")
        self._depth = depth
        self._batch_size = batch_size
        self._device = device
        self._max_tokens = min(max_tokens, most_tokens(self._tokenizer, self._model))
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query its own documents with the highest scores, at most ``topk``.

        Equal scores stay in the order of the first retriever.

        Raises:
            PartlyFailed: the first retriever gave no answer to a query.
        """
        found = answers_of(self._retriever, queries, max(self._depth, topk))
        pairs = [
            [] if isinstance(answer, CallFailed) else [_pair(query, each) for each in answer]
            for query, answer in zip(queries, found, strict=True)
        ]
        scores = self._scores({pair for each in pairs for pair in each})
        return settle(
            [
                answer
                if isinstance(answer, CallFailed)
                else _best(answer, [scores[pair] for pair in each], topk)
                for answer, each in zip(found, pairs, strict=True)
            ]
        )

    def _scores(self, pairs: set[tuple[str, str]]) -> dict[tuple[str, str], float]:
        """Pairs of like length go through the model together; the batches are reproducible."""
        ordered = sorted(pairs, key=lambda pair: (len(pair[0]) + len(pair[1]), pair))
        scores: list[float] = []
        with self._lock:
            for start in range(0, len(ordered), self._batch_size):
                scores += self._forward(ordered[start : start + self._batch_size])
        return dict(zip(ordered, scores, strict=True))

    @torch.inference_mode()
    def _forward(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        tokens = self._tokenizer(
            [query for query, _ in pairs],
            [text for _, text in pairs],
            padding=True,
            truncation="longest_first",
            max_length=self._max_tokens,
            return_tensors="pt",
        )
        logits = self._model(**tokens.to(self._device)).logits.float().cpu()
        return (logits[:, -1] - logits[:, 0] if logits.shape[1] == 2 else logits[:, 0]).tolist()


def _pair(query: str, document: Document) -> tuple[str, str]:
    return plain_text(query), plain_text(document.contents)


def _best(documents: Sequence[Document], scores: Sequence[float], topk: int) -> list[Document]:
    order = sorted(range(len(documents)), key=lambda place: -scores[place])
    return [replace(documents[place], score=scores[place]) for place in order[:topk]]
