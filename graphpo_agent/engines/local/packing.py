"""Rollout graphs as flat rows that hold every token once.

Each direct edge is trained once, however many paths run through it (Algorithm 1, stage 4), and
what several edges, or the prompts of a row, begin with alike is computed once. A row is in
depth-first order. Index building is array arithmetic over whole rows, but for the prompts'
beginnings.

Shapes: N tokens of a row, K targets of a row, M trained tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphpo_agent.engines.local.arrays import levels, ranges
from graphpo_agent.engines.local.beginnings import beginning, num_shared, share_beginnings
from graphpo_agent.engines.local.parts import Part, cut, joined, whole
from graphpo_agent.engines.local.shared_tokens import shared_tokens
from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["PackedBatch", "pack"]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Some graphs, or parts of graphs, as one flat row.

    Attributes:
        token_ids: [N].
        position_ids: [N] place of each token on its path.
        previous: [N] where in the row the token before it on its path is; -1 at a prompt's first.
        exits: [N] the row is in depth-first order: token j is on the path of token i if and only
            if ``j <= i < exits[j]``.
        target_ids: [K] the tokens that are predicted; a leaf's last is no part of the row.
        predictors: [K] positions whose hidden states predict them: the token before on the
            path, for an edge's first token the last one of its parent.
        target_of: [M] which of the targets each trained token is: the same one for edges that
            begin alike.
        source: [M] where each trained token stands in the concatenation of the ``token_ids`` of
            all samples that were given to ``pack``.
    """

    token_ids: IntArray
    position_ids: IntArray
    previous: IntArray
    exits: IntArray
    target_ids: IntArray
    predictors: IntArray
    target_of: IntArray
    source: IntArray


def pack(samples: Sequence[TrainingSample], max_tokens: int) -> list[PackedBatch]:
    """Distribute samples over flat rows of at most ``max_tokens`` tokens, largest first.

    Tokens that no trained token follows are left out. A sample with more tokens than that is cut
    into parts that compute their common ancestors again; a row is longer than ``max_tokens`` only
    where nine eighths of the longest path of its graph are (``row_limit``).
    """
    if not samples:
        return []
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    shared = shared_tokens(samples)
    parts = [
        part
        for sample, start in zip(samples, starts[:-1].tolist(), strict=True)
        for part in cut(whole(sample, start, shared), max_tokens)
        if len(part.trained)
    ]
    if not parts:
        return []
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    texts = [beginning(part, token_ids) for part in parts]
    return [
        _pack_row(
            share_beginnings(joined([parts[i] for i in members]), [texts[i] for i in members]),
            token_ids,
        )
        for members in _first_fit([part.num_tokens for part in parts], texts, max_tokens)
    ]


def _first_fit(sizes: Sequence[int], texts: Sequence[list[int]], capacity: int) -> list[list[int]]:
    """The members of each row; what they begin with as the first of them does counts once."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at_least = sizes[i] - len(texts[i])
        for row, members in enumerate(rows):
            if at_least > room[row]:
                continue
            more = sizes[i] - num_shared(texts[i], texts[members[0]])
            if more <= room[row]:
                members.append(i)
                room[row] -= more
                break
        else:
            rows.append([i])
            room.append(capacity - sizes[i])
    return rows


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
    _, *below = levels(parent)
    for level in below:
        starts[level] = starts[parent[level]] + lengths[parent[level]]
    for level in reversed(below):
        np.add.at(subtree, parent[level], subtree[level])
    order = np.lexsort((np.arange(len(parent)), parent))
    before = np.cumsum(subtree[order]) - subtree[order]
    new_family = np.diff(parent[order], prepend=-2) != 0
    enters = np.empty_like(lengths)
    enters[order] = before - before[new_family][np.cumsum(new_family) - 1]
    for level in below:
        enters[level] += enters[parent[level]] + lengths[parent[level]]
    return _Forest(parent, lengths, starts, enters, enters + subtree)


def _pack_row(part: Part, token_ids: IntArray) -> PackedBatch:
    forest = _forest(part.parent, part.kept)
    nodes = np.flatnonzero(forest.lengths)
    nodes = nodes[np.argsort(forest.enters[nodes])]
    node, within = np.repeat(nodes, forest.lengths[nodes]), ranges(forest.lengths[nodes])
    position = forest.starts[node] + within
    predictors = _before(forest, part.owner, part.targets - part.first[part.owner])
    assert (predictors >= 0).all(), "the first token of a prompt cannot be trained"
    return PackedBatch(
        token_ids[part.first[node] + within],
        position,
        _before(forest, node, within),
        forest.exits[node],
        token_ids[part.targets],
        predictors,
        part.target_of,
        part.trained,
    )


def _before(forest: _Forest, node: IntArray, within: IntArray) -> IntArray:
    """Where the token before token ``within`` of ``node`` is; -1 at the start of a prompt."""
    parent = forest.parent[node]
    last_of_parent = np.where(parent >= 0, forest.enters[parent] + forest.lengths[parent] - 1, -1)
    return np.where(within > 0, forest.enters[node] + within - 1, last_of_parent)
