"""The tree of token runs behind a policy's contexts, and the order in which to compute them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["LocalContext", "Node", "Run", "plan_rounds", "similar_lengths"]


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
        parent: index of the node before; -1 at a prompt.
        pending: tokens not yet computed.
        sampled: whether ``pending`` was sampled by the policy.
        num_tokens: length of the path, ``pending`` included.
        slots: pool slots of the computed tokens of the whole path; None: the parent's are to
            be computed first.
        hidden: [d] last hidden state, from which the next token is drawn; None: not computed.
    """

    parent: int
    pending: tuple[int, ...]
    sampled: bool
    num_tokens: int
    slots: NDArray[np.int64] | None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens computed in one go: the pending tokens of a chain of nodes, after a prefix."""

    nodes: tuple[int, ...]
    prefix: NDArray[np.int64]
    token_ids: tuple[int, ...]


def plan_rounds(nodes: Sequence[Node], targets: set[int]) -> list[list[tuple[int, ...]]]:
    """Which chains of nodes to compute in which round, so that no token is computed twice.

    A node joins its parent's chain if it is the parent's only child to be computed; other
    children wait for the round after the parent's. Nodes are numbered parents first.
    """
    needed: set[int] = set()
    for node in targets:
        while node >= 0 and node not in needed and nodes[node].hidden is None:
            needed.add(node)
            node = nodes[node].parent
    fan_out = Counter(nodes[i].parent for i in needed)
    rounds: list[list[list[int]]] = []
    place: dict[int, tuple[int, list[int]]] = {}
    for i in sorted(needed):
        parent = nodes[i].parent
        if parent in place and fan_out[parent] == 1:
            place[i] = place[parent]
            place[i][1].append(i)
            continue
        number = place[parent][0] + 1 if parent in place else 0
        place[i] = (number, [i])
        rounds += [[]] if number == len(rounds) else []
        rounds[number].append(place[i][1])
    return [[tuple(chain) for chain in chains] for chains in rounds]


def similar_lengths(runs: list[Run], max_columns: int, max_tokens: int) -> list[list[Run]]:
    """Batches of runs whose lengths differ by a factor of at most about two.

    Args:
        runs: what to compute.
        max_columns: rows times (longest prefix + longest run) of a batch, one row apart.
        max_tokens: rows times longest run of a batch, one row apart.
    """
    batches: list[list[Run]] = []
    longest_prefix = 0
    for run in sorted(runs, key=lambda run: len(run.token_ids)):
        longest_prefix = max(longest_prefix, len(run.prefix))
        columns = longest_prefix + len(run.token_ids)
        fits = batches and (
            len(run.token_ids) <= 2 * len(batches[-1][0].token_ids) + 16
            and (len(batches[-1]) + 1) * columns <= max_columns
            and (len(batches[-1]) + 1) * len(run.token_ids) <= max_tokens
        )
        if fits:
            batches[-1].append(run)
        else:
            batches.append([run])
    return batches
