"""From a method's plan to continuations: edges cut, counts within the budget, seeds."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Branch
from graphpo_agent.rollout.seeds import derive_seed

__all__ = ["Continuation", "after_cuts", "continuations", "cut_edges", "within_paths"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """One edge to be sampled: behind which node, with which seed. See ``Branch``."""

    node: int
    seed: int
    tree: int | None
    value_only: bool


def within_paths(graph: RolloutGraph, branches: Sequence[Branch], room: int | None) -> list[Branch]:
    """The branches that begin no more than ``room`` paths, the first ones served first.

    The first continuation of a path that has none yet begins nothing. None: all of them.
    """
    if room is None:
        return list(branches)
    open_paths = set(graph.leaves.tolist()) - {0}
    kept: list[Branch] = []
    for branch in branches:
        goes_on = int(branch.offset is None and branch.node in open_paths)
        open_paths.discard(branch.node)
        begun = max(0, min(branch.count - goes_on, room))
        room -= begun
        if begun + goes_on:
            kept.append(replace(branch, count=begun + goes_on))
    return kept


def cut_edges(
    graph: RolloutGraph, branches: Sequence[Branch]
) -> tuple[RolloutGraph, list[Branch], list[tuple[int, int]]]:
    """Cut every edge that a branch leaves from its inside; each place once.

    Returns:
        The graph with the new nodes, the branches with its positions and without offsets, and
        where the edges of the graph before were cut (see ``RolloutGraph.split``).
    """
    places = sorted({(b.node, b.offset) for b in branches if b.offset is not None})
    if not places:
        return graph, list(branches), []
    made = {place: place[0] + j for j, place in enumerate(places)}
    moved = [
        replace(
            b,
            node=after_cuts(b.node, places) if b.offset is None else made[b.node, b.offset],
            offset=None,
        )
        for b in branches
    ]
    return graph.split(places), moved, places


def after_cuts(node: int, places: Sequence[tuple[int, int]]) -> int:
    """The position of a node of the graph before that was cut at ``places``, in order."""
    return node + bisect_right(places, node, key=lambda place: place[0])


def continuations(
    graph: RolloutGraph, branches: Sequence[Branch], seed_parts: tuple[int | str, ...]
) -> list[Continuation]:
    """One entry per edge to be sampled, in the order of the branches.

    Seeds belong to (``seed_parts``, node, sibling). What continues a value-only edge is one too.
    """
    siblings: Counter[int] = Counter()
    planned: list[Continuation] = []
    for branch in branches:
        node_id = int(graph.node_ids[branch.node])
        value_only = branch.value_only or (branch.node > 0 and not graph.num_trained[branch.node])
        for _ in range(branch.count):
            seed = derive_seed(*seed_parts, node_id, siblings[node_id])
            siblings[node_id] += 1
            planned.append(Continuation(branch.node, seed, branch.tree, bool(value_only)))
    return planned
