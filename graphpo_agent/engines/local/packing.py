"""Rollout graphs as flat rows that hold every token once.

Each direct edge is trained once, however many paths run through it (Algorithm 1, stage 4).
The tokens of a graph are cut into *stretches*: maximal runs without a branch, of bounded length.
A stretch attends to the tokens of its own path only; stretches of similar length are computed
together as one bucket. All index building is array arithmetic over whole bins.

Shapes: N tokens of a bin, M trained tokens of a bin, S stretches, E stretches of a bucket,
Q longest stretch and T longest path of a bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.graph.samples import TrainingSample

__all__ = ["Bucket", "PackedBatch", "pack", "ranges"]

IntArray = NDArray[np.int64]

_MAX_STRETCH = 128
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
    """Some samples as one flat row.

    Attributes:
        token_ids: [N].
        position_ids: [N] place of each token on its path.
        buckets: who attends to whom; every token is a query of exactly one bucket.
        order: [N] place of each token among the padded queries of all buckets, flattened.
        targets: [M] positions of the trained tokens.
        predictors: [M] positions whose hidden states predict them: the token before on the
            path, for an edge's first token the last one of its parent.
        source: [M] where each trained token stands in the concatenation of the ``token_ids`` of
            all samples that were given to ``pack``.
    """

    token_ids: IntArray
    position_ids: IntArray
    buckets: tuple[Bucket, ...]
    order: IntArray
    targets: IntArray
    predictors: IntArray
    source: IntArray


def pack(samples: Sequence[TrainingSample], max_tokens: int) -> list[PackedBatch]:
    """Distribute samples over bins of at most ``max_tokens`` tokens, largest first.

    A sample that is larger than that gets a bin of its own.
    """
    sizes = [len(sample.token_ids) for sample in samples]
    starts = np.cumsum([0, *sizes], dtype=np.int64)
    return [
        _pack_bin([samples[i] for i in members], starts[members])
        for members in _first_fit(sizes, max_tokens)
    ]


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
    """The graphs of a bin as one forest; nodes and tokens numbered throughout.

    Attributes:
        parent: [nodes] the nearest ancestor that has tokens; -1 at a root.
        offsets: [nodes + 1] tokens of each node.
        starts: [nodes] path tokens before each node.
        joined: [nodes] whether a node goes on without a branch where its parent ends.
    """

    parent: IntArray
    offsets: IntArray
    starts: IntArray
    joined: NDArray[np.bool_]


def _forest(samples: Sequence[TrainingSample]) -> _Forest:
    num_nodes = np.array([len(sample.parent) for sample in samples])
    shift = np.repeat(np.cumsum(num_nodes) - num_nodes, num_nodes)
    parent = np.concatenate([sample.parent for sample in samples])
    parent = np.where(parent >= 0, parent + shift, -1)
    lengths = np.concatenate([np.diff(sample.offsets) for sample in samples])
    while (empty := (parent >= 0) & (lengths[parent] == 0)).any():
        parent = np.where(empty, parent[parent], parent)
    starts = np.zeros_like(parent)
    ancestor = parent
    while (ancestor >= 0).any():
        starts += np.where(ancestor >= 0, lengths[ancestor], 0)
        ancestor = np.where(ancestor >= 0, parent[ancestor], -1)
    followers = np.bincount(parent[(parent >= 0) & (lengths > 0)], minlength=len(parent))
    joined = (parent >= 0) & (followers[parent] == 1)
    return _Forest(parent, np.concatenate([[0], np.cumsum(lengths)]), starts, joined)


def _pack_bin(samples: Sequence[TrainingSample], sample_starts: IntArray) -> PackedBatch:
    forest = _forest(samples)
    lengths = np.diff(forest.offsets)
    node = np.repeat(np.arange(len(lengths)), lengths)
    position = forest.starts[node] + ranges(lengths)
    row, stretch_starts = _stretches(forest, node, position)
    place = np.empty_like(row)
    place[row] = np.arange(len(row))
    previous = _previous(forest, node)[row]
    previous = np.where(previous >= 0, place[previous], -1)
    targets = np.flatnonzero(np.concatenate([sample.loss_mask for sample in samples])[row])
    assert (previous[targets] >= 0).all(), "the first token of a prompt cannot be trained"
    sizes = np.array([len(sample.token_ids) for sample in samples], np.int64)
    source = np.repeat(sample_starts, sizes) + ranges(sizes)
    buckets, order = _buckets(stretch_starts, position[row], previous)
    return PackedBatch(
        np.concatenate([sample.token_ids for sample in samples])[row],
        position[row],
        buckets,
        order,
        targets,
        previous[targets],
        source[row][targets],
    )


def _stretches(forest: _Forest, node: IntArray, position: IntArray) -> tuple[IntArray, IntArray]:
    """The flat row and where its stretches start.

    Returns:
        [N] the token at each place of the row, and [S + 1] the places where stretches start,
        the row's length last.
    """
    head = np.arange(len(forest.parent))
    while (up := forest.joined[head]).any():
        head = np.where(up, forest.parent[head], head)
    piece = (position - forest.starts[head[node]]) // _MAX_STRETCH
    row = np.lexsort((position, head[node]))
    new = np.diff(head[node][row], prepend=-1) != 0
    new |= np.diff(piece[row], prepend=-1) != 0
    return row, np.append(np.flatnonzero(new), len(row))


def _previous(forest: _Forest, node: IntArray) -> IntArray:
    """[N] the token before each token on its path; -1 at the start of a prompt."""
    previous = np.arange(-1, len(node) - 1)
    lengths = np.diff(forest.offsets)
    first = forest.offsets[:-1][lengths > 0]
    parent = forest.parent[lengths > 0]
    previous[first] = np.where(parent >= 0, forest.offsets[parent + 1] - 1, -1)
    return previous


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
