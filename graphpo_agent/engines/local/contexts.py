"""The tree of token runs behind a policy's contexts, and what of it is computed next."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from graphpo_agent.engines.local.arrays import to_device
from graphpo_agent.engines.local.beginnings import SHORTEST, common_length
from graphpo_agent.graph.arrays import IntArray
from graphpo_agent.types import Context

__all__ = ["ContextTree", "LocalContext", "Node", "Run"]


@dataclass(frozen=True, slots=True)
class LocalContext:
    """A handle of one node. ``generation`` counts releases: a released handle is refused."""

    index: int
    generation: int
    num_tokens: int


@dataclass(slots=True)
class Node:
    """One run of tokens behind its parent.

    Attributes:
        parent: index of the node before; -1 where none is waited for.
        token_ids: the run.
        pending: those of its tokens that are not yet computed.
        sampled: whether they were sampled by the policy.
        num_tokens: length of the path, ``pending`` included.
        slots: pool slots of the computed tokens of the whole path; None: the parent's are to
            be computed first.
        state: which of the last hidden states is its own; None: it is not computed.
        memory: slot of what linear attention layers know at the last computed token; 0: that is
            the parent's.
        queued: whether a run that computes it is under way.
    """

    parent: int
    token_ids: tuple[int, ...]
    pending: tuple[int, ...]
    sampled: bool
    num_tokens: int
    slots: IntArray | None
    state: int | None = None
    memory: int = 0
    queued: bool = False


@dataclass(slots=True)
class Run:
    """Tokens to be computed in one go: the pending tokens of a chain of nodes.

    Attributes:
        nodes: the chain, parents first.
        token_ids: their pending tokens, one after another.
        ends: how many of the tokens come before each node's end.
        slots: pool slots of the whole path: what is computed already, then ``token_ids``'s own.
        memories: slots of what linear attention layers know: before the run, then at each node.
        done: how many of the tokens are computed.
    """

    nodes: tuple[int, ...]
    token_ids: IntArray
    ends: tuple[int, ...]
    slots: IntArray
    memories: tuple[int, ...]
    done: int = 0

    @property
    def num_before(self) -> int:
        """Tokens of the path before the run."""
        return len(self.slots) - len(self.token_ids)

    def memory_at(self, num_done: int) -> int:
        """The slot that holds what is known behind so many of the tokens."""
        return self.memories[bisect_left(self.ends, num_done) + 1] if num_done else self.memories[0]


class ContextTree:
    """All contexts of a policy since the last release.

    The same tokens sampled, or given, behind a node again are the same node, and what prompts
    begin with alike is one node.
    """

    def __init__(self, cuts_compute: bool = False) -> None:
        """Args: whether what ends inside a node is computed again, as linear layers need it."""
        self._cuts_compute = cuts_compute
        self._nodes: list[Node] = []
        self._prompts: list[tuple[tuple[int, ...], int]] = []
        self._known: dict[tuple[int, bool, tuple[int, ...]], int] = {}
        self._cuts: dict[int, list[tuple[int, int]]] = {}
        self._generation = 0
        self._states = torch.empty(0)
        self._num_states = 0

    def __getitem__(self, index: int) -> Node:
        return self._nodes[index]

    def clear(self) -> None:
        """Forget everything; older handles are refused from now on."""
        self._nodes, self._prompts, self._known, self._cuts = [], [], {}, {}
        self._states, self._num_states = torch.empty(0), 0
        self._generation += 1

    def open(self, token_ids: Sequence[int]) -> LocalContext:
        """A prompt."""
        tokens = tuple(map(int, token_ids))
        place = bisect_left(self._prompts, (tokens,))
        # In the order of their texts, a neighbour has most in common with a new one.
        near = self._prompts[max(0, place - 1) : place + 1]
        shared, node = max(((common_length(text, tokens), v) for text, v in near), default=(0, -1))
        node = self._beginning(node, shared, tokens[shared - 1]) if shared else -1
        shared = self._num_tokens(node)
        if shared == len(tokens):
            return self._handle(node)
        context = self.extend(node, tokens[shared:])
        self._prompts.insert(place, (tokens, context.index))
        return context

    def extend(self, parent: int, token_ids: Sequence[int]) -> LocalContext:
        """Tokens that the policy did not sample behind a node; -1: behind nothing."""
        return self._uncomputed_behind(parent, False, tuple(map(int, token_ids)))

    def add_sampled(
        self, parent: int, token_ids: Sequence[int], own_slots: IntArray, memory: int = 0
    ) -> LocalContext:
        """Sampled tokens behind a node, all computed but the last; see ``Node.memory``."""
        key = parent, True, tuple(token_ids)
        if key not in self._known:
            node = self._nodes[parent]
            assert node.slots is not None
            slots, length = np.concatenate([node.slots, own_slots]), len(token_ids)
            length += node.num_tokens
            self._add(key, Node(parent, key[2], key[2][-1:], True, length, slots, memory=memory))
        return self._handle(self._known[key])

    def cut(self, index: int, num_tokens: int, last: int) -> LocalContext:
        """The first tokens of a node's path, all of them computed but perhaps the last.

        Args:
            index: the node.
            num_tokens: of its path, to the cut.
            last: the last of them.
        """
        index = self._holding(index, num_tokens)
        if self._cuts_compute:
            return self._cut_anew(index, num_tokens)
        node = self._nodes[index]
        own = node.token_ids[: num_tokens - self._num_tokens(node.parent)]
        assert node.slots is not None and len(node.slots) >= num_tokens - 1, "computed"
        slots = node.slots[: num_tokens - 1]
        self._nodes.append(Node(node.parent, own, (last,), True, num_tokens, slots))
        return self._handle(len(self._nodes) - 1)

    def index(self, context: Context) -> int:
        """The node of a handle; ValueError for a foreign or released one."""
        if not isinstance(context, LocalContext) or context.generation != self._generation:
            raise ValueError("this context was made by another policy or has been released")
        return context.index

    def uncomputed(self, target: int) -> tuple[int, ...]:
        """The chain of nodes down to ``target`` that are to be computed; empty: none is.

        Empty too while a run that computes one of them is under way.
        """
        nodes: list[int] = []
        node = target
        while node >= 0 and self._nodes[node].state is None:
            if self._nodes[node].queued:
                return ()
            nodes.append(node)
            node = self._nodes[node].parent
        return tuple(reversed(nodes))

    def start_run(
        self,
        nodes: tuple[int, ...],
        allocate: Callable[[int], IntArray],
        allocate_memory: Callable[[int], IntArray],
    ) -> Run:
        """Queue a chain of nodes.

        Args:
            nodes: the chain.
            allocate: finds the slots for so many pending tokens.
            allocate_memory: for what linear layers know at so many nodes.
        """
        head = self._nodes[nodes[0]]
        above = self._nodes[head.parent] if head.parent >= 0 else None
        before = above.slots if above is not None and head.slots is None else head.slots
        assert before is not None, "the parent is computed"
        memory = head.memory or (above.memory if above is not None else 0)
        for index in nodes:
            node = self._nodes[index]
            node.queued = True
            node.memory = node.memory or int(allocate_memory(1)[0])
        pending = [self._nodes[index].pending for index in nodes]
        token_ids = np.array(list(chain.from_iterable(pending)), np.int64)
        return Run(
            nodes,
            token_ids,
            tuple(accumulate(map(len, pending))),
            np.concatenate([before, allocate(len(token_ids))]),
            (memory, *(self._nodes[index].memory for index in nodes)),
        )

    def settle(self, computed: Sequence[tuple[int, IntArray]], hidden: Tensor) -> None:
        """Write down what is now known of k nodes.

        Args:
            computed: each node and the pool slots of its path.
            hidden: [k, d] their last hidden states, from which the next tokens are drawn.
        """
        first, self._num_states = self._num_states, self._num_states + len(computed)
        if self._num_states > len(self._states):
            more = hidden.new_empty((max(first, len(computed)), hidden.shape[1]))
            self._states = torch.cat([self._states[:first], more]) if first else more
        self._states[first : self._num_states] = hidden
        for state, (index, slots) in enumerate(computed, first):
            node = self._nodes[index]
            node.slots, node.state, node.pending, node.queued = slots, state, (), False

    def hidden(self, nodes: Sequence[int]) -> Tensor:
        """[k, d] last hidden states of k computed nodes."""
        states = np.array([self._nodes[index].state for index in nodes], np.int64)
        return self._states[to_device(states, self._states.device)]

    def _beginning(self, index: int, num_tokens: int, last: int) -> int:
        """The node of the first tokens of a prompt, made where they end inside another.

        Perhaps of fewer or of none (-1): where that one is being computed, or a few are all.
        """
        index = self._holding(index, num_tokens)
        node = self._nodes[index]
        if node.num_tokens == num_tokens:
            return index
        if num_tokens - self._num_tokens(node.parent) < SHORTEST:
            return node.parent
        count = num_tokens - (node.num_tokens - len(node.pending))
        if count <= 0:
            return self.cut(index, num_tokens, last).index
        if node.queued:
            return node.parent
        own, rest = node.pending[:count], node.pending[count:]
        self._nodes.append(Node(node.parent, own, own, False, num_tokens, node.slots))
        node.parent, node.token_ids, node.pending = len(self._nodes) - 1, rest, rest
        node.slots = None
        return node.parent

    def _cut_anew(self, index: int, num_tokens: int) -> LocalContext:
        """The first tokens of a node's path, to be computed from the last cut before there on."""
        node, cuts = self._nodes[index], self._cuts.setdefault(index, [])
        first = self._num_tokens(node.parent)
        place = bisect_right(cuts, num_tokens, key=lambda cut: cut[0])
        start, parent = cuts[place - 1] if place else (first, node.parent)
        if start == num_tokens:
            return self._handle(parent)
        own = node.token_ids[start - first : num_tokens - first]
        context = self._uncomputed_behind(parent, node.sampled, own)
        cuts.insert(place, (num_tokens, context.index))
        return context

    def _holding(self, index: int, num_tokens: int) -> int:
        """The node that holds the last of the first tokens of a node's path."""
        while self._num_tokens(self._nodes[index].parent) >= num_tokens:
            index = self._nodes[index].parent
        return index

    def _num_tokens(self, index: int) -> int:
        """Of the path to a node; 0 where there is none (-1)."""
        return self._nodes[index].num_tokens if index >= 0 else 0

    def _uncomputed_behind(
        self, parent: int, sampled: bool, token_ids: tuple[int, ...]
    ) -> LocalContext:
        """All of a node's tokens are to be computed; -1: behind nothing."""
        key = parent, sampled, token_ids
        if key not in self._known:
            length, slots = self._num_tokens(parent) + len(token_ids), np.empty(0, np.int64)
            if parent >= 0:
                node = self._nodes[parent]
                slots = None if node.state is None else node.slots
            self._add(key, Node(parent, token_ids, token_ids, sampled, length, slots))
        return self._handle(self._known[key])

    def _add(self, key: tuple[int, bool, tuple[int, ...]], node: Node) -> None:
        self._known[key] = len(self._nodes)
        self._nodes.append(node)

    def _handle(self, index: int) -> LocalContext:
        return LocalContext(index, self._generation, self._nodes[index].num_tokens)
