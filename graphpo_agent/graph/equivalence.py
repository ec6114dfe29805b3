"""Stage 1 of Algorithm 1: which nodes are the same semantic state (paper, section 3.2).

Pairs are taken layer by layer, then in order of falling similarity, then by lower id, then by
higher id; a pair joins its two classes unless a rule or a path between them forbids it. Where
contracting everything that is similar leaves no cycle, the ordered procedure would have refused
nothing and the order is not needed. Only the nodes on or between cycles (which states make that
recur along a path), and those of classes that would break a rule, are gone through in order.
"""

from collections.abc import Sequence

import numpy as np

from graphpo_agent.graph.acyclic import AcyclicClasses, Traits, bits
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.forest import Forest, join, on_cycles
from graphpo_agent.graph.merge_rules import MergeOptions, PairRules, pair_rules
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.graph.similarity import (
    cosine_pairs,
    cosine_rows,
    parent_cosines,
    similar_pairs,
)

__all__ = [
    "MergeOptions",
    "edge_similarity",
    "find_classes",
    "find_classes_many",
    "name_classes",
    "novelty",
]

_CHUNK = 4096


def find_classes(graph: RolloutGraph, options: MergeOptions) -> IntArray:
    """The equivalence class of each node (Algorithm 1, stage 1).

    For a graph that is still growing layer by layer, these are its classes so far: a new layer
    may join old classes, and never splits one.

    Returns:
        [n] the position of the class's member with the smallest id; in a grown graph that is its
        first member.
    """
    return find_classes_many([graph], options)[0]


def find_classes_many(graphs: Sequence[RolloutGraph], options: MergeOptions) -> list[IntArray]:
    """``find_classes`` of several graphs in one pass."""
    if not graphs:
        return []
    forest = join(graphs)
    label = np.arange(len(forest.parent))
    if options.merge == "similarity":
        rules = pair_rules(graphs, forest, options)
        i, j = _similar(graphs, forest, rules, options.threshold)
        label = _connected(label, *_with_key_links(forest, rules, i, j))
        open_nodes = on_cycles(forest.parent, label) | _breaks_rules(rules, label)
        i, j = i[open_nodes[i]], j[open_nodes[i]]
        bounds = np.searchsorted(forest.graph_of[i], np.arange(len(graphs) + 1))
        for g, graph in enumerate(graphs):
            start, pairs = int(forest.starts[g]), slice(bounds[g], bounds[g + 1])
            nodes = start + np.flatnonzero(open_nodes[start : start + graph.num_nodes])
            if len(nodes):
                nodes, roots = _in_order(
                    graph, forest.parent, rules, start, nodes, i[pairs], j[pairs]
                )
                label[nodes] = nodes[roots]
    return [
        name_classes(graph.node_ids, label[start : start + graph.num_nodes])
        for graph, start in zip(graphs, forest.starts.tolist(), strict=False)
    ]


def name_classes(node_ids: IntArray, label: IntArray) -> IntArray:
    """[n] each class named by the position of its member with the smallest id.

    Args:
        node_ids: [n] distinct.
        label: [n] any integers; equal labels are one class.
    """
    by_id = np.argsort(node_ids, kind="stable")
    _, first, place = np.unique(label[by_id], return_index=True, return_inverse=True)
    classes = np.empty(len(label), np.int64)
    classes[by_id] = by_id[first[place]]
    return classes


def novelty(graph: RolloutGraph, nodes: IntArray, options: MergeOptions) -> FloatArray:
    """1 − the highest similarity to any other node that a node could merge with; 1 without any.

    Args:
        graph: the graph so far.
        nodes: positions [m].
        options: decide what could merge; the threshold does not matter here.

    Returns:
        [m], from 0 to 2, in steps of 1e-6.
    """
    rules = pair_rules([graph], join([graph]), options)
    everyone = np.arange(graph.num_nodes)
    candidates = rules.may_merge(nodes[:, None], everyone)
    keyed = rules.both_keyed(nodes[:, None], everyone)
    similarity = np.where(keyed & candidates, 1.0, -np.inf)
    if graph.embeddings is not None:
        cosine = cosine_rows(graph.embeddings, nodes, everyone)
        known = graph.has_embedding[nodes][:, None] & graph.has_embedding & ~keyed
        similarity = np.where(known & candidates, cosine, similarity)
    highest = similarity.max(axis=1)
    return np.where(highest == -np.inf, 1.0, 1.0 - highest)


