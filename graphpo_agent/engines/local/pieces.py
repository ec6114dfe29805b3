"""Who attends to whom in a flat row, for attention that computes the row in pieces.

A row is in depth-first order, so its tokens fall into *stretches*, consecutive tokens of one path:
an edge, its first child, that one's first child, and so on. They are cut into pieces of two kinds:

* a *run*, a stretch that is at least as long as what comes before it: plain causal attention over
  the whole path, of which the run's part counts;
* a *block*, some consecutive tokens of whatever edges. In depth-first order they attend to two
  things only, the path to the first of them and themselves, through a mask.

Layers with a sliding window know blocks only, and of their paths what the window reaches.

Pieces of similar length are computed together as one bucket. All index building is array arithmetic
over whole rows.

Shapes: N tokens of a row, S stretches, E pieces of a bucket, Q queries and T keys of a piece.
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from graphpo_agent.engines.local.arrays import ranges
from graphpo_agent.engines.local.packing import PackedBatch
from graphpo_agent.graph.arrays import BoolArray, IntArray

__all__ = ["Bucket", "Stretches", "cut_into_buckets"]

_SHORTEST_RUN = 128
_LENGTH_RATIO = 1.5
"""Lengths within one bucket differ by at most about this factor."""
_MAX_BUCKET = 2**22
"""Pieces times queries times keys of one bucket; bounds its mask and gathered keys."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """The stretches of a row.

    Example: two edges of two tokens behind a prompt of three, a row of seven::

        starts  = [0, 5]
        lengths = [5, 2]
        parent  = [-1, 0]
        before  = [0, 3]

    Attributes:
        starts: [S] where in the row each begins.
        lengths: [S] tokens of each.
        parent: [S] the stretch that holds the token before it; -1 where a prompt begins.
        before: [S] path tokens before it.
    """

    starts: IntArray
    lengths: IntArray
    parent: IntArray
    before: IntArray

    @classmethod
    def of(cls, batch: PackedBatch) -> "Stretches":
        """Where the token before is not the one on the left, another stretch begins."""
        num_tokens = len(batch.previous)
        starts = np.flatnonzero(batch.previous != np.arange(-1, num_tokens - 1))
        starts = np.union1d([0], starts)
        parent = np.searchsorted(starts, batch.previous[starts], side="right") - 1
        lengths = np.diff(starts, append=num_tokens)
        return cls(starts, lengths, parent, batch.position_ids[starts])

    def write_paths(
        self,
        target: IntArray,
        begins: IntArray,
        stretch: IntArray,
        lengths: IntArray,
        hidden: IntArray,
    ) -> None:
        """Write E paths into ``target``, stretch by stretch upwards.

        Args:
            target: receives positions in the row.
            begins: [E] where in ``target`` each path would begin if nothing were left out.
            stretch: [E] the one in which each path ends.
            lengths: [E] tokens of each path, at least those before its stretch.
            hidden: [E] how many of its first tokens are left out.
        """
        while len(stretch):
            before = self.before[stretch]
            first = np.maximum(before, hidden)
            own = np.maximum(lengths - first, 0)
            places = np.repeat(begins + first, own) + ranges(own)
            target[places] = np.repeat(self.starts[stretch] + first - before, own) + ranges(own)
            stretch = self.parent[stretch]
            kept = (stretch >= 0) & (before > hidden)
            stretch, begins, lengths = stretch[kept], begins[kept], before[kept]
            hidden = hidden[kept]


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
        path_lengths: [E] tokens of the path before the piece, without those that are left out.
        own_lengths: [E] tokens of the piece.
        causal: whether these are runs.
        window: tokens that a query sees at most, itself included; None: all of its path.
    """

    queries: IntArray
    keys: IntArray
    path_lengths: IntArray
    own_lengths: IntArray
    causal: bool
    window: int | None

    def own(self) -> BoolArray:
        """[E, Q] which queries are the piece's own."""
        first = self.path_lengths[:, None] if self.causal else 0
        columns = np.arange(self.queries.shape[1])
        return (columns >= first) & (columns < first + self.own_lengths[:, None])

    def seen(self, batch: PackedBatch) -> BoolArray:
        """[E, Q, T] whether a query of a block sees a key; ``batch`` is the row."""
        before = self.keys.shape[1] - self.queries.shape[1]
        columns = np.arange(self.keys.shape[1])
        real = columns >= before - self.path_lengths[:, None]
        real &= columns < before + self.own_lengths[:, None]
        # A key is seen until its subtree ends, from itself on; all of the path comes before.
        ends = np.where(real, batch.exits[self.keys], 0).astype(np.int32)
        seen = self.queries.astype(np.int32)[:, :, None] < ends[:, None]
        seen[:, :, before:] &= np.tri(self.queries.shape[1], dtype=np.bool_)
        if self.window is not None:
            positions = batch.position_ids.astype(np.int32)
            least = positions[self.queries] - self.window
            seen &= positions[self.keys][:, None] > least[:, :, None]
        return seen


