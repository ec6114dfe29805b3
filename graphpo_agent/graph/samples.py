"""Graph + credit → what a trainer needs. See ``TrainingSample``."""

from dataclasses import dataclass, replace

import numpy as np

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.arrays import BoolArray, Float32Array, FloatArray, IntArray
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = ["PathRow", "TrainingSample", "row_paths", "to_path_rows", "to_sample"]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """The tokens of one rollout graph, each direct edge's once, with their advantages.

    Node 0 is the root (the prompt); every other node names the edge that leads to it. A node's
    context is the concatenation of the tokens of its ancestors, root first, then its own.

    Example: prompt ``[5, 6]``, two first edges ``[7]``, ``[8, 9]``, and ``[3]`` after the second::

        parent      = [-1, 0, 0, 2]
        offsets     = [0, 2, 3, 5, 6]
        token_ids   = [5, 6, 7, 8, 9, 3]
        loss_mask   = [0, 0, 1, 1, 1, 1]
        advantages  = [[nan, 0.7, -0.7, -0.7]]

    Attributes:
        graph_id: names the graph in messages.
        parent: [num_nodes] int64; -1 at the root; parents come before children.
        offsets: [num_nodes + 1] int64; node v owns ``token_ids[offsets[v]:offsets[v + 1]]``.
        token_ids: [num_tokens] int64.
        loss_mask: [num_tokens] bool; True on tokens the policy sampled and that carry loss.
        logprobs: [num_tokens] float32 behaviour log-probabilities; NaN where not sampled.
        advantages: [num_terms, num_nodes] float64, NaN at the root. One term is the joint
            objective (Eq. of section 3.5); two terms, clipped apart and summed, are
            Algorithm 1's stage 4 (``objective: separate``).
        rows: [num_rows] int64 leaves; where trajectories are trained, each as a row of its own, so
            that an edge counts once for every row through it. None: every edge counts once.
        row_advantages: [num_rows] float64 where an advantage belongs to a whole trajectory and
            stands in for ``advantages``; else None.
    """

    graph_id: str
    parent: IntArray
    offsets: IntArray
    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: Float32Array
    advantages: FloatArray
    rows: IntArray | None = None
    row_advantages: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class PathRow:
    """One root-to-leaf path, the form that trainers of plain rows need.

    Example, the second row of the sample above (the first owns the edge ``[7]``)::

        token_ids  = [5, 6, 8, 9, 3]
        loss_mask  = [0, 0, 1, 1, 1]
        advantages = [[0, 0, -0.7, -0.7, -0.7]]

    Attributes:
        token_ids: [length] int64, the prompt first.
        loss_mask: [length] bool; True on the trained tokens of the edges that this row owns.
        logprobs: [length] float32; NaN where the policy did not sample.
        advantages: [num_terms, length] float64; 0 wherever ``loss_mask`` is False.
    """

    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: Float32Array
    advantages: FloatArray


