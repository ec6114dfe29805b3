"""Which tokens a flat row must compute, and how a large graph is cut into several rows.

A token has to be computed only if a trained token follows it on some path: the last token of every
leaf, and everything after the last trained token of a path, are left out. What follows the same
text is one token (``shared_tokens.py``), so that the nodes of a part are stretches of a trie. A
graph of more tokens than a row may hold is cut in depth-first order; each part computes the
ancestors of its nodes again as context, and every trained token is trained in exactly one part, so
that the gradient is that of the whole graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphpo_agent.engines.local.shared_tokens import SharedTokens
from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.graph.forest import joined_parents
from graphpo_agent.graph.samples import TrainingSample

__all__ = ["Part", "cut", "joined", "row_limit", "whole"]


@dataclass(frozen=True, slots=True)
class Part:
    """Some stretches of one graph with all their ancestors, or those of several, joined.

    Example: the whole of prompt ``[5, 6]`` and, behind it, the trained edges ``[7]``, ``[8, 9]``
    and ``[8, 3]``, whose first token is that of the second::

        parent    = [-1, 0, 0, 2, 2]
        first     = [0, 2, 3, 4, 6]
        lengths   = [2, 1, 1, 1, 1]
        kept      = [2, 0, 1, 0, 0]    # no trained token follows 7, 9 and 3
        targets   = [2, 3, 4, 6]
        owner     = [1, 2, 3, 4]
        trained   = [2, 3, 4, 5, 6]
        target_of = [0, 1, 2, 1, 3]

    Attributes:
        parent: [nodes] within the part; -1 at a root. Parents come before children.
        first: [nodes] where the tokens of each node start in all samples' tokens, joined.
        lengths: [nodes] tokens of each node.
        kept: [nodes] how many of them are computed, from the first on.
        targets: [K] places, in all samples' tokens, of the tokens that are predicted; ascending.
        owner: [K] their nodes.
        trained: [M] places of the tokens that this part trains.
        target_of: [M] which of the targets each of them is.
    """

    parent: IntArray
    first: IntArray
    lengths: IntArray
    kept: IntArray
    targets: IntArray
    owner: IntArray
    trained: IntArray
    target_of: IntArray

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return int(self.kept.sum())


def whole(sample: TrainingSample, start: int, shared: SharedTokens) -> Part:
    """All of a sample.

    Args:
        sample: one graph.
        start: where its tokens start in all samples' tokens, joined.
        shared: of all these.
    """
    num_tokens = len(sample.token_ids)
    same, previous = (
        places[start : start + num_tokens] - start for places in (shared.same, shared.previous)
    )
    distinct = np.flatnonzero(same == np.arange(num_tokens))
    before = np.maximum(previous[distinct], -1)
    followers = np.bincount(before[before >= 0], minlength=num_tokens)
    goes_on = (before >= 0) & (before == distinct - 1) & (followers[before] == 1)
    node_of = np.zeros(num_tokens, np.int64)
    node_of[distinct] = np.cumsum(~goes_on) - 1
    starts = np.flatnonzero(~goes_on)
    above = before[starts]
    trained = np.flatnonzero(sample.loss_mask)
    targets, target_of = np.unique(same[trained], return_inverse=True)
    return _part(
        np.where(above >= 0, node_of[above], -1),
        distinct[starts] + start,
        np.diff(starts, append=len(distinct)),
        targets + start,
        node_of[targets],
        trained + start,
        target_of,
    )


def row_limit(max_tokens: int, longest_path: int) -> int:
    """Tokens that a row holds at most: a whole path, and beside it what an eighth has room for.

    Long prompts that short answers branch from would else be computed again for every answer.
    """
    return max(max_tokens, longest_path + longest_path // 8)


def cut(part: Part, max_tokens: int) -> Iterator[Part]:
    """Cut a part, in depth-first order, into parts of at most ``row_limit`` tokens."""
    if part.num_tokens <= max_tokens:
        yield part
        return
    order = _depth_first(part.parent)
    above = _tokens_above(part)[order]
    ends = np.cumsum(part.kept[order])
    starts = ends - part.kept[order]
    limit = row_limit(max_tokens, int((above + part.kept[order]).max()))
    begin = 0
    while begin < len(order):
        room = limit - above[begin]
        end = int(np.searchsorted(ends, starts[begin] + room, side="right"))
        if end < len(order):
            end = begin + 1 + _best_cut(above[begin + 1 : end + 1], ends[begin:end] - starts[begin])
        yield _with_ancestors(part, order[begin:end])
        begin = end


def joined(parts: Sequence[Part]) -> Part:
    """All stretches of some parts, as a forest."""
    nodes = _shifts([len(part.parent) for part in parts])
    targets = _shifts([len(part.targets) for part in parts])
    return Part(
        joined_parents([part.parent for part in parts]),
        np.concatenate([part.first for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.kept for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.owner + n for part, n in zip(parts, nodes, strict=True)]),
        np.concatenate([part.trained for part in parts]),
        np.concatenate([part.target_of + k for part, k in zip(parts, targets, strict=True)]),
    )


def _shifts(counts: Sequence[int]) -> IntArray:
    """How many come before each."""
    return np.cumsum([0, *counts[:-1]])


def _best_cut(above: IntArray, covered: IntArray) -> int:
    """Which of some cuts computes least again for every token before it; the last of the best.

    Args:
        above: [cuts] tokens above the node after each cut, which are computed again.
        covered: [cuts] tokens before each cut.
    """
    cost = above / np.maximum(covered, 1)
    return int(np.flatnonzero(cost == cost.min())[-1])


def _part(
    parent: IntArray,
    first: IntArray,
    lengths: IntArray,
    targets: IntArray,
    owner: IntArray,
    trained: IntArray,
    target_of: IntArray,
) -> Part:
    """A part; tokens are kept up to the last target, and all those of its ancestors."""
    kept = np.zeros_like(lengths)
    kept[owner] = targets - first[owner]  # ascending, so that the last of a node stays
    ancestors = _unique_parents(parent, owner)
    while len(ancestors):
        kept[ancestors] = lengths[ancestors]
        ancestors = _unique_parents(parent, ancestors)
    return Part(parent, first, lengths, kept, targets, owner, trained, target_of)


def _unique_parents(parent: IntArray, nodes: IntArray) -> IntArray:
    marked = np.zeros(len(parent) + 1, np.bool_)
    marked[parent[nodes]] = True  # the root's -1 marks the last, which is no node
    return np.flatnonzero(marked[:-1])


def _depth_first(parent: IntArray) -> IntArray:
    """[nodes] every node followed by its subtree, siblings in their order."""
    assert (parent[1:] >= 0).all(), "a prompt has tokens"
    children: list[list[int]] = [[] for _ in parent]
    for v in range(len(parent) - 1, 0, -1):
        children[parent[v]].append(v)
    order: list[int] = []
    waiting = [0]
    while waiting:
        order.append(waiting.pop())
        waiting += children[order[-1]]
    return np.array(order)


def _tokens_above(part: Part) -> IntArray:
    """[nodes] computed tokens of all proper ancestors of each node."""
    above = np.zeros_like(part.kept)
    for v in range(1, len(above)):
        above[v] = above[part.parent[v]] + part.kept[part.parent[v]]
    return above


def _with_ancestors(part: Part, nodes: IntArray) -> Part:
    """The part that trains ``nodes``."""
    marked = np.zeros(len(part.parent), np.bool_)
    marked[nodes] = True
    predicts = marked[part.owner]
    ancestors = _unique_parents(part.parent, nodes)
    while len(ancestors):
        marked[ancestors] = True
        ancestors = _unique_parents(part.parent, ancestors)
    members = np.flatnonzero(marked)
    place = np.cumsum(marked) - 1
    parent = part.parent[members]
    trains = predicts[part.target_of]
    return _part(
        np.where(parent >= 0, place[parent], -1),
        part.first[members],
        part.lengths[members],
        part.targets[predicts],
        place[part.owner[predicts]],
        part.trained[trains],
        (np.cumsum(predicts) - 1)[part.target_of[trains]],
    )