def edge_similarity(graph: RolloutGraph) -> FloatArray:
    """The paper's eta: max(0, similarity of a node and its parent), section 3.3.

    Returns:
        [n] float64, unrounded; 1 for equal keys; 0 at the root and where nothing can be compared.
    """
    eta = np.zeros(graph.num_nodes)
    if graph.embeddings is not None:
        eta = np.clip(parent_cosines(graph.embeddings, graph.parent), 0.0, 1.0)
    same = [
        v
        for v, (key, p) in enumerate(zip(graph.keys, graph.parent.tolist(), strict=True))
        if key is not None and p >= 0 and key == graph.keys[p]
    ]
    eta[same] = 1.0
    return eta


def _similar(
    graphs: Sequence[RolloutGraph], forest: Forest, rules: PairRules, threshold: float
) -> tuple[IntArray, IntArray]:
    """The candidate pairs whose embeddings are similar enough, as positions of the forest."""
    left, right = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for graph, start in zip(graphs, forest.starts.tolist(), strict=False):
        nodes = slice(start, start + graph.num_nodes)
        comparable = graph.has_embedding & ~np.isnan(rules.kind[nodes])
        if graph.embeddings is None or not (comparable & (rules.key[nodes] < 0)).any():
            continue
        for kind in (comparable & ~graph.terminal, comparable & graph.terminal):
            rows = np.flatnonzero(kind)
            if len(rows) > 1:
                i, j = similar_pairs(graph.embeddings, rows, threshold)
                left.append(i + start)
                right.append(j + start)
    i, j = np.concatenate(left), np.concatenate(right)
    keep = rules.may_merge(i, j) & ~rules.both_keyed(i, j)
    return i[keep], j[keep]


def _with_key_links(
    forest: Forest, rules: PairRules, i: IntArray, j: IntArray
) -> tuple[IntArray, IntArray]:
    """Pairs, plus links from each node to the next of the same graph, kind and key."""
    keyed = np.flatnonzero((rules.key >= 0) & ~np.isnan(rules.kind))
    graph_of, kind, key = forest.graph_of[keyed], rules.kind[keyed], rules.key[keyed]
    order = np.lexsort((key, kind, graph_of))
    keyed, graph_of, kind, key = keyed[order], graph_of[order], kind[order], key[order]
    same = (graph_of[1:] == graph_of[:-1]) & (kind[1:] == kind[:-1]) & (key[1:] == key[:-1])
    return np.concatenate([i, keyed[:-1][same]]), np.concatenate([j, keyed[1:][same]])


def _connected(label: IntArray, i: IntArray, j: IntArray) -> IntArray:
    """Connected components: each node's label becomes the smallest of its component."""
    label = label.copy()
    while True:
        a, b = label[i], label[j]
        apart = a != b
        if not apart.any():
            return label
        i, j = i[apart], j[apart]
        low, high = np.minimum(a, b)[apart], np.maximum(a, b)[apart]
        np.minimum.at(label, high, low)
        while (label[label] != label).any():
            label = label[label]


def _breaks_rules(rules: PairRules, label: IntArray) -> BoolArray:
    """[n] nodes whose class, all labels contracted, holds a pair that a rule forbids."""
    broken = np.zeros(len(label), np.bool_)
    keyed = rules.key >= 0
    if keyed.any():
        broken |= _differs(rules.key, keyed, label)
    if rules.max_layer_gap is not None:
        low, high = _range(rules.depth, np.ones_like(keyed), label)
        broken |= high - low > rules.max_layer_gap
    texts = rules.numbers >= 0
    if texts.any():
        free = np.zeros(len(label), np.bool_)
        free[label[texts & ~keyed]] = True
        broken |= free & _differs(rules.numbers, texts, label)
    return broken[label]


def _differs(values: IntArray, known: BoolArray, label: IntArray) -> BoolArray:
    """By label: whether two known values of a class differ."""
    low, high = _range(values, known, label)
    return low < high


def _range(values: IntArray, known: BoolArray, label: IntArray) -> tuple[IntArray, IntArray]:
    """By label: smallest and largest known value; without any, a pair that is not ascending."""
    low = np.full(len(label), np.iinfo(np.int64).max)
    high = np.full(len(label), -1, np.int64)
    np.minimum.at(low, label[known], values[known])
    np.maximum.at(high, label[known], values[known])
    return low, high


