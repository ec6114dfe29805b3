"""What a method is told of a growing graph, and what it answers: where to continue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = ["Branch", "Growth", "Plan", "chains", "dealt", "onward", "steady_chains"]


@dataclass(frozen=True, slots=True)
class Branch:
    """Continuations of one state.

    Example, two more continuations from after the third token of the edge to node 7::

        Branch(node=7, count=2, offset=3)

    Attributes:
        node: position of the state in the graph that the method was shown.
        count: how many continuations.
        offset: None: from the node itself. A number: from inside the edge to ``node``, after so
            many of its tokens; the edge is cut in two there (once, whoever asks for the same cut).
            Its last kept token must be one the policy sampled, and so the one after it.
        tree: number of the tree that the new nodes belong to; None: that of ``node``, and a new
            one for each continuation of the root.
        value_only: the continuations serve an estimate and are not trained; nor is what continues
            them.
    """

    node: int
    count: int = 1
    offset: int | None = None
    tree: int | None = None
    value_only: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The next layer of one graph.

    Attributes:
        branches: what to continue, most wanted first: where the budget does not suffice, the last
            ones go short. Empty: the graph is finished.
        memory: what the method wants to be shown again next time.
        saved: continuations that redundant states did not get in this layer.
        reallocated: continuations that others get beyond the layer's branching number.
        waiting: active states that are not continued in this layer and stay active.
    """

    branches: Sequence[Branch]
    memory: Any = None
    saved: int = 0
    reallocated: int = 0
    waiting: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """A graph as it stands when a method is asked for its next layer.

    Attributes:
        graph: so far.
        reached: positions of the nodes that the last layer reached; the root at first.
        active: the states that a path goes on from: those of them that ended no path, and the last
            plan's ``waiting`` before them.
        layer: 1 for the first layer below the root, then counted up at each call.
        memory: of the method's last plan; None at first.
        tokens_left: policy tokens that the prompt's budget still holds; None: no such budget.
        trajectories_left: further paths that the prompt's budget still holds; None: no such budget.
        path_tokens: what one path from the prompt can cost at most, in policy tokens.
        edge_tokens: what one edge can cost at most.
        tokens_behind: what the path of a node can cost at most from there on.
        seed: of the method's own random numbers, the same in every repetition of a run.
        decode: text of token ids.
    """

    graph: RolloutGraph
    reached: IntArray
    active: IntArray
    layer: int
    memory: Any
    tokens_left: int | None
    trajectories_left: int | None
    path_tokens: int
    edge_tokens: int
    tokens_behind: Callable[[int], int]
    seed: int
    decode: Callable[[Sequence[int]], str]


def onward(growth: Growth, memory: Any = None) -> Plan:
    """One continuation of every path that is not finished, as far as a budget of tokens goes.

    Within a budget paths end in the order in which they left the prompt: one goes on
    where the tokens that are left suffice for its next edge whatever one path from each state
    before it will cost, and waits where they do not. So a budget cuts off the last paths and not
    the long ones: if all grew abreast until it is spent, most of those that end would be short.
    """
    if growth.tokens_left is None:
        return Plan(tuple(Branch(v) for v in growth.active.tolist()), memory)
    branches, waiting, _ = _in_turn(growth, growth.active.tolist(), growth.tokens_left)
    return Plan(branches, memory, waiting=waiting)


def dealt(nodes: IntArray, counts: IntArray, order: IntArray, room: int | None) -> IntArray:
    """[k] the continuations of k open states that begin at most ``room`` paths.

    Every state keeps its first one, which begins none but at the prompt; the others are dealt in
    rounds, one for each state that still wants one.

    Args:
        nodes: [k] positions of the states.
        counts: [k] how many each wants, at least 1.
        order: [k] places in ``nodes``, first come, first served in every round.
        room: None: all that are wanted.
    """
    goes_on = (nodes > 0).astype(np.int64)
    more = counts - goes_on
    if room is None or more.sum() <= room:
        return counts
    owner = np.repeat(order, more[order])
    rounds = np.arange(len(owner)) - np.repeat(np.cumsum(more[order]) - more[order], more[order])
    served = owner[np.argsort(rounds, kind="stable")[: max(room, 0)]]
    return goes_on + np.bincount(served, minlength=len(nodes))


def chains(growth: Growth, wanted: int) -> tuple[Branch, ...]:
    """New chains from the prompt: ``wanted`` in the first layer, then what fills the budget.

    No more are begun at once than can surely be finished within a budget of tokens, but one; the
    budget cuts the last one.
    """
    left = growth.trajectories_left
    count = wanted if growth.layer == 1 else (left or 0)
    if growth.tokens_left is not None:
        fitting = max(1, growth.tokens_left // growth.path_tokens) if growth.tokens_left else 0
        count = fitting if left is None else min(left, fitting)
    return (Branch(0, count),) if count > 0 else ()


def steady_chains(growth: Growth, wanted: int, memory: Any = None) -> Plan:
    """Chains from the prompt and nothing else, ``wanted`` or as many as a budget of tokens holds.

    A budget gives the chains that one after another would: all of them whole but the last. They
    grow together as far as that is sure: a chain goes on, and a new one begins, where the tokens
    that are left suffice for its next edge whatever the chains before it will cost.

    A method whose own structure is complete spends the rest of a prompt's budget on these
    (``wanted`` 0); without a budget there is no rest.

    Args:
        growth: whose active states, if any, are of such chains.
        wanted: how many, where there is no budget of tokens.
        memory: of the plan.
    """
    left = growth.tokens_left
    if left is None:
        goes_on = growth.layer > 1 and len(growth.active) > 0
        return onward(growth, memory) if goes_on else Plan(chains(growth, wanted), memory)
    open_chains = [] if growth.layer == 1 else growth.active.tolist()
    branches, waiting, left = _in_turn(growth, open_chains, left)
    begun = max(0, -(-(left - growth.edge_tokens + 1) // growth.path_tokens))
    if not branches:
        begun = max(begun, int(left > 0))
    if growth.trajectories_left is not None:
        begun = min(begun, growth.trajectories_left)
    if begun:
        branches.append(Branch(0, begun))
    return Plan(tuple(branches), memory, waiting=waiting)


def _in_turn(
    growth: Growth, states: Sequence[int], left: int
) -> tuple[list[Branch], list[int], int]:
    """Which states go on and which wait, and what the most they can all cost leaves of ``left``."""
    branches: list[Branch] = []
    waiting: list[int] = []
    for v in sorted(states, key=lambda v: growth.graph.path(v)[:1]):
        most = growth.tokens_behind(v)
        if not branches or left >= min(most, growth.edge_tokens):
            branches.append(Branch(v))
        else:
            waiting.append(v)
        left -= most
    return branches, waiting, left