def to_sample(
    graph: RolloutGraph,
    advantages: FloatArray,
    rows: IntArray | None = None,
    row_advantages: FloatArray | None = None,
    untrained: BoolArray | None = None,
) -> TrainingSample:
    """The training sample of a graph (Algorithm 1, stage 4).

    What leads to no trained token is left out.

    Args:
        graph: the rollout graph.
        advantages: [num_terms, n]; NaN on an edge that no credit reached, which counts as 0.
        rows: positions of the leaves whose trajectories are trained; None: each direct edge once.
        row_advantages: [num_rows]; None: those of the edges.
        untrained: [num_tokens] tokens that carry no loss although they were sampled.

    Raises:
        GraphError: the prompt's tokens, or tokens or log-probabilities of an edge, are unknown.
    """
    unknown = np.flatnonzero(~graph.has_tokens)
    if len(unknown):
        raise GraphError(_cannot_train(graph, int(unknown[0]), "tokens"))
    node = np.repeat(np.arange(graph.num_nodes), np.diff(graph.offsets))
    loss_mask = graph.loss_mask if untrained is None else graph.loss_mask & ~untrained
    if rows is not None:
        on_rows: BoolArray = np.any(row_paths(graph.parent, rows), axis=0)
        loss_mask = loss_mask & on_rows[node]
    silent = np.flatnonzero(loss_mask & np.isnan(graph.logprobs))
    if len(silent):
        raise GraphError(_cannot_train(graph, int(node[silent[0]]), "logprobs"))
    kept = np.bincount(node[loss_mask], minlength=graph.num_nodes) > 0
    kept[0] = True
    for v in range(graph.num_nodes - 1, 0, -1):
        kept[graph.parent[v]] |= kept[v]
    place = np.cumsum(kept) - 1
    lengths, parent = np.diff(graph.offsets)[kept], graph.parent[kept]
    on_edges = np.where(np.isnan(advantages), 0.0, advantages)[:, kept]
    on_edges[:, 0] = np.nan
    if rows is not None:
        rows = rows.copy()
        while not kept[rows].all():  # a row ends with the last edge that carries loss
            rows = np.where(kept[rows], rows, graph.parent[rows])
        rows = place[rows]
    return TrainingSample(
        graph_id=graph.id,
        parent=np.where(parent >= 0, place[parent], -1),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        token_ids=graph.token_ids[kept[node]],
        loss_mask=loss_mask[kept[node]],
        logprobs=graph.logprobs[kept[node]],
        advantages=on_edges,
        rows=rows,
        row_advantages=row_advantages,
    )


def row_paths(parent: IntArray, rows: IntArray) -> BoolArray:
    """[num_rows, n] whether the trajectory to each of the ``rows`` runs through an edge.

    The root is no edge.
    """
    through = np.zeros((len(rows), len(parent)), np.bool_)
    ends, places = rows.copy(), np.arange(len(rows))
    while len(places):
        below = parent[ends] >= 0
        ends, places = ends[below], places[below]
        through[places, ends] = True
        ends = parent[ends]
    return through


def to_path_rows(sample: TrainingSample) -> list[PathRow]:
    """Root-to-leaf rows in which every direct edge is owned exactly once.

    An edge belongs to the first row, in the order of the leaves, that runs through it; later rows
    hold its tokens as context without loss. Where the sample has ``rows``, these are the rows, and
    each owns all of its edges.
    """
    num_nodes = len(sample.parent)
    leaves = np.flatnonzero(np.bincount(sample.parent[1:], minlength=num_nodes) == 0)
    owned = np.zeros(num_nodes, np.bool_)
    rows: list[PathRow] = []
    for i, leaf in enumerate((leaves if sample.rows is None else sample.rows).tolist()):
        path = [leaf]
        while sample.parent[path[-1]] >= 0:
            path.append(int(sample.parent[path[-1]]))
        row = _path_row(sample, np.array(path[::-1]), owned)
        if sample.row_advantages is not None:
            spread = np.where(row.loss_mask, sample.row_advantages[i], 0.0)
            row = replace(row, advantages=spread[None])
        rows.append(row)
        if sample.rows is None:
            owned[path] = True
    return rows


def _path_row(sample: TrainingSample, path: IntArray, owned: BoolArray) -> PathRow:
    lengths = sample.offsets[path + 1] - sample.offsets[path]
    node = np.repeat(path, lengths)
    first = np.repeat(sample.offsets[path] - (np.cumsum(lengths) - lengths), lengths)
    token = first + np.arange(len(node))
    loss_mask = sample.loss_mask[token] & ~owned[node]
    return PathRow(
        token_ids=sample.token_ids[token],
        loss_mask=loss_mask,
        logprobs=sample.logprobs[token],
        advantages=np.where(loss_mask, sample.advantages[:, node], 0.0),
    )


def _cannot_train(graph: RolloutGraph, v: int, what: str) -> str:
    return (
        f"graph {graph.id!r}, node {graph.node_ids[v]}: cannot be trained on without {what}; "
        "record them when sampling"
    )
