"""A tiny world in which a method's ``plan`` can be watched: cuts, random edges, budgets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Branch, Growth, Plan
from graphpo_agent.methods.method import Method

__all__ = ["End", "Grown", "World", "ends_at", "grow"]

End = Literal["goes_on", "terminal", "early_stopped"]


@dataclass(frozen=True, slots=True)
class World:
    """What sampling meets.

    Attributes:
        end: what becomes of an edge, told how deep it leads and a source of chance.
        edge_tokens: an edge has 1 to so many sampled tokens.
        observations: as many observation tokens follow the sampled ones of an edge.
        max_layers: plans that are asked for at most; more is a test's failure.
        tokens: policy tokens per prompt; None: any number.
        trajectories: paths per prompt; None: any number.
        decode: text of token ids.
    """

    end: Callable[[int, np.random.Generator], End]
    edge_tokens: int = 4
    observations: int = 0
    max_layers: int = 100
    tokens: int | None = None
    trajectories: int | None = None
    decode: Callable[[Sequence[int]], str] = lambda ids: " ".join(map(str, ids))


@dataclass(frozen=True, slots=True)
class Grown:
    """The finished graph, and what was asked and answered in each layer, the last one included."""

    graph: RolloutGraph
    growths: list[Growth]
    plans: list[Plan]
    value_only: frozenset[int]
    """Ids of the nodes whose edges were made for an estimate only."""

    def counts(self, layer: int) -> list[tuple[int, int]]:
        """(id of the node, continuations) of each branch of a layer, 1 the first."""
        ids = self.growths[layer - 1].graph.node_ids
        return [(int(ids[b.node]), b.count) for b in self.plans[layer - 1].branches]


def ends_at(
    depth: int, *, finish: float = 0.0, stop: float = 0.0
) -> Callable[[int, np.random.Generator], End]:
    """Paths end as terminals at ``depth``, before it by chance; some are stopped early instead."""

    def end(reached: int, rng: np.random.Generator) -> End:
        if reached < depth and rng.random() >= finish:
            return "goes_on"
        return "early_stopped" if rng.random() < stop else "terminal"

    return end


def grow(method: Method, world: World, seed: int = 0) -> Grown:
    """Ask ``method`` for plans until it makes none, and carry each of them out."""
    one = _Growing(world, np.random.default_rng(seed))
    memory = None
    growths: list[Growth] = []
    plans: list[Plan] = []
    for layer in range(1, world.max_layers + 1):
        growths.append(
            Growth(
                graph=one.graph,
                reached=one.reached,
                active=one.active,
                layer=layer,
                memory=memory,
                tokens_left=one.tokens,
                trajectories_left=one.trajectories,
                path_tokens=world.edge_tokens * world.max_layers,
                edge_tokens=world.edge_tokens,
                tokens_behind=partial(one.tokens_behind, one.graph),
                seed=1000 * seed + layer,
                decode=world.decode,
            )
        )
        plans.append(method.plan(growths[-1]))
        memory = plans[-1].memory
        if not plans[-1].branches:
            break
        one.carry_out(plans[-1].branches, plans[-1].waiting)
        if not len(one.reached):
            break  # the budget is spent
    else:
        raise AssertionError(f"more than {world.max_layers} layers")
    return Grown(one.graph, growths, plans, frozenset(one.value_only))


class _Growing:
    def __init__(self, world: World, chance: np.random.Generator) -> None:
        self.world, self.chance = world, chance
        self.graph = RolloutGraph.root("g", token_ids=[1, 2, 3])
        self.reached: IntArray = np.zeros(1, np.int64)
        self.active: IntArray = self.reached
        self.tokens, self.trajectories = world.tokens, world.trajectories
        self.value_only: set[int] = set()

    def carry_out(self, branches: Sequence[Branch], waiting: Sequence[int]) -> None:
        self.graph, starts = _cut(self.graph, branches)
        begun = set(self.graph.parent[1:].tolist())
        made: list[tuple[NewNode, End]] = []
        for branch, start in zip(branches, starts, strict=True):
            for _ in range(branch.count):
                another = start == 0 or start in begun
                if self.tokens == 0 or (another and self.trajectories == 0):
                    continue
                begun.add(start)
                if self.trajectories is not None:
                    self.trajectories -= another
                estimate = branch.value_only or int(self.graph.node_ids[start]) in self.value_only
                if estimate:
                    self.value_only.add(int(self.graph.node_ids.max()) + 1 + len(made))
                tree = int(self.graph.tree[start]) if branch.tree is None else branch.tree
                made.append(self._sample(start, estimate, tree))
        first = self.graph.num_nodes
        self.graph = self.graph.append([node for node, _ in made])
        self.reached = np.arange(first, self.graph.num_nodes)
        goes_on = self.reached[[end == "goes_on" for _, end in made]]
        self.active = np.concatenate([np.array(waiting, np.int64), goes_on])

    def tokens_behind(self, graph: RolloutGraph, v: int) -> int:
        return self.world.edge_tokens * (self.world.max_layers - int(graph.depth[v]))

    def _sample(self, parent: int, estimate: bool, tree: int) -> tuple[NewNode, End]:
        world, chance = self.world, self.chance
        length = int(chance.integers(1, world.edge_tokens + 1))
        end = world.end(int(self.graph.depth[parent]) + 1, chance)
        if self.tokens is not None and self.tokens <= length:
            length, end = self.tokens, "early_stopped"
        if self.tokens is not None:
            self.tokens -= length
        rest = world.observations if end == "goes_on" else 0
        unknown = [float("nan")]
        logprobs = unknown * length if estimate else (-chance.exponential(size=length)).tolist()
        node = NewNode(
            parent=parent,
            token_ids=chance.integers(4, 100, length + rest).tolist(),
            loss_mask=[0 if estimate else 1] * length + [0] * rest,
            logprobs=[*logprobs, *(unknown * rest)],
            terminal=end == "terminal",
            reward=float(chance.integers(2)) if end == "terminal" else None,
            tree=None if tree < 0 else tree,
        )
        return node, end


def _cut(graph: RolloutGraph, branches: Sequence[Branch]) -> tuple[RolloutGraph, list[int]]:
    """The graph with all cuts made, and where each branch starts in it."""
    ids = [int(graph.node_ids[branch.node]) for branch in branches]
    cuts = {(b.node, b.offset) for b in branches if b.offset is not None}
    made: dict[tuple[int, int], int] = {}
    for node, offset in sorted(cuts, reverse=True):
        start = int(graph.offsets[node])
        kept, after = graph.loss_mask[start + offset - 1], graph.loss_mask[start + offset]
        assert kept and after, "a cut between tokens that the policy did not sample"
        graph = graph.split([(node, offset)])
        made[node, offset] = int(graph.node_ids[node])
    place = {int(v): i for i, v in enumerate(graph.node_ids)}
    starts = [
        place[v] if b.offset is None else place[made[b.node, b.offset]]
        for v, b in zip(ids, branches, strict=True)
    ]
    return graph, starts
