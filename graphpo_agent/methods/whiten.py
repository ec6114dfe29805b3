"""Whitening: the advantages of a batch, shifted and scaled over its trained tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.forest import by_layer
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.method import Credit
from graphpo_agent.methods.rows import edge_means

__all__ = ["whitened"]

_EPSILON = 1e-8  # added to a variance before its root is divided by


def whitened(graphs: Sequence[RolloutGraph], credits: Sequence[Credit]) -> list[Credit]:
    """The credits with (A − mean) / √(var + 1e-8) in place of A.

    Mean and variance (ddof 1) are taken over the trained tokens of all graphs together, each with
    the advantage of its edge or of its trajectory. A token counts as often as it is trained: once,
    or once for every row that runs through it; one that is ``untrained``, that is on a ``dropped``
    edge or that the policy did not sample does not count. Where a graph's tokens are unknown,
    ``num_trained`` says how many there are. So TreePO whitens over all response tokens of a batch
    (``masked_whiten`` of its ``verl/utils/torch_functional.py``), and SPO over those with a
    probability below 0.9 (``masked_whiten`` of its ``trainers/utils.py``, there over the rows of
    one forward pass).

    An edge without an advantage (NaN), and in rows one that no row runs through, counts nowhere
    and stays as it is. A single trained token gets 0 and without any nothing changes, where the
    authors' functions stop, divide by zero or take all tokens.

    Args:
        graphs: of one batch.
        credits: of one method, one per graph. Several terms are whitened each by itself.

    Returns:
        Credits with other ``advantages``, ``trajectory_advantages`` and, where there is one,
        another column ``advantage``.
    """
    pairs = list(zip(graphs, credits, strict=True))
    if not pairs:
        return []
    parts = [_weighted(graph, credit) for graph, credit in pairs]
    values = np.concatenate([value for value, _ in parts], axis=1)
    tokens = np.concatenate([count for _, count in parts])
    total = tokens.sum()
    if total == 0:
        return list(credits)
    mean = values @ tokens / total
    variance = (values - mean[:, None]) ** 2 @ tokens / max(total - 1, 1)
    scale = 1.0 / np.sqrt(variance + _EPSILON)
    return [_rescaled(graph, credit, mean, scale) for graph, credit in pairs]


def _weighted(graph: RolloutGraph, credit: Credit) -> tuple[FloatArray, IntArray]:
    """Advantages [num_terms, k] and how many trained tokens [k] have each of them."""
    trained = _trained_tokens(graph, credit)
    if credit.trajectory_advantages is None:
        counted = _counted(graph, credit)
        times = _times_trained(graph, credit.rows)
        return credit.advantages[:, counted], (trained * times)[counted]
    for nodes in by_layer(graph.depth)[1:]:
        trained[nodes] += trained[graph.parent[nodes]]
    kept = ~np.isnan(credit.trajectory_advantages)
    return credit.trajectory_advantages[None, kept], trained[graph.terminals[kept]]


def _rescaled(graph: RolloutGraph, credit: Credit, mean: FloatArray, scale: FloatArray) -> Credit:
    of_trajectory = credit.trajectory_advantages
    if of_trajectory is None:
        moved = (credit.advantages - mean[:, None]) * scale[:, None]
        advantages = np.where(_counted(graph, credit), moved, credit.advantages)
    else:
        of_trajectory = (of_trajectory - mean[0]) * scale[0]
        advantages = edge_means(graph, of_trajectory)[None]
    columns = dict(credit.columns)
    if "advantage" in columns:
        columns["advantage"] = advantages.sum(axis=0)
    return replace(
        credit, advantages=advantages, trajectory_advantages=of_trajectory, columns=columns
    )


def _trained_tokens(graph: RolloutGraph, credit: Credit) -> IntArray:
    """[n] tokens of each edge that carry loss; 0 at the root."""
    trained = graph.num_trained.copy()
    if credit.untrained is not None:
        node = np.repeat(np.arange(graph.num_nodes), np.diff(graph.offsets))
        left_out = node[graph.loss_mask & credit.untrained]
        trained -= np.bincount(left_out, minlength=graph.num_nodes)
    if credit.dropped is not None:
        trained[credit.dropped] = 0
    return trained


def _counted(graph: RolloutGraph, credit: Credit) -> BoolArray:
    """[n] edges with an advantage that are trained at least once."""
    known = ~np.isnan(credit.advantages).any(axis=0)
    return known & (graph.parent >= 0) & (_times_trained(graph, credit.rows) > 0)


def _times_trained(graph: RolloutGraph, rows: IntArray | None) -> IntArray:
    """[n] how often the direct edge to each node is trained."""
    if rows is None:
        return np.ones(graph.num_nodes, np.int64)
    times = np.bincount(rows, minlength=graph.num_nodes)
    for nodes in by_layer(graph.depth)[:0:-1]:
        np.add.at(times, graph.parent[nodes], times[nodes])
    return times
