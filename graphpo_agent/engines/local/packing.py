"""Rollout graphs as flat rows that hold every token once.

Each direct edge is trained once, however many paths run through it (Algorithm 1, stage 4).
The tokens of a graph are cut into *stretches*: maximal runs without a branch, of bounded length.
A stretch attends to the tokens of its own path only; stretches of similar length are computed
together as one bucket. All index building is array arithmetic over whole rows.

Shapes: N tokens of a row, M trained tokens of a row, S stretches, E stretches of a bucket,
Q longest stretch and T longest path of a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.engines.local.parts import Part, cut, whole
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["MAX_STRETCH", "Bucket", "PackedBatch", "pack", "ranges"]

IntArray = NDArray[np.int64]

MAX_STRETCH = 128
"""Longer stretches are cut: half of a stretch's own attention square is masked and lost."""
_LENGTH_RATIO = 1.5
"""Lengths within one bucket differ by at most about this factor."""
_MAX_BUCKET = 2**22
"""Stretches times queries times keys of one bucket; bounds its mask and gathered keys."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Stretches of similar length.

    Example: the stretches ``[7]`` and ``[8, 9]`` behind the prompt ``[5, 6]`` of a flat row
    ``[5, 6, 7, 8, 9]``::

        queries      = [[2, 2], [3, 4]]              # the first row is padded
        keys         = [[0, 1, 2, 2], [0, 1, 3, 4]]
        own_lengths  = [1, 2]
        path_lengths = [3, 4]

    Attributes:
        queries: [E, Q] positions in the flat row; padded with the stretch's last.
        keys: [E, T] positions of the whole path, its own tokens last; padded with the last.
        own_lengths: [E] tokens of the stretch.
        path_lengths: [E] tokens from the start of the prompt to the end of the stretch.
    """

    queries: IntArray
    keys: IntArray
    own_lengths: IntArray
    path_lengths: IntArray


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Some graphs, or parts of graphs, as one flat row.

    Attributes:
        token_ids: [N].
        position_ids: [N] place of each token on its path.
        buckets: who attends to whom; every token is a query of exactly one bucket.
        order: [N] place of each token among the padded queries of all buckets, flattened.
        exits: [N] the row is in depth-first order: token j is on the path of token i if and only
            if ``j <= i < exits[j]``.
        target_ids: [M] the trained tokens; a leaf's last is no part of the row.
        predictors: [M] positions whose hidden states predict them: the token before on the
            path, for an edge's first token the last one of its parent.
        source: [M] where each trained token stands in the concatenation of the ``token_ids`` of
            all samples that were given to ``pack``.
    """

    token_ids: IntArray
    position_ids: IntArray
    buckets: tuple[Bucket, ...]
    order: IntArray
    exits: IntArray
    target_ids: IntArray
    predictors: IntArray
    source: IntArray


def pack(samples: Sequence[TrainingSample], max_tokens: int) -> list[PackedBatch]:
    """Distribute samples over flat rows of at most ``max_tokens`` tokens, largest first.

    Tokens that no trained token follows are left out. A sample with more tokens than that is cut
    into parts that compute their common ancestors again; a row is longer than ``max_tokens`` only
    where a single path is, and then no longer than the longest path of its graph.
    """
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    parts = [
        part
        for sample, start in zip(samples, starts[:-1].tolist(), strict=True)
        for part in cut(whole(sample, start), max_tokens)
        if len(part.trained)
    ]
    if not parts:
        return []
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    rows = _first_fit([part.num_tokens for part in parts], max_tokens)
    return [_pack_row([parts[i] for i in members], token_ids) for members in rows]


def ranges(lengths: IntArray) -> IntArray:
    """``0 … n-1`` for every n of ``lengths``, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = next((b for b, free in enumerate(room) if sizes[i] <= free), None)
        if fitting is None:
            bins.append([i])
            room.append(capacity - sizes[i])
        else:
            bins[fitting].append(i)
            room[fitting] -= sizes[i]
    return bins


@dataclass(frozen=True, slots=True)
class _Forest:
    """The parts of a row as one forest in depth-first order.

    Attributes:
        parent: [nodes] the nearest ancestor that has tokens; -1 at a root.
        lengths: [nodes] computed tokens of each node.
        starts: [nodes] path tokens before each node.
        enters: [nodes] where in the row its tokens start; its descendants' follow.
        exits: [nodes] where in the row they end, its descendants' included.
        joined: [nodes] whether a node goes on without a branch where its parent ends.
    """

    parent: IntArray
    lengths: IntArray
    starts: IntArray
    enters: IntArray
    exits: IntArray
    joined: NDArray[np.bool_]


def _forest(parent: IntArray, lengths: IntArray) -> _Forest:
    while (empty := (parent >= 0) & (lengths[parent] == 0)).any():
        parent = np.where(empty, parent[parent], parent)
    starts, subtree = np.zeros_like(lengths), lengths.copy()
    levels: list[IntArray] = []
    ancestor, below = parent, np.arange(len(parent))
    while len(below):
        levels.append(below[ancestor < 0])
        below, ancestor = below[ancestor >= 0], ancestor[ancestor >= 0]
        starts[below] += lengths[ancestor]
        np.add.at(subtree, ancestor, lengths[below])
        ancestor = parent[ancestor]
    order = np.lexsort((np.arange(len(parent)), parent))
    before = np.cumsum(subtree[order]) - subtree[order]
    new_family = np.diff(parent[order], prepend=-2) != 0
    enters = np.empty_like(lengths)
    enters[order] = before - before[new_family][np.cumsum(new_family) - 1]
    for level in levels[1:]:
        enters[level] += enters[parent[level]] + lengths[parent[level]]
    followers = np.bincount(parent[(parent >= 0) & (lengths > 0)], minlength=len(parent))
    joined = (parent >= 0) & (followers[parent] == 1)
    return _Forest(parent, lengths, starts, enters, enters + subtree, joined)


