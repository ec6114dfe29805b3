"""How many continuations each state gets, and what a rollout has cost (paper, section 3.2)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.equivalence import MergeOptions, novelty
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = [
    "Allocation",
    "Budget",
    "Ledger",
    "Reallocate",
    "allocate",
    "branching_at",
    "check_schedule",
]

Reallocate = Literal["novel", "uncertain", "none"]

_UNKNOWN_UNCERTAINTY = 0.25  # S(1 − S) at S = 1/2, its largest value


@dataclass(slots=True)
class Ledger:
    """What the rollout of one prompt has cost so far. Add ledgers for the cost of several.

    Example::

        Ledger(generated_tokens=812, tool_calls=9) + Ledger(generated_tokens=640, tool_calls=7)

    Attributes:
        generated_tokens: sampled by the policy.
        prefilled_tokens: prefix tokens computed.
        summary_tokens: spent on state summaries.
        tool_calls: made by the agent.
        failed_calls: those of them that met an outage.
        saved: continuations that redundant states did not get.
        reallocated: continuations given to states beyond their layer's branching number.
    """

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    summary_tokens: int = 0
    tool_calls: int = 0
    failed_calls: int = 0
    saved: int = 0
    reallocated: int = 0

    def __add__(self, other: "Ledger") -> "Ledger":
        names = [f.name for f in fields(self)]
        return Ledger(**{x: getattr(self, x) + getattr(other, x) for x in names})


@dataclass(frozen=True, slots=True)
class Budget:
    """What one prompt may cost; the same for every method that is compared.

    Example, 64 times 1,024 policy tokens, spent to the last one: ``Budget(tokens=65_536)``.

    Attributes:
        tokens: policy tokens; summaries and observations are not counted. None: no such limit.
        trajectories: paths from the prompt, finished or not. None: no such limit.
    """

    tokens: int | None = None
    trajectories: int | None = None

    def tokens_left(self, ledger: Ledger) -> int | None:
        """Policy tokens that a prompt may still generate."""
        return None if self.tokens is None else self.tokens - ledger.generated_tokens

    def trajectories_left(self, graph: RolloutGraph) -> int | None:
        """Paths that a graph may still begin."""
        paths = len(graph.leaves) if graph.num_edges else 0
        return None if self.trajectories is None else self.trajectories - paths

    def affordable(self, ledger: Ledger, edge_tokens: int) -> tuple[int | None, int | None]:
        """How many edges of at most ``edge_tokens`` can surely be paid for.

        Returns:
            Edges to sample now, None for all; and the limit of each: where not even one whole
            edge is left, one that ends when the budget does.
        """
        left = self.tokens_left(ledger)
        if left is None:
            return None, None
        whole = left // edge_tokens
        return (whole, None) if whole else (min(left, 1), left)


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """The next layer's budget of one graph.

    Example, three active states at branching 4, the second redundant::

        Allocation(array([5, 2, 5]), order=array([0, 2, 1]), saved_pool=0, saved=2)

    Attributes:
        continuations: [num_active] continuations of each active state, at least 1.
        order: [num_active] places in ``active``, which states come first where a budget holds fewer
            paths: those that are not redundant, the most urgent first, then the redundant.
        saved_pool: saved continuations that could not be placed; the next layer's ``carried``.
        saved: continuations that redundant states did not get in this layer.
    """

    continuations: IntArray
    order: IntArray
    saved_pool: int
    saved: int


def check_schedule(schedule: Sequence[int]) -> None:
    """Raise ConfigError unless a schedule is a list of whole numbers of at least 1."""
    if not schedule:
        raise ConfigError("schedule is empty, want the branching number of each layer, e.g. 2,5,4")
    for layer, number in enumerate(schedule, 1):
        if type(number) is not int or number < 1:
            raise ConfigError(
                f"schedule: layer {layer} has {number!r}, want a whole number of at least 1"
            )


def branching_at(schedule: Sequence[int], layer: int) -> int:
    """The paper's b_h for ``layer`` h = 1, 2, …; 1 for layers beyond the schedule."""
    return schedule[layer - 1] if layer <= len(schedule) else 1


def allocate(
    graph: RolloutGraph,
    classes: IntArray,
    active: IntArray,
    branching: int,
    carried: int,
    *,
    options: MergeOptions,
    reallocate: Reallocate = "novel",
    scores: FloatArray | None = None,
    all_active: IntArray | None = None,
) -> Allocation:
    """Halve the budget of redundant states and give what is saved to others (section 3.2).

    In every class the member, active or already expanded, with the shortest path (by depth, then
    path tokens, then id) represents it. Every other active member is redundant and gets
    ``max(1, branching // 2)``. What is saved goes, one continuation at a time and in rounds, to
    the active states that are not redundant, none beyond ``2 * branching``.

    Args:
        graph: the graph so far.
        classes: [n] its equivalence classes.
        active: positions of the states to expand next.
        branching: the layer's branching number b_h.
        carried: continuations saved before and not yet placed.
        options: what may merge; decides novelty.
        reallocate: to the most novel states first, to those with the most uncertain score
            S(1 − S) first (an undefined score counts 1/4), or to none. Ties by id.
        scores: [n] node scores so far; needed for ``uncertain``.
        all_active: ``active`` and the active states of other layers, or to be expanded later: these
            represent classes too. None: there are none.

    Returns:
        The budget; with b_h = 1 there is nothing to save.
    """
    redundant = _redundant(graph, classes, active if all_active is None else all_active)[active]
    continuations = np.where(redundant, max(1, branching // 2), branching)
    saved = int((branching - continuations).sum())
    pool = carried + saved
    open_places = np.flatnonzero(~redundant)
    order = np.concatenate([open_places, np.flatnonzero(redundant)])
    if reallocate == "none" or not len(open_places):
        return Allocation(continuations, order, pool, saved)
    if reallocate == "novel":
        urgency = novelty(graph, active[open_places], options)
    else:
        if scores is None:
            raise ValueError("reallocate='uncertain' needs scores")
        score = scores[active[open_places]]
        uncertainty = np.where(np.isnan(score), _UNKNOWN_UNCERTAINTY, score * (1 - score))
        urgency = np.round(uncertainty, 9)  # S and 1 − S tie
    urgent = open_places[np.lexsort((graph.node_ids[active[open_places]], -urgency))]
    placed = min(pool, branching * len(urgent))
    rounds, rest = divmod(placed, len(urgent))
    continuations[urgent] += rounds
    continuations[urgent[:rest]] += 1
    order[: len(urgent)] = urgent
    return Allocation(continuations, order, pool - placed, saved)


def _redundant(graph: RolloutGraph, classes: IntArray, active: IntArray) -> BoolArray:
    """[n] whether another member represents the class of an active state; True of other states."""
    tokens = np.where(graph.parent >= 0, graph.num_tokens, 0)
    for v in range(1, graph.num_nodes):
        tokens[v] += tokens[graph.parent[v]]
    eligible = graph.num_children > 0
    eligible[active] = True
    members = np.flatnonzero(eligible)
    order = np.lexsort(
        (graph.node_ids[members], tokens[members], graph.depth[members], classes[members])
    )
    members = members[order]
    first = np.ones(len(members), np.bool_)
    first[1:] = classes[members[1:]] != classes[members[:-1]]
    represents = np.zeros(graph.num_nodes, np.bool_)
    represents[members[first]] = True
    return ~represents
