"""What a method is: how to grow a graph and how to credit it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.graph.samples import TrainingSample, to_sample
from graphpo_agent.methods.growth import Growth, Plan

__all__ = [
    "UNMERGED",
    "Credit",
    "Method",
    "Whiten",
    "check_sizes",
    "credits_of",
    "training_sample",
]

Whiten = Literal["none", "batch"]
UNMERGED = MergeOptions(merge="none")
"""Every state is one of its own: ``merging`` of the methods that compare none."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What a method says each edge of one graph is worth, and which tokens are trained.

    Attributes:
        classes: [n] int64, the smallest member (position) of each node's equivalence class.
        advantages: [num_terms, n] float64, NaN at the root; what the trainer uses. Where an
            advantage belongs to a trajectory: the mean over the trained trajectories through
            the edge, 0 without one.
        columns: per-node values to show, by the names of the score file, root included.
        trajectory_advantages: [num_terminals] in leaf order, for methods whose advantage belongs
            to a trajectory, NaN for one that is not trained; ``rows`` are then the others. None
            for methods with edge advantages.
        rows: positions of the terminals whose trajectories are trained, each as a row of its own,
            so that an edge is trained once for every row through it; None: every direct edge is
            trained once.
        untrained: [num_tokens] bool, tokens of the graph that carry no loss although the policy
            sampled them; None: none.
        dropped: [n] bool, edges none of whose tokens carry loss. ``untrained`` names these tokens
            where they are known; a file may tell only how many there are. None: none.
    """

    classes: NDArray[np.int64]
    advantages: NDArray[np.float64]
    columns: Mapping[str, NDArray[np.float64]] = field(
        default_factory=dict[str, NDArray[np.float64]]
    )
    trajectory_advantages: NDArray[np.float64] | None = None
    rows: NDArray[np.int64] | None = None
    untrained: NDArray[np.bool_] | None = None
    dropped: NDArray[np.bool_] | None = None

    @property
    def has_signal(self) -> bool:
        """Whether any edge has an advantage other than 0."""
        values = [self.advantages.ravel()]
        if self.trajectory_advantages is not None:
            values.append(self.trajectory_advantages)
        return bool(np.any(np.nan_to_num(np.concatenate(values)) != 0.0))


def training_sample(graph: RolloutGraph, credit: Credit) -> TrainingSample:
    """What the trainer needs of a graph and its credit (Algorithm 1, stage 4).

    Raises:
        GraphError: tokens or log-probabilities of a trained edge are unknown.
    """
    of_rows = credit.trajectory_advantages
    return to_sample(
        graph,
        credit.advantages,
        credit.rows,
        None if of_rows is None else of_rows[~np.isnan(of_rows)],
        credit.untrained,
    )


class Method(Protocol):
    """An expansion policy and a credit; the trainer knows no more of a method than this."""

    @property
    def name(self) -> str:
        """As in configurations and score files."""
        ...

    @property
    def merging(self) -> MergeOptions:
        """Which states are taken as the same, while growing and when crediting."""
        ...

    @property
    def needs_states(self) -> bool:
        """Whether growing or crediting looks at the nodes' states at all."""
        ...

    @property
    def whiten(self) -> Whiten:
        """Whether advantages are whitened over all trained tokens of a batch."""
        ...

    def plan(self, growth: Growth) -> Plan:
        """The next layer of a growing graph."""
        ...

    def assign_credit(
        self, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
    ) -> list[Credit]:
        """The advantages of a batch of graphs, before whitening."""
        ...


def check_sizes(method: str, *, least: int = 1, **counts: int | None) -> None:
    """Let numbers of at least ``least`` pass, and None.

    Example: ``check_sizes("treepo", width=0)`` raises ``treepo: width is 0, want at least 1``.

    Raises:
        ConfigError: one of them is less; names it.
    """
    for name, count in counts.items():
        if count is not None and count < least:
            raise ConfigError(f"{method}: {name} is {count}, want at least {least}")


def credits_of(
    method: Method, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
) -> list[Credit]:
    """What the method's ``assign_credit`` says of each graph.

    Raises:
        ConfigError: it does not say one thing of each, or of other trajectories than its rows.
    """
    credits = method.assign_credit(graphs, classes)
    if len(credits) != len(graphs):
        raise ConfigError(
            f"method {method.name}: assign_credit returned {len(credits)} credits for "
            f"{len(graphs)} graphs"
        )
    for graph, credit in zip(graphs, credits, strict=True):
        of_rows = credit.trajectory_advantages
        if of_rows is not None and not _are_rows(credit.rows, graph.terminals, of_rows):
            raise ConfigError(
                f"method {method.name}: graph {graph.id}: trajectory_advantages want one number "
                "for each terminal, and rows that are the terminals whose number is not NaN"
            )
    return credits


def _are_rows(
    rows: NDArray[np.int64] | None, terminals: NDArray[np.int64], of_rows: NDArray[np.float64]
) -> bool:
    if rows is None or len(of_rows) != len(terminals):
        return False
    return np.array_equal(rows, terminals[~np.isnan(of_rows)])
