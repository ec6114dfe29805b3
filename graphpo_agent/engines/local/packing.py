"""Rollout graphs as flat rows that hold every token once.

Each direct edge is trained once, however many paths run through it (Algorithm 1, stage 4).
A row is in depth-first order. Its attention is computed in pieces of two kinds:

* a *run*, consecutive tokens of one path that are at least as long as what comes before them:
  plain causal attention over the whole path, of which the run's part counts;
* a *block*, some consecutive tokens of whatever edges. In depth-first order they attend to two
  things only, the path to the first of them and themselves, through a mask.

Pieces of similar length are computed together as one bucket. All index building is array arithmetic
over whole rows.

Shapes: N tokens of a row, M trained tokens of a row, E pieces of a bucket, Q queries and T keys of
a piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.engines.local.arrays import ranges
from graphpo_agent.engines.local.parts import Part, cut, whole
from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["Bucket", "PackedBatch", "block_length", "pack"]

_SHORTEST_RUN = 128
_LENGTH_RATIO = 1.5
"""Lengths within one bucket differ by at most about this factor."""
_MAX_BUCKET = 2**22
"""Pieces times queries times keys of one bucket; bounds its mask and gathered keys."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces of similar length.

    Example: the block ``[3, 4]`` behind the path ``[0, 1]``, beside the longer ``[5, 6, 7]`` behind
    ``[0]``, of a row of eight tokens::

        queries      = [[3, 4, 4], [5, 6, 7]]
        keys         = [[0, 1, 3, 4, 4], [0, 0, 5, 6, 7]]
        path_lengths = [2, 1]
        own_lengths  = [2, 3]
        causal       = False

    Attributes:
        queries: [E, Q] positions in the row, padded with the piece's last; of runs those of the
            whole path.
        keys: [E, T] positions in the row: the path before the piece, then the piece, padded with
            its last. Of blocks the path is right-aligned, so that all blocks start in one column,
            and padded with position 0. Of runs the same as ``queries``.
        path_lengths: [E] tokens of the path before the piece.
        own_lengths: [E] tokens of the piece.
        causal: whether these are runs.
    """

    queries: IntArray
    keys: IntArray
    path_lengths: IntArray
    own_lengths: IntArray
    causal: bool

    def own(self) -> NDArray[np.bool_]:
        """[E, Q] which queries are the piece's own."""
        first = self.path_lengths[:, None] if self.causal else 0
        columns = np.arange(self.queries.shape[1])
        return (columns >= first) & (columns < first + self.own_lengths[:, None])

    def seen(self, exits: IntArray) -> NDArray[np.bool_]:
        """[E, Q, T] whether a query of a block sees a key; ``exits`` is the row's."""
        queries, keys = self.queries[:, :, None], self.keys[:, None]
        before = self.keys.shape[1] - self.queries.shape[1]
        columns = np.arange(self.keys.shape[1])
        real = columns >= before - self.path_lengths[:, None]
        real &= columns < before + self.own_lengths[:, None]
        return (keys <= queries) & (queries < exits[keys]) & real[:, None]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Some graphs, or parts of graphs, as one flat row.

    Attributes:
        token_ids: [N].
        position_ids: [N] place of each token on its path.
        buckets: who attends to whom; every token is an own query of exactly one bucket.
        order: [N] place of each token among the queries of all buckets, flattened.
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
    """

    parent: IntArray
    lengths: IntArray
    starts: IntArray
    enters: IntArray
    exits: IntArray


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
    return _Forest(parent, lengths, starts, enters, enters + subtree)


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
    buckets, order = _buckets(forest, node, position, _before(forest, node, within))
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


def block_length(mean_path: float) -> int:
    """Tokens of a block, for paths of this many tokens.

    Longer blocks gather fewer keys and mask more products: about a quarter of a path is best.
    """
    return int(2 ** np.clip(np.round(np.log2(mean_path / 4.0)), 6, 8))


def _buckets(
    forest: _Forest, node: IntArray, position: IntArray, previous: IntArray
) -> tuple[tuple[Bucket, ...], IntArray]:
    """Cut a row into pieces and group them; the last three are [N]."""
    first, own, causal = _pieces(position, previous)
    paths = position[first]
    buckets = []
    order = np.empty(len(node), np.int64)
    done = 0
    for members in _groups(paths, own, causal):
        bucket = _bucket(
            forest, node[first[members]], first[members], own[members], bool(causal[members[0]])
        )
        buckets.append(bucket)
        counts = bucket.own()
        order[bucket.queries[counts]] = done + np.flatnonzero(counts)
        done += bucket.queries.size
    return tuple(buckets), order


def _pieces(position: IntArray, previous: IntArray) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Where the pieces of a row start, how many tokens they have, and which are runs."""
    num_tokens = len(position)
    starts = np.union1d([0], np.flatnonzero(previous != np.arange(-1, num_tokens - 1)))
    lengths = np.diff(starts, append=num_tokens)
    is_run = lengths >= np.maximum(position[starts], _SHORTEST_RUN)
    # What lies between two runs is one stretch, to be cut into blocks.
    begins = is_run | np.concatenate([[True], is_run[:-1]])
    starts, is_run = starts[begins], is_run[begins]
    lengths = np.diff(starts, append=num_tokens)
    size = np.where(is_run, lengths, block_length(float(position.mean()) + 1.0))
    counts = -(-lengths // size)
    within = ranges(counts) * np.repeat(size, counts)
    own = np.minimum(np.repeat(size, counts), np.repeat(lengths, counts) - within)
    return np.repeat(starts, counts) + within, own, np.repeat(is_run, counts)


def _groups(paths: IntArray, own: IntArray, causal: NDArray[np.bool_]) -> list[IntArray]:
    """Pieces of one kind and similar length, within the size of a bucket."""
    length = np.where(causal, paths + own, paths + own.max())
    label = np.ceil(np.log(length) / np.log(_LENGTH_RATIO)) + 1000 * causal
    groups = []
    for number in np.unique(label):
        members = np.flatnonzero(label == number)
        keys = int(length[members].max())
        queries = keys if causal[members[0]] else int(own[members].max())
        largest = max(1, _MAX_BUCKET // (queries * keys))
        groups += [members[i : i + largest] for i in range(0, len(members), largest)]
    return groups


def _bucket(
    forest: _Forest, node: IntArray, first: IntArray, own: IntArray, causal: bool
) -> Bucket:
    """The pieces of ``own`` tokens that start at ``first``, at tokens of ``node``."""
    paths = forest.starts[node] + first - forest.enters[node]
    before = _paths(forest, node, paths)
    columns = np.arange(int(own.max()))
    queries = first[:, None] + np.minimum(columns, own[:, None] - 1)
    keys = np.concatenate([before, queries], axis=1)
    if causal:  # left-aligned: what a row lacks in front is padding behind
        shift = before.shape[1] - paths[:, None] + np.arange(keys.shape[1])
        keys = np.take_along_axis(keys, np.minimum(shift, keys.shape[1] - 1), axis=1)
        longest = int((paths + own).max())
        queries = keys = np.ascontiguousarray(keys[:, :longest])
    return Bucket(queries, keys, paths, own, causal)


def _paths(forest: _Forest, node: IntArray, lengths: IntArray) -> IntArray:
    """[E, longest] positions of the ``lengths`` path tokens before some token of ``node``.

    Right-aligned; filled node by node, upwards.
    """
    longest = int(lengths.max())
    before = np.zeros((len(node), longest), np.int64)
    rows, ends = np.arange(len(node)), lengths
    while len(rows):
        own = ends - forest.starts[node]
        columns = np.repeat(longest - lengths[rows] + forest.starts[node], own) + ranges(own)
        before[np.repeat(rows, own), columns] = np.repeat(forest.enters[node], own) + ranges(own)
        ends, node = forest.starts[node], forest.parent[node]
        rows, ends, node = rows[node >= 0], ends[node >= 0], node[node >= 0]
    return before
