"""Attention of single queries to the paths they end, read where they lie, on a CPU.

Paths that share a prefix read the same keys and values, which the processor's caches then hold:
siblings computed one after another cost little more than what they do not share.

Shapes: R rows, H query heads, K key/value heads (H = G K), D dimensions of a key, Dv of a value,
S slots, C slots of the longest path there is room for, T tokens of the longest path.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphpo_agent.engines.local.compiled import compiled
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.graph.arrays import IntArray

__all__ = ["path_attention"]

_SCORES_AT_ONCE = 2**18
"""Scores computed together in each thread; they stay in a core's cache."""
_PRODUCTS_OF_A_THREAD = 2**18
"""Fewer are done before a thread has begun with them."""


def path_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: NDArray[np.int32],
    lengths: IntArray,
    scoring: Scoring,
) -> Tensor:
    """[R, H, Dv] softmax attention of every row's query to its path.

    Args:
        queries: [R, H, D] float32 or float64.
        keys: [S, K, D] of all tokens.
        values: [S, K, Dv].
        slots: [R, C] int32, where each path's tokens lie, in its first columns.
        lengths: [R] tokens of each path.
        scoring: the layer's.
    """
    num_heads, dim = queries.shape[1], values.shape[2]
    ends, with_sinks = lengths, scoring.sinks is not None
    lengths = ends if scoring.window is None else np.minimum(ends, scoring.window)
    scaled = (queries * scoring.scaling).contiguous().numpy()
    out = torch.empty((*queries.shape[:2], dim), dtype=queries.dtype)
    for part in _blocks(lengths, num_heads):
        paths, end, own = slots[part], ends[part], lengths[part]
        longest = int(own.max())
        scores = torch.empty((len(own), num_heads, longest + with_sinks), dtype=queries.dtype)
        size = num_heads * dim * int(own.sum())
        given = scaled[part], keys.numpy(), paths, end, own
        _over_rows(_dot_products, size, scores.numpy(), *given)
        if scoring.cap is not None:
            scores = scoring.bounded(scores).masked_fill_(scores.isinf(), -torch.inf)
        if scoring.sinks is not None:
            scores[:, :, longest] = scoring.sinks
        weights = scores.softmax(-1).numpy()
        _over_rows(_weighted_sums, size, out.numpy()[part], weights, values.numpy(), *given[2:])
    return out


def _blocks(lengths: IntArray, num_heads: int) -> Iterator[slice]:
    """Consecutive rows that are computed together, padded to the longest of them."""
    most = _SCORES_AT_ONCE * torch.get_num_threads() // num_heads
    start = 0
    while start < len(lengths):
        left = lengths[start:]
        padded = np.maximum.accumulate(left) * np.arange(1, len(left) + 1)
        count = max(1, int(np.searchsorted(padded, most, side="right")))
        yield slice(start, start + count)
        start += count


def _over_rows(
    kernel: Callable[..., None],
    num_products: int,
    out: NDArray[Any],
    rows: NDArray[Any],
    tokens: NDArray[Any],
    slots: NDArray[np.int32],
    ends: IntArray,
    lengths: IntArray,
) -> None:
    """Run a kernel on all rows, a part of them in each of torch's threads if it is worth it."""
    num_threads = min(torch.get_num_threads(), len(rows), num_products // _PRODUCTS_OF_A_THREAD)
    if num_threads < 2:
        kernel(out, rows, tokens, slots, ends, lengths)
        return
    bounds = np.linspace(0, len(rows), num_threads + 1).astype(int)
    parts = [slice(start, end) for start, end in pairwise(bounds)]
    threads = _threads(torch.get_num_threads())
    work = [
        threads.submit(kernel, out[p], rows[p], tokens, slots[p], ends[p], lengths[p])
        for p in parts
    ]
    for one in work:
        one.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "path-attention")


_kernel = compiled(
    nogil=True,
    error_model="numpy",
    fastmath={"reassoc", "contract", "nsz"},  # sums in any order; what is not a number stays so
)


@_kernel
def _dot_products(
    scores: NDArray[Any],
    queries: NDArray[Any],
    keys: NDArray[Any],
    slots: NDArray[np.int32],
    ends: IntArray,
    lengths: IntArray,
) -> None:
    """Write [R, H, T] dot products with the last ``lengths`` tokens of paths; -inf behind them."""
    num_rows, num_heads, dim = queries.shape
    group = num_heads // keys.shape[1]
    for row in range(num_rows):
        length = lengths[row]
        path = slots[row, ends[row] - length : ends[row]]
        for head in range(num_heads):
            query = queries[row, head]
            for column in range(length):
                key = keys[path[column], head // group]
                total = queries.dtype.type(0.0)
                for i in range(dim):
                    total += query[i] * key[i]
                scores[row, head, column] = total
            scores[row, head, length:] = -np.inf


@_kernel
def _weighted_sums(
    out: NDArray[Any],
    weights: NDArray[Any],
    values: NDArray[Any],
    slots: NDArray[np.int32],
    ends: IntArray,
    lengths: IntArray,
) -> None:
    """Write [R, H, Dv] sums of the values of these tokens, weighted with [R, H, T]."""
    num_rows, num_heads, dim = out.shape
    group = num_heads // values.shape[1]
    for row in range(num_rows):
        path = slots[row, ends[row] - lengths[row] : ends[row]]
        for head in range(num_heads):
            total = out[row, head]
            total[:] = 0.0
            for column in range(lengths[row]):
                value = values[path[column], head // group]
                weight = weights[row, head, column]
                for i in range(dim):
                    total[i] += weight * value[i]
