"""Text to vectors through a server: OpenAI-compatible ``/embeddings``, or TEI's ``/embed``."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ToolError
from graphpo_agent.net.chat import classify_openai
from graphpo_agent.net.checks import check_counts
from graphpo_agent.net.client import HttpService, Limits, Reply, Verdict
from graphpo_agent.net.failures import CallFailed, FailureTally
from graphpo_agent.net.parallel import in_threads
from graphpo_agent.net.secrets import bearer
from graphpo_agent.net.store import CallStore

__all__ = ["OpenAIEmbedder", "TeiEmbedder"]

_ANY_TEXT = "dimension"
"""Embedded to learn the dimension where there is no text to embed."""


class _ServedEmbedder:
    """What both wire formats share; an ``Embedder``. Threads share it.

    Equal texts of one call are sent once. A text of white space alone is a row of zeros, and so is
    a text for which the server gave no vector in all tries (an outage, or a text it refuses), or
    one of zeros or not of finite numbers: such a row is similar to nothing. With a store every text
    is a request of its own, so that an answer is found again whichever texts came together.
    """

    def __init__(
        self,
        service: HttpService,
        url: str,
        *,
        request_body: Callable[[list[str]], Any],
        read: Callable[[Any], Any],
        batch_size: int,
        concurrency: int,
        prefix: str,
    ) -> None:
        check_counts("embeddings", batch_size=batch_size)
        self._service = service
        self._url = url
        self._request_body = request_body
        self._read = read
        self._batch_size = batch_size
        self._concurrency = concurrency
        self._prefix = prefix
        self._dimension: int | None = None
        self._lock = threading.Lock()  # of the dimension
        self._tally = FailureTally()

    @property
    def counts(self) -> Mapping[str, int]:
        """Texts without a vector so far."""
        return {"embedder/failed": self._tally.failed}

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[num_texts, dimension]; see the class for rows of zeros.

        Raises:
            ToolError: key, address or model are wrong; the quota is used up; or no text has had a
                vector yet, so that not even the dimension is known.
        """
        unique = list(dict.fromkeys(text for text in texts if text.strip()))
        if not unique and self._dimension is None:
            unique = [_ANY_TEXT]
        starts = range(0, len(unique), self._batch_size)
        batches = [unique[start : start + self._batch_size] for start in starts]
        found = in_threads(self._batch, batches, self._concurrency)
        self._tally.check("no text could be embedded")
        assert self._dimension is not None
        by_text = {text: vector for vectors in found for text, vector in vectors.items()}
        rows = np.zeros((len(texts), self._dimension), np.float32)
        for row, text in zip(rows, texts, strict=True):
            if text in by_text:
                row[:] = by_text[text]
        return rows

    def _batch(self, texts: list[str]) -> dict[str, NDArray[np.float32]]:
        """The vectors of those texts that have one."""
        try:
            vectors = self._call(texts)
        except CallFailed as failure:
            if failure.kind == "bad_arguments" and len(texts) > 1:  # one of them, or too many
                return {key: value for text in texts for key, value in self._batch([text]).items()}
            self._tally.fail(str(failure), len(texts))
            return {}
        usable = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        if usable.any():
            self._tally.answer()
        lost = int((~usable).sum())
        self._tally.fail(f"{self._url} returned vectors of zeros, or not of finite numbers", lost)
        return {texts[i]: vectors[i] for i in np.flatnonzero(usable)}

    def _call(self, texts: list[str]) -> NDArray[np.float32]:
        """[len(texts), dimension]."""
        body = self._request_body([self._prefix + text for text in texts])
        vectors = _as_matrix(self._read(self._service.call("POST", self._url, body=body).json()))
        assert vectors is not None
        with self._lock:
            if self._dimension is None:
                self._dimension = vectors.shape[1]
            if vectors.shape != (len(texts), self._dimension):
                raise ToolError(
                    f"{self._url} returned {vectors.shape[0]} vectors of {vectors.shape[1]} "
                    f"numbers for {len(texts)} texts, not {len(texts)} of {self._dimension}; "
                    "use one model for a whole run"
                )
        return vectors