def _in_order(
    graph: RolloutGraph,
    parent: IntArray,
    rules: PairRules,
    start: int,
    nodes: IntArray,
    i: IntArray,
    j: IntArray,
) -> tuple[IntArray, IntArray]:
    """The ordered procedure on some nodes of one graph.

    Args:
        graph: the graph.
        parent: of the forest.
        rules: of the forest.
        start: where the graph starts in the forest.
        nodes: positions in the forest: whole components of similar nodes, and with two nodes
            all nodes on every path between them, components contracted.
        i: first nodes of the similar pairs among ``nodes``.
        j: second nodes.

    Returns:
        The nodes in the order of their ids, and the place in it of each one's class.
    """
    nodes = nodes[np.argsort(graph.node_ids[nodes - start], kind="stable")]
    local = np.full(graph.num_nodes + 1, -1, np.int64)  # the last entry: the root's parent
    local[nodes - start] = np.arange(len(nodes))
    parents = local[np.maximum(parent[nodes] - start, -1)]
    classes = AcyclicClasses(parents.tolist(), _traits(rules, nodes), rules.max_layer_gap)
    similarity = np.zeros(0)
    if graph.embeddings is not None:
        similarity = cosine_pairs(graph.embeddings, i - start, j - start)
    low = np.minimum(local[i - start], local[j - start])
    high = np.maximum(local[i - start], local[j - start])
    layer = np.maximum(rules.depth[i], rules.depth[j])
    order = np.lexsort((high, low, -similarity, layer))
    low, high, layer, similarity = low[order], high[order], layer[order], similarity[order]
    equal = similarity == 1.0
    twins = _twins(rules, nodes, low[equal], high[equal])
    low, high, layer = low[~equal], high[~equal], layer[~equal]
    depth = rules.depth[nodes]
    seen = 0
    for h in np.unique(depth).tolist():
        new = np.flatnonzero(depth == h).tolist()
        classes.enter(new)
        seen = _unite_twins(classes, twins, new, seen)
        pairs = slice(*np.searchsorted(layer, [h, h + 1]))
        _unite_pairs(classes, low[pairs], high[pairs])
    return nodes, classes.labels()


def _traits(rules: PairRules, nodes: IntArray) -> list[Traits]:
    key, numbers, depth = rules.key[nodes], rules.numbers[nodes], rules.depth[nodes]
    free = np.where(key < 0, numbers, -1)
    keyed = np.where(key < 0, -1, numbers)
    columns = (key, free, keyed, depth, depth)
    return [Traits(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]


def _twins(rules: PairRules, nodes: IntArray, low: IntArray, high: IntArray) -> list[int]:
    """For each node, as a bitset, those of similarity 1: equal keys or equal embeddings.

    The kind of what never merges is NaN and equals no other, so that it is alone.
    """
    groups: dict[tuple[float, int], int] = {}
    names = list(zip(rules.kind[nodes].tolist(), rules.key[nodes].tolist(), strict=True))
    for v, name in enumerate(names):
        groups[name] = groups.get(name, 0) | 1 << v
    twins = [groups[name] if name[1] >= 0 else 0 for name in names]
    for u, v in zip(low.tolist(), high.tolist(), strict=True):
        twins[u] |= 1 << v
        twins[v] |= 1 << u
    return twins


def _unite_twins(classes: AcyclicClasses, twins: list[int], new: list[int], seen: int) -> int:
    """Take the pairs of similarity 1 of a layer by lower, then higher number.

    Args:
        classes: the classes so far; the layer's nodes have entered.
        twins: per node.
        new: the layer's nodes.
        seen: the nodes of all layers before, as a bitset.

    Returns:
        ``seen`` with the new nodes.
    """
    for v in new:
        seen |= 1 << v
    open_nodes = 0
    for v in new:
        partners = twins[v] & seen & ~classes.closed(v)
        if partners:
            open_nodes |= partners | 1 << v
    for u in bits(open_nodes):
        partners = twins[u] & seen & (-2 << u)  # with higher numbers
        while partners := partners & ~classes.closed(u):
            v = (partners & -partners).bit_length() - 1
            if not classes.unite(u, v):
                partners &= ~classes.members(v)
    return seen


def _unite_pairs(classes: AcyclicClasses, low: IntArray, high: IntArray) -> None:
    """Take pairs in order. Of many pairs between two classes only the first need be tried."""
    for s in range(0, len(low), _CHUNK):
        a, b = low[s : s + _CHUNK], high[s : s + _CHUNK]
        if len(low) > _CHUNK:
            label = classes.labels()
            names = np.sort(np.stack([label[a], label[b]]), axis=0)
            _, first = np.unique(names, axis=1, return_index=True)
            first = np.sort(first[names[0, first] != names[1, first]])
            a, b = a[first], b[first]
        for u, v in zip(a.tolist(), b.tolist(), strict=True):
            classes.unite(u, v)
