"""Union-find over states that keeps the class graph acyclic (paper, section 3.2).

Two classes are joined only if no directed path leads from one to the other along direct edges
with classes contracted. (That no pair is an ancestor of the other is not enough: a1→b1 and b2→a2
with a1~a2 and b1~b2 is a cycle.) Reachability is kept at each class's root as integers used as
bitsets of nodes, so that a refusal is one test and a union touches only the classes above and
below it. Bit v is node v, and nodes are numbered by rising id.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from graphpo_agent.graph.arrays import IntArray

__all__ = ["AcyclicClasses", "Traits", "bits"]


@dataclass(frozen=True, slots=True)
class Traits:
    """What decides whether two classes may become one, whatever their similarity.

    Example, two summaries that name different numbers, three layers apart::

        Traits(key=-1, numbers=4, keyed_numbers=-1, low=1, high=1)
        Traits(key=-1, numbers=9, keyed_numbers=-1, low=4, high=4)

    Attributes:
        key: the state key of the members that have one; -1 for none.
        numbers: the multiset of numbers of the members without a key; -1 for none.
        keyed_numbers: that of the members with a key; -1 for none, -2 if they differ.
        low: smallest depth of a member.
        high: largest depth of a member.
    """

    key: int
    numbers: int
    keyed_numbers: int
    low: int
    high: int

    def join(self, other: "Traits", max_layer_gap: int | None) -> "Traits | None":
        """The traits of the joined class; None if a pair across the two breaks a rule."""
        key = _common(self.key, other.key)
        numbers = _common(self.numbers, other.numbers)
        keyed_numbers = _common(self.keyed_numbers, other.keyed_numbers)
        low, high = min(self.low, other.low), max(self.high, other.high)
        if key == -2 or numbers == -2:
            return None
        if numbers >= 0 and keyed_numbers not in (-1, numbers):
            return None
        if max_layer_gap is not None and high - low > max_layer_gap:
            return None
        return Traits(key, numbers, keyed_numbers, low, high)


def _common(a: int, b: int) -> int:
    """The value both have, -1 being no value; -2 if they differ."""
    if a == -1 or a == b:
        return b
    return a if b == -1 else -2


class AcyclicClasses:
    """Classes that grow by ``unite``; nodes enter layer by layer.

    Example: two chains of two edges whose ends cannot merge crosswise::

        classes = AcyclicClasses([-1, -1, 0, 1], traits)   # 0→2, 1→3
        classes.enter([0, 1]); classes.enter([2, 3])
        classes.unite(0, 3)   # True
        classes.unite(1, 2)   # False: 1 → {0, 3} → 2

    Args:
        parent: parent of each node, -1 where paths through it do not matter.
        traits: of each node.
        max_layer_gap: largest depth difference within a class; None for any.
    """

    def __init__(
        self, parent: Sequence[int], traits: Sequence[Traits], max_layer_gap: int | None
    ) -> None:
        n = len(parent)
        self._parent = parent
        self._gap = max_layer_gap
        self._link = list(range(n))
        self._traits = list(traits)
        self._members = [1 << v for v in range(n)]
        self._above = [0] * n
        self._below = [0] * n
        self._roots = 0  # of classes whose reach is kept up to date
        self._fresh: set[int] = set()  # nodes of the last layer that are still as they entered
        for v in sorted(range(n), key=lambda v: -traits[v].low):
            if parent[v] >= 0:
                self._below[parent[v]] |= self._below[v] | self._members[v]

    def enter(self, nodes: Sequence[int]) -> None:
        """Let the nodes of the next layer take part; their parents have entered before."""
        for v in list(self._fresh):
            self._settle(v)
        self._fresh.update(nodes)

    def _settle(self, v: int) -> None:
        """From here on keep track of what is above ``v``. Before, its parent tells."""
        if v in self._fresh:
            self._above[v] = self._above_of(v)
            self._fresh.remove(v)
            self._roots |= 1 << v

    def _above_of(self, root: int) -> int:
        if root not in self._fresh:
            return self._above[root]
        if self._parent[root] < 0:
            return 0
        u = self.find(self._parent[root])
        return self._above[u] | self._members[u]

    def find(self, v: int) -> int:
        """The class of a node: its member with the smallest number."""
        link = self._link
        while link[v] != v:
            link[v] = link[link[v]]
            v = link[v]
        return v

    def closed(self, v: int) -> int:
        """The nodes that ``v`` cannot join for good: its own class and all above and below it."""
        r = self.find(v)
        return self._members[r] | self._above_of(r) | self._below[r]

    def members(self, v: int) -> int:
        """The nodes of the class of ``v``."""
        return self._members[self.find(v)]

    def labels(self) -> IntArray:
        """[n] the class of every node."""
        return np.array([self.find(v) for v in range(len(self._link))], np.int64)

    def unite(self, u: int, v: int) -> bool:
        """Join two classes unless a rule or a path forbids it. A refusal holds for good."""
        a, b = sorted((self.find(u), self.find(v)))
        self._settle(a)
        self._settle(b)
        if a == b or (self._below[a] | self._above[a]) >> b & 1:
            return False
        traits = self._traits[a].join(self._traits[b], self._gap)
        if traits is None:
            return False
        self._link[b] = a
        self._traits[a] = traits
        self._roots ^= 1 << b
        self._add_reach(self._above, self._below, a, b)
        self._add_reach(self._below, self._above, a, b)
        self._members[a] |= self._members[b]
        return True

    def _add_reach(self, near: list[int], far: list[int], a: int, b: int) -> None:
        """Give ``a`` what ``b`` reaches on the near side, and tell the classes there.

        Classes on the near side of both already reach everything on the far side of both.
        """
        for u, v in ((a, b), (b, a)):
            news = far[u] | self._members[u]
            for x in bits(near[v] & ~near[u] & self._roots):
                far[x] |= news
        near[a] |= near[b]


def bits(mask: int) -> Iterator[int]:
    """The members of a bitset, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