class OpenAIEmbedder(_ServedEmbedder):
    """An embeddings model behind an OpenAI-compatible endpoint (OpenAI, vLLM, llama.cpp, TEI).

    Example::

        embedder = OpenAIEmbedder("http://127.0.0.1:8000/v1", "intfloat/e5-base-v2")
        embedder.embed(["known: 3 4"]).shape == (1, 768)
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        batch_size: int = 64,
        prefix: str = "",
        deadline_s: float = 60.0,
        tries: int = 3,
        concurrency: int = 8,
        per_second: float | None = None,
        store: CallStore | None = None,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            base_url: up to and without ``/embeddings``.
            model: as the server names it.
            api_key_env: the environment variable that holds the key; None: no key is sent.
            batch_size: texts of one request.
            prefix: written before every text, as in ``EncoderEmbedder``.
            deadline_s: see ``graphpo_agent.net.client.Limits``, as the next three.
            tries: of one request.
            concurrency: requests at once.
            per_second: requests per second.
            store: where answers are recorded and taken from.

        Raises:
            ToolError: the variable is not set, or a limit makes no sense.
        """
        limits = Limits(
            deadline_s=deadline_s, tries=tries, concurrency=concurrency, per_second=per_second
        )
        super().__init__(
            HttpService(
                f"embeddings model {model}",
                limits=limits,
                secret_headers=bearer(api_key_env, store),
                store=store,
                classify=_classify(_read_openai),
            ),
            f"{base_url.rstrip('/')}/embeddings",
            request_body=lambda texts: {"model": model, "input": texts},
            read=_read_openai,
            batch_size=1 if store else batch_size,
            concurrency=concurrency,
            prefix=prefix,
        )


class TeiEmbedder(_ServedEmbedder):
    """A Hugging Face text-embeddings-inference server; long texts lose their end there.

    Example::

        TeiEmbedder("http://127.0.0.1:8080", prefix="query: ").embed(["known: 3 4"])
    """

    def __init__(
        self,
        url: str,
        *,
        batch_size: int = 32,
        prefix: str = "",
        deadline_s: float = 60.0,
        tries: int = 3,
        concurrency: int = 8,
        per_second: float | None = None,
        store: CallStore | None = None,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            url: the server's, up to and without ``/embed``.
            batch_size: texts of one request; the server's own limit is 32 unless it is told so.
            prefix: written before every text, as in ``EncoderEmbedder``.
            deadline_s: see ``graphpo_agent.net.client.Limits``, as the next three.
            tries: of one request.
            concurrency: requests at once.
            per_second: requests per second.
            store: where answers are recorded and taken from.

        Raises:
            ToolError: a limit makes no sense.
        """
        limits = Limits(
            deadline_s=deadline_s, tries=tries, concurrency=concurrency, per_second=per_second
        )
        super().__init__(
            HttpService(
                "embeddings server", limits=limits, store=store, classify=_classify(_read_tei)
            ),
            f"{url.rstrip('/')}/embed",
            request_body=lambda texts: {"inputs": texts, "truncate": True},
            read=_read_tei,
            batch_size=1 if store else batch_size,
            concurrency=concurrency,
            prefix=prefix,
        )


def _classify(read: Callable[[Any], Any]) -> Callable[[Reply], Verdict]:
    """As ``classify_openai``; an answer that holds no vectors is transient."""

    def classify(reply: Reply) -> Verdict:
        verdict = classify_openai(reply)
        if verdict is None and _as_matrix(read(reply.json())) is None:
            return "transient"
        return verdict

    return classify


def _read_openai(answer: Any) -> Any:
    """The rows of ``{"data": [{"index": 0, "embedding": [...]}, ...]}``, by index."""
    match answer:
        case {"data": [*entries]} if all(
            isinstance(entry, Mapping) and isinstance(entry.get("index"), int) for entry in entries
        ):
            ordered = sorted(entries, key=lambda entry: entry["index"])
            return [entry.get("embedding") for entry in ordered]
        case _:
            return None


def _read_tei(answer: Any) -> Any:
    """The rows of ``[[...], ...]``."""
    return answer


def _as_matrix(rows: Any) -> NDArray[np.float32] | None:
    """Rows of equally many numbers, at least one row finite; None for anything else, or nothing."""
    try:
        matrix = np.array(rows, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        return None
    usable = matrix.ndim == 2 and matrix.size and np.isfinite(matrix).all(axis=1).any()
    return matrix if usable else None