def _pack_row(parts: Sequence[Part], token_ids: IntArray) -> PackedBatch:
    num_nodes = np.array([len(part.parent) for part in parts])
    shift = np.cumsum(num_nodes) - num_nodes
    parents = [np.where(p.parent >= 0, p.parent + s, -1) for p, s in zip(parts, shift, strict=True)]
    first = np.concatenate([part.first for part in parts])
    trained = np.concatenate([part.trained for part in parts])
    owner = np.concatenate([part.owner + s for part, s in zip(parts, shift, strict=True)])
    forest = _forest(np.concatenate(parents), np.concatenate([part.kept for part in parts]))

    nodes = np.flatnonzero(forest.lengths)
    nodes = nodes[np.argsort(forest.enters[nodes])]
    node, within = np.repeat(nodes, forest.lengths[nodes]), ranges(forest.lengths[nodes])
    position = forest.starts[node] + within
    predictors = _before(forest, owner, trained - first[owner])
    assert (predictors >= 0).all(), "the first token of a prompt cannot be trained"
    buckets, order = _buckets(
        _stretch_starts(forest, node, within), position, _before(forest, node, within)
    )
    return PackedBatch(
        token_ids[first[node] + within],
        position,
        buckets,
        order,
        forest.exits[node],
        token_ids[trained],
        predictors,
        trained,
    )


def _before(forest: _Forest, node: IntArray, within: IntArray) -> IntArray:
    """Where the token before token ``within`` of ``node`` is; -1 at the start of a prompt."""
    parent = forest.parent[node]
    last_of_parent = np.where(parent >= 0, forest.enters[parent] + forest.lengths[parent] - 1, -1)
    return np.where(within > 0, forest.enters[node] + within - 1, last_of_parent)


def _stretch_starts(forest: _Forest, node: IntArray, within: IntArray) -> IntArray:
    """[S + 1] the places in the row where stretches start, the row's length last."""
    begins = np.flatnonzero((within == 0) & ~forest.joined[node])
    lengths = np.diff(begins, append=len(node))
    pieces = -(-lengths // MAX_STRETCH)
    starts = np.repeat(begins, pieces) + MAX_STRETCH * ranges(pieces)
    return np.append(starts, len(node))


def _buckets(
    starts: IntArray, position: IntArray, previous: IntArray
) -> tuple[tuple[Bucket, ...], IntArray]:
    """Group the stretches of a flat row; all arguments are in the row's order."""
    first = starts[:-1]
    own = np.diff(starts)
    path = position[first] + own
    stretch = np.repeat(np.arange(len(own)), own)
    before = previous[first]
    parent = np.where(before >= 0, stretch[before], -1)
    buckets = []
    order = np.empty(len(position), np.int64)
    padded = 0
    for members in _groups(own, path):
        bucket = _bucket(members, first, own, path, parent)
        buckets.append(bucket)
        num_queries = bucket.queries.shape[1]
        rows = np.repeat(np.arange(len(members)), own[members])
        columns = ranges(own[members])
        order[bucket.queries[rows, columns]] = padded + rows * num_queries + columns
        padded += bucket.queries.size
    return tuple(buckets), order


def _groups(own: IntArray, path: IntArray) -> list[IntArray]:
    """Stretches of similar own and path length, within the size of a bucket."""
    scale = np.log(_LENGTH_RATIO)
    classes = np.stack([np.ceil(np.log(own) / scale), np.ceil(np.log(path) / scale)])
    _, label = np.unique(classes, axis=1, return_inverse=True)
    groups = []
    for number in range(label.max() + 1):
        members = np.flatnonzero(label == number)
        largest = max(1, _MAX_BUCKET // int(own[members].max() * path[members].max()))
        groups += [members[i : i + largest] for i in range(0, len(members), largest)]
    return groups


def _bucket(
    members: IntArray, first: IntArray, own: IntArray, path: IntArray, parent: IntArray
) -> Bucket:
    """The index arrays of one bucket; paths are filled from the stretch upwards."""
    own_lengths, path_lengths = own[members], path[members]
    last = first[members] + own_lengths - 1
    queries = np.minimum(first[members][:, None] + np.arange(own_lengths.max()), last[:, None])
    keys = np.repeat(last[:, None], path_lengths.max(), axis=1)
    rows = np.arange(len(members))
    stretch = members
    while len(rows):
        lengths = own[stretch]
        offsets = ranges(lengths)
        columns = np.repeat(path[stretch] - lengths, lengths) + offsets
        keys[np.repeat(rows, lengths), columns] = np.repeat(first[stretch], lengths) + offsets
        rows, stretch = rows[parent[stretch] >= 0], parent[stretch][parent[stretch] >= 0]
    return Bucket(queries, keys, own_lengths, path_lengths)
