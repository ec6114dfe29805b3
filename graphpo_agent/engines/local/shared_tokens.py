"""Which tokens of a graph are one: the same token behind the same text.

Siblings that begin alike, the same call made twice and what it returned, answers that agree to
their end: what stands at the beginning of several paths has the same hidden states in all of them
and is computed once, however many edges sampled it.

Paths are told apart by a rolling hash, and what it calls the same is compared.

Shapes: N tokens of all samples, joined; n nodes of all samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.engines.local.arrays import levels, ranges
from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.graph.forest import joined_parents
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["SharedTokens", "shared_tokens"]

_HashArray = NDArray[np.uint64]
_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 2**64)


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The tokens of some samples as tries.

    Example: prompt ``[5, 6]``, two edges ``[7, 8]`` and ``[7, 9]`` behind it::

        same     = [0, 1, 2, 3, 2, 5]
        previous = [-1, 0, 1, 2, 1, 2]

    Attributes:
        same: [N] the first place of a token behind the same tokens of the same sample.
        previous: [N] that of the token before it on its path; -1 at a prompt's first.
    """

    same: IntArray
    previous: IntArray


def shared_tokens(samples: Sequence[TrainingSample]) -> SharedTokens:
    """Find the tokens that follow the same text; those of different samples are apart."""
    lengths = np.concatenate([np.diff(sample.offsets) for sample in samples])
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    parent = joined_parents([sample.parent for sample in samples])
    node, within = np.repeat(np.arange(len(parent)), lengths), ranges(lengths)
    above, hashed = _paths(parent, lengths, token_ids)
    before = np.where(within > 0, np.arange(len(node)) - 1, above[node])
    _, first, group = np.unique(hashed, return_index=True, return_inverse=True)
    same = first[group]
    previous = np.where(before >= 0, same[before], -1)
    if (token_ids[same] != token_ids).any() or (previous[same] != previous).any():
        return SharedTokens(np.arange(len(node)), before)  # hashes of different paths collide
    return SharedTokens(same, previous)


def _paths(parent: IntArray, lengths: IntArray, token_ids: IntArray) -> tuple[IntArray, _HashArray]:
    """[n] the place of the last token above each node, [N] a hash of each token's whole path."""
    num_tokens, ends = len(token_ids), np.cumsum(lengths)
    powers, inverses = _powers(_BASE, num_tokens), _powers(_BASE_INVERSE, num_tokens)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(token_ids) * inverses[:-1])])
    own = (sums[ends] - sums[ends - lengths]) * powers[np.maximum(ends - 1, 0)]
    above = np.full(len(parent), -1)
    carried = _mixed(-1 - np.arange(len(parent)))  # of the roots, each its own
    whole = np.empty_like(carried)
    for nodes in levels(parent):
        up = parent[nodes]
        if (up >= 0).all():
            carried[nodes] = whole[up]
            above[nodes] = np.where(lengths[up] > 0, ends[up] - 1, above[up])
        whole[nodes] = carried[nodes] * powers[lengths[nodes]] + own[nodes]
    node = np.repeat(np.arange(len(parent)), lengths)
    begun = (sums[1:] - sums[(ends - lengths)[node]]) * powers[:-1]
    return above, carried[node] * powers[ranges(lengths) + 1] + begun


def _powers(base: int, count: int) -> _HashArray:
    """``base`` to the powers 0 … count, modulo 2^64."""
    factors = np.full(count + 1, base, np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def _mixed(values: IntArray) -> _HashArray:
    """Numbers without structure, one for each value (the finaliser of MurmurHash3)."""
    mixed = values.astype(np.uint64)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed
