"""Waves: the rest of a budget goes to merged states whose outcome is uncertain."""

from dataclasses import dataclass

import numpy as np

from graphpo_agent.graph.arrays import FloatArray, IntArray
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Branch, Growth

__all__ = ["wave"]


@dataclass(slots=True)
class _Candidate:
    """A class of states that can be continued.

    Attributes:
        members: those that were continued before.
        spread: √(S(1 − S)).
        cost: policy tokens from the class to the end of a path, expected.
        evidence: edges that left the class before the wave.
        edges: those, and the ones of the wave.
    """

    members: IntArray
    spread: float
    cost: float
    evidence: int
    edges: int

    @property
    def gain(self) -> float:
        """What one more continuation per token promises (Neyman's allocation)."""
        return self.spread * self.evidence / self.edges / max(self.cost, 1.0) ** 0.5


def wave(growth: Growth, classes: IntArray, scores: FloatArray) -> tuple[Branch, ...]:
    """Continuations for half of what a budget still holds, at least one.

    One by one they go to the class with the largest √(S(1 − S)) · m / (n √cost): S its score, m
    the edges that left it before the wave, n those and the wave's, cost what a path from it to the
    end costs. States with much evidence and an open outcome win. The root counts one more edge of
    score 1/2, so that it is never certain; where all answers so far agree, it alone is continued.
    Members of a class are drawn at random.

    Args:
        growth: with a budget of tokens or trajectories, and no active path.
        classes: [n] the graph's equivalence classes.
        scores: [n] node scores S, NaN where undefined.
    """
    tokens, paths = growth.tokens_left, growth.trajectories_left
    if not tokens and not paths:
        return ()
    open_classes = _candidates(growth.graph, classes, scores, growth.path_tokens)
    counts: dict[int, int] = {}
    rng = np.random.default_rng(growth.seed)
    spent = started = 0.0
    while True:
        best = max(open_classes, key=lambda candidate: candidate.gain)
        if started and (
            (tokens is not None and spent + best.cost / 2 > tokens / 2)
            or (paths is not None and started >= paths / 2)
        ):
            break
        best.edges += 1
        spent += best.cost
        started += 1
        node = int(rng.choice(best.members))
        counts[node] = counts.get(node, 0) + 1
    return tuple(Branch(node, count) for node, count in counts.items())


def _candidates(
    graph: RolloutGraph, classes: IntArray, scores: FloatArray, path_tokens: int
) -> list[_Candidate]:
    children = graph.num_children
    cost = _tokens_below(graph)
    if not graph.num_edges:
        return [_Candidate(np.zeros(1, np.int64), 0.5, path_tokens, 1, 1)]
    root = float(scores[0]) if not np.isnan(scores[0]) else 0.5
    found: list[_Candidate] = []
    for name in np.unique(classes[children > 0]).tolist():
        members = np.flatnonzero((classes == name) & (children > 0))
        edges, score = int(children[members].sum()), float(scores[members[0]])
        if members[0] == 0:
            score = (root * edges + 0.5) / (edges + 1)
        elif not 0 < root < 1 or np.isnan(score):
            continue
        spread = max(0.0, score * (1 - score)) ** 0.5
        if spread > 0:
            found.append(_Candidate(members, spread, float(cost[members].mean()), edges, edges))
    return found


def _tokens_below(graph: RolloutGraph) -> FloatArray:
    """[n] policy tokens from a node to the end of a path, the mean over its continuations."""
    below, children = np.zeros(graph.num_nodes), graph.num_children
    for v in range(graph.num_nodes - 1, 0, -1):
        u = graph.parent[v]
        below[u] += (below[v] + graph.num_trained[v]) / children[u]
    return below
