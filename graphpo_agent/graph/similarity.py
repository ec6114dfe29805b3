"""Cosines: screened in float32, decided in float64 (paper, section 3.2).

Similarities are compared and sorted after rounding to ``DECIMALS`` decimals, so that ties do not
depend on rounding noise. A row of zeros has cosine 0 with everything.
"""

from collections.abc import Iterator
from typing import cast

import numpy as np

from graphpo_agent.graph.arrays import BoolArray, EmbeddingArray, Float32Array, FloatArray, IntArray

__all__ = [
    "DECIMALS",
    "cosine_pairs",
    "cosine_rows",
    "parent_cosines",
    "similar_pairs",
    "unit_rows",
]

DECIMALS = 6
_BLOCK = 1024  # rows of a product: 4 MB of float32 similarities at a time
_CACHED_NUMBERS = 65_536  # numbers converted to float64 at a time, so that they stay in the cache


def unit_rows(embeddings: EmbeddingArray, rows: IntArray) -> FloatArray:
    """[len(rows), d] rows scaled to length 1 in float64; rows of zeros stay zero."""
    x = embeddings[rows].astype(np.float64)
    peak = np.abs(x).max(axis=1, initial=0.0)
    x /= np.where(peak > 0, peak, 1.0)[:, None]
    norm = np.sqrt(np.vecdot(x, x))
    x /= np.where(norm > 0, norm, 1.0)[:, None]
    return x


def cosine_pairs(embeddings: EmbeddingArray, i: IntArray, j: IntArray) -> FloatArray:
    """The rounded cosine of each pair of rows."""
    nodes, places = np.unique(np.concatenate([i, j]), return_inverse=True)
    a, b = places[: len(i)], places[len(i) :]
    out = np.empty(len(i))
    if len(nodes) ** 2 <= 32 * len(i) and len(nodes) <= 4096:
        unit = unit_rows(embeddings, nodes)
        out[:] = (unit @ unit.T)[a, b]
    else:
        step = max(1, 8 * _CACHED_NUMBERS // embeddings.shape[1])
        for s in range(0, len(i), step):
            left = unit_rows(embeddings, i[s : s + step])
            out[s : s + step] = np.vecdot(left, unit_rows(embeddings, j[s : s + step]))
    return np.round(out, DECIMALS)


def cosine_rows(embeddings: EmbeddingArray, rows: IntArray, columns: IntArray) -> FloatArray:
    """[len(rows), len(columns)] rounded cosines."""
    return np.round(unit_rows(embeddings, rows) @ unit_rows(embeddings, columns).T, DECIMALS)


def parent_cosines(embeddings: EmbeddingArray, parent: IntArray) -> FloatArray:
    """[n] the cosine of each node with its parent, float64 and unrounded; 0 at the root."""
    x = embeddings
    if x.dtype == np.float64:  # numbers whose squares float64 may not hold
        x = unit_rows(x, np.arange(len(x)))
    dot, square = np.zeros(len(x)), np.zeros(len(x))
    step = max(1, _CACHED_NUMBERS // x.shape[1])
    for s in range(0, len(x), step):
        child = x[s : s + step].astype(np.float64)
        square[s : s + step] = np.vecdot(child, child)
        dot[s : s + step] = np.vecdot(child, x[parent[s : s + step]].astype(np.float64))
    lengths = np.sqrt(square * square[parent])
    known = (lengths > 0) & (parent >= 0)
    return np.divide(dot, lengths, out=np.zeros(len(x)), where=known)


def similar_pairs(
    embeddings: EmbeddingArray, rows: IntArray, threshold: float
) -> tuple[IntArray, IntArray]:
    """All pairs ``i < j`` of ``rows`` whose rounded cosine is at least ``threshold``.

    Products are float32, in blocks; pairs that float32 cannot decide are computed in float64.

    Args:
        embeddings: [n, d].
        rows: ascending positions to compare.
        threshold: in (0, 1].
    """
    # A float32 dot product of d terms errs by at most d · 2^-24 · |x||y|; so do both norms.
    slack = 10.0**-DECIMALS + 3 * (embeddings.shape[1] + 8) * 2.0**-24
    left: list[IntArray] = []
    right: list[IntArray] = []
    sure: list[BoolArray] = []
    for i, j, cosine in _screen(embeddings, rows, threshold - slack):
        left.append(i)
        right.append(j)
        sure.append(cosine >= threshold + slack)
    if not left:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    i, j, keep = np.concatenate(left), np.concatenate(right), np.concatenate(sure)
    doubtful = np.flatnonzero(~keep)
    if len(doubtful):
        keep[doubtful] = cosine_pairs(embeddings, i[doubtful], j[doubtful]) >= threshold
    return i[keep], j[keep]


def _screen(
    embeddings: EmbeddingArray, rows: IntArray, threshold: float
) -> Iterator[tuple[IntArray, IntArray, Float32Array]]:
    """Pairs ``i < j`` with a float32 cosine of at least ``threshold``, block by block."""
    blocks = [rows[s : s + _BLOCK] for s in range(0, len(rows), _BLOCK)]
    for b, block in enumerate(blocks):
        x, scale = _scaled_rows(embeddings, block)
        for a in range(b + 1):
            y, other = (x, scale) if a == b else _scaled_rows(embeddings, blocks[a])
            cosine = y @ x.T
            cosine *= other[:, None]
            cosine *= scale
            place = np.flatnonzero(cosine >= threshold)
            i, j = blocks[a][place // len(block)], block[place % len(block)]
            upper = i < j
            yield i[upper], j[upper], cosine.ravel()[place[upper]]


def _scaled_rows(embeddings: EmbeddingArray, rows: IntArray) -> tuple[Float32Array, Float32Array]:
    """float32 rows (a view where they follow each other) and the factors to length 1."""
    together = rows[-1] - rows[0] + 1 == len(rows)
    x = embeddings[rows[0] : rows[-1] + 1] if together else embeddings[rows]
    if x.dtype == np.float32:
        with np.errstate(over="ignore"):
            square = np.vecdot(x, x)
        if ((square > 1e-20) & (square < 1e30)).all():
            return cast(Float32Array, x), 1 / np.sqrt(square)
    unit = unit_rows(embeddings, rows).astype(np.float32)
    return unit, np.ones(len(rows), np.float32)
