"""Which nodes may be taken as the same state, whatever their similarity (paper, section 3.2)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.forest import Forest, by_layer, preorder
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = ["MergeOptions", "PairRules", "codes_of", "pair_rules"]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MINUS = "\u2212"  # the mathematical sign, which models write as well as the hyphen


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """When two nodes are the same state.

    Example, the paper's merging, and none at all (a tree)::

        MergeOptions(threshold=0.92)
        MergeOptions(merge="none")

    Attributes:
        merge: by similarity, or not at all.
        threshold: the paper's kappa, 0 < threshold <= 1; the similarity from which nodes merge.
        merge_terminals: two terminals merge only with equal rewards, or never.
        max_layer_gap: largest difference of depth in a class; None for any.
        guard: ``numbers``: two states whose texts hold different multisets of numbers never merge,
            unless both have a key.

    Raises:
        ConfigError: a value outside its range.
    """

    merge: Literal["similarity", "none"] = "similarity"
    threshold: float = 0.92
    merge_terminals: Literal["same_reward", "never"] = "same_reward"
    max_layer_gap: int | None = None
    guard: Literal["none", "numbers"] = "none"

    def __post_init__(self) -> None:
        if self.merge not in ("similarity", "none"):
            raise ConfigError(f"merge is {self.merge!r}, want 'similarity' or 'none'")
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"merge threshold {self.threshold} is outside (0, 1]")
        if self.merge_terminals not in ("same_reward", "never"):
            raise ConfigError(
                f"merge_terminals is {self.merge_terminals!r}, want 'same_reward' or 'never'"
            )
        if self.max_layer_gap is not None and self.max_layer_gap < 0:
            raise ConfigError(f"max_layer_gap {self.max_layer_gap} is negative")
        if self.guard not in ("none", "numbers"):
            raise ConfigError(f"guard is {self.guard!r}, want 'none' or 'numbers'")


@dataclass(frozen=True, slots=True, eq=False)
class PairRules:
    """What of each node of a forest decides which nodes it may merge with.

    Attributes:
        kind: [n] -1 for a state to be continued, the reward for a terminal; NaN for what never
            merges (roots; terminals with ``merge_terminals: never``). Only equal kinds merge.
        key: [n] code of the state key, -1 without one.
        numbers: [n] code of the multiset of numbers in the state's text; -1 without a text and
            with ``guard: none``.
        depth: [n].
        first: [n] place in a depth-first order of the graph.
        last: [n] place of the last descendant.
        max_layer_gap: largest difference of depth; None for any.
    """

    kind: FloatArray
    key: IntArray
    numbers: IntArray
    depth: IntArray
    first: IntArray
    last: IntArray
    max_layer_gap: int | None

    def may_merge(self, i: IntArray, j: IntArray) -> BoolArray:
        """Whether pairs of one graph are candidates; ``i`` and ``j`` are broadcast.

        No node pairs with itself, its ancestors or its descendants.
        """
        ok = self.kind[i] == self.kind[j]
        ok &= (self.first[j] < self.first[i]) | (self.first[j] > self.last[i])
        ok &= (self.first[i] < self.first[j]) | (self.first[i] > self.last[j])
        keyed = self.both_keyed(i, j)
        ok &= ~keyed | (self.key[i] == self.key[j])
        a, b = self.numbers[i], self.numbers[j]
        ok &= keyed | (a == b) | (a < 0) | (b < 0)
        if self.max_layer_gap is not None:
            ok &= np.abs(self.depth[i] - self.depth[j]) <= self.max_layer_gap
        return ok

    def both_keyed(self, i: IntArray, j: IntArray) -> BoolArray:
        """Whether both nodes of each pair have a state key, which then decides alone."""
        return (self.key[i] >= 0) & (self.key[j] >= 0)


def pair_rules(graphs: Sequence[RolloutGraph], forest: Forest, options: MergeOptions) -> PairRules:
    """The rules for the nodes of a forest."""
    kind = np.where(forest.terminal, forest.reward, -1.0)
    kind[forest.parent < 0] = np.nan
    if options.merge_terminals == "never":
        kind[forest.terminal] = np.nan
    first, last = preorder(forest.parent, by_layer(forest.depth))
    numbers = np.full(len(kind), -1, np.int64)
    if options.guard == "numbers":
        numbers = codes_of([_numbers(state) for graph in graphs for state in graph.states])
    return PairRules(
        kind=kind,
        key=codes_of([key for graph in graphs for key in graph.keys]),
        numbers=numbers,
        depth=forest.depth,
        first=first,
        last=last,
        max_layer_gap=options.max_layer_gap,
    )


def _numbers(state: str | None) -> tuple[str, ...] | None:
    return None if state is None else tuple(sorted(_NUMBER.findall(state.replace(_MINUS, "-"))))


def codes_of(values: Sequence[str | tuple[str, ...] | None]) -> IntArray:
    """Equal values get equal codes; None gets -1."""
    table: dict[str | tuple[str, ...] | None, int] = {None: -1}
    return np.array([table.setdefault(value, len(table)) for value in values], np.int64)
