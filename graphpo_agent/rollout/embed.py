"""Text to vectors without weights. Encoders are in ``graphpo_agent.encoder``."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["HashingEmbedder"]

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)
_SIGN_BIT = np.uint64(63)


class HashingEmbedder:
    """Counts of hashed character n-grams, signed and scaled to length 1; an ``Embedder``.

    It finds near-exact duplicates only. A paraphrase of the same state is far away, and two states
    that differ in one name or number of an otherwise equal text are near: with short texts of the
    same wording even above 0.92. Where states have a key, use the key; where they have none, use
    an encoder.

    Case and the amount of white space do not count. The vectors depend on the text alone, on every
    machine and in every process.

    Example: with ``dimension=4096, ngram=3``, ``"left: 3 4"`` and ``"Left:  3 4"`` have cosine 1.
    """

    def __init__(self, dimension: int = 1024, ngram: int = 3) -> None:
        self._dimension = dimension
        self._ngram = ngram

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[num_texts, dimension]; a text without any character but spaces is a row of zeros."""
        vectors = np.zeros((len(texts), self._dimension), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            words = text.casefold().split()
            if words:
                row[:] = self._vector(f" {' '.join(words)} ")
        return vectors

    def _vector(self, text: str) -> NDArray[np.float64]:
        hashes = _hash_ngrams(text, self._ngram)
        buckets = (hashes % np.uint64(self._dimension)).astype(np.int64)
        signs = 1.0 - 2.0 * (hashes >> _SIGN_BIT)
        counts = np.zeros(self._dimension)
        np.add.at(counts, buckets, signs)
        norm = np.linalg.norm(counts)
        return counts if norm == 0 else counts / norm


def _hash_ngrams(text: str, ngram: int) -> NDArray[np.uint64]:
    """[number of n-grams] a 64-bit hash of every run of ``ngram`` characters.

    A text shorter than that is one n-gram.
    """
    encoded = text.encode("utf-32-le", errors="surrogatepass")
    codes = np.frombuffer(encoded, dtype="<u4").astype(np.uint64)
    length = min(ngram, len(codes))
    num_ngrams = len(codes) - length + 1
    hashes = np.zeros(num_ngrams, dtype=np.uint64)
    for offset in range(length):
        hashes = (hashes ^ codes[offset : offset + num_ngrams]) * _MULTIPLIER
        hashes = (hashes ^ (hashes >> _SHIFT)) * _MIX
    return hashes ^ (hashes >> _SHIFT)