def cut_into_buckets(
    batch: PackedBatch, window: int | None = None
) -> tuple[tuple[Bucket, ...], IntArray]:
    """The pieces of a row; every token is an own query of exactly one bucket.

    Args:
        batch: the row.
        window: see ``Bucket``.

    Returns:
        The buckets, and [N] the place of each token among the queries of all buckets, flattened.
    """
    stretches = Stretches.of(batch)
    first, own, causal = _pieces(batch, stretches, window)
    paths = batch.position_ids[first]
    # Later edges of a block may lie higher up, and so begins what they see.
    highest = np.minimum.reduceat(batch.position_ids, first)
    hidden = np.zeros_like(paths) if window is None else np.maximum(highest - window + 1, 0)
    buckets = []
    order = np.empty(len(batch.token_ids), np.int64)
    done = 0
    for members in _groups(paths - hidden, own, causal):
        bucket = _bucket(
            stretches,
            first[members],
            paths[members],
            hidden[members],
            own[members],
            bool(causal[members[0]]),
            window,
        )
        buckets.append(bucket)
        counts = bucket.own()
        order[bucket.queries[counts]] = done + np.flatnonzero(counts)
        done += bucket.queries.size
    return tuple(buckets), order


def _pieces(
    batch: PackedBatch, stretches: Stretches, window: int | None
) -> tuple[IntArray, IntArray, BoolArray]:
    """Where the pieces of a row start, how many tokens they have, and which are runs."""
    is_run = stretches.lengths >= np.maximum(stretches.before, _SHORTEST_RUN)
    is_run &= window is None
    # What lies between two runs is one stretch of blocks.
    begins = is_run | np.concatenate([[True], is_run[:-1]])
    starts, is_run = stretches.starts[begins], is_run[begins]
    lengths = np.diff(starts, append=len(batch.token_ids))
    mean_path = float(np.minimum(batch.position_ids + 1, window or inf).mean())
    size = np.where(is_run, lengths, _block_length(mean_path))
    counts = -(-lengths // size)
    within = ranges(counts) * np.repeat(size, counts)
    own = np.minimum(np.repeat(size, counts), np.repeat(lengths, counts) - within)
    return np.repeat(starts, counts) + within, own, np.repeat(is_run, counts)


def _block_length(mean_path: float) -> int:
    """Tokens of a block, for paths of this many tokens.

    Longer blocks gather fewer keys and mask more products: about a quarter of a path is best.
    """
    return int(2 ** np.clip(np.round(np.log2(mean_path / 4.0)), 6, 8))


def _groups(paths: IntArray, own: IntArray, causal: BoolArray) -> list[IntArray]:
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
    stretches: Stretches,
    first: IntArray,
    paths: IntArray,
    hidden: IntArray,
    own: IntArray,
    causal: bool,
    window: int | None,
) -> Bucket:
    """The pieces of ``own`` tokens from ``first`` on, behind ``paths`` tokens, some ``hidden``."""
    longest = int((paths - hidden).max())
    before = np.zeros((len(first), longest), np.int64)
    begins = np.arange(1, len(first) + 1) * longest - paths
    stretch = np.searchsorted(stretches.starts, first, side="right") - 1
    stretches.write_paths(before.reshape(-1), begins, stretch, paths, hidden)
    columns = np.arange(int(own.max()))
    queries = first[:, None] + np.minimum(columns, own[:, None] - 1)
    keys = np.concatenate([before, queries], axis=1)
    if causal:  # left-aligned: what a row lacks in front is padding behind
        shift = longest - paths[:, None] + np.arange(keys.shape[1])
        keys = np.take_along_axis(keys, np.minimum(shift, keys.shape[1] - 1), axis=1)
        queries = keys = np.ascontiguousarray(keys[:, : int((paths + own).max())])
    return Bucket(queries, keys, paths - hidden, own, causal, window)
