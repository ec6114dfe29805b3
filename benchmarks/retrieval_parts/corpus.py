"""A generated corpus and its queries: words of a made-up language with Zipf's frequencies."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["make_queries", "make_vectors", "write_corpus"]

_SYLLABLES = [c + v + e for c in "bdfgklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "l")]
_ENDINGS = ("", "", "", "s", "ed", "ing", "ly", "ness")
_NUM_WORDS = 50_000
_MEAN_WORDS = 80


def _vocabulary(rng: np.random.Generator) -> list[str]:
    """Distinct words; the stems of some differ only by an English ending."""
    count = 2 * _NUM_WORDS
    syllables = rng.integers(len(_SYLLABLES), size=(count, 4)).tolist()
    lengths = rng.integers(2, 5, size=count).tolist()
    endings = rng.integers(len(_ENDINGS), size=count).tolist()
    words = {
        "".join(_SYLLABLES[each] for each in parts[:length]) + _ENDINGS[ending]
        for parts, length, ending in zip(syllables, lengths, endings, strict=True)
    }
    return sorted(words)[:_NUM_WORDS]


def write_corpus(path: Path, num_docs: int) -> list[list[str]]:
    """Write Search-R1's JSONL; returns the words of every document, its two title words first."""
    rng = np.random.default_rng(0)
    words = np.array(_vocabulary(rng), dtype=object)
    rng.shuffle(words)
    frequencies = 1.0 / np.arange(1, len(words) + 1)
    cumulative = np.cumsum(frequencies / frequencies.sum())
    lengths = rng.lognormal(np.log(_MEAN_WORDS), 0.4, num_docs).astype(int) + 5
    documents = []
    with path.open("w") as file:
        for number, length in enumerate(lengths.tolist()):
            places = np.minimum(cumulative.searchsorted(rng.random(length)), len(words) - 1)
            title = words[rng.integers(len(words) // 10, len(words), 2)].tolist()
            body = words[places].tolist()
            contents = f'"{" ".join(title)}"\n{" ".join(body)}'
            file.write(json.dumps({"id": str(number), "contents": contents}) + "\n")
            documents.append(title + body)
    return documents


def make_queries(documents: Sequence[list[str]], count: int) -> list[str]:
    """Distinct queries: a title word and four words of the body of some document."""
    rng = np.random.default_rng(1)
    queries: dict[str, None] = {}
    while len(queries) < count:
        words = documents[int(rng.integers(len(documents)))]
        body = [words[place] for place in rng.integers(2, len(words), 4).tolist()]
        queries[" ".join([words[int(rng.integers(2))], *body])] = None
    return list(queries)


def make_vectors(
    num_docs: int, num_queries: int, dimension: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unit vectors in Gaussian clusters of about 100, and queries near some of them.

    Recall on them ranks index types; on a real encoder's vectors it is another number.

    Returns:
        [num_docs, dimension] and [num_queries, dimension].
    """
    rng = np.random.default_rng(2)
    centres = rng.standard_normal((max(1, num_docs // 100), dimension), dtype=np.float32)
    noise = rng.standard_normal((num_docs, dimension), dtype=np.float32)
    vectors = centres[rng.integers(len(centres), size=num_docs)] + np.float32(0.7) * noise
    drift = rng.standard_normal((num_queries, dimension), dtype=np.float32)
    queries = vectors[rng.integers(num_docs, size=num_queries)] + np.float32(0.5) * drift
    return _unit(vectors), _unit(queries)


def _unit(rows: NDArray[Any]) -> NDArray[np.float32]:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32, copy=False)
