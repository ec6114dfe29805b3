"""What a method is: how to grow a graph and how to credit it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.graph.samples import TrainingSample, to_sample
from graphpo_agent.methods.growth import Branch, Growth, Plan

__all__ = [
    "UNMERGED",
    "Credit",
    "Method",
    "Whiten",
    "check_sizes",
    "credits_of",
    "plan_of",
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


def plan_of(method: Method, growth: Growth) -> Plan:
    """What the method's ``plan`` says of a growing graph.

    Raises:
        ConfigError: it is no plan, or one of other nodes than the graph has.
    """
    plan, count = method.plan(growth), growth.graph.num_nodes
    says = f"method {method.name}: plan returned"
    if not isinstance(plan, Plan):
        raise ConfigError(f"{says} {plan!r:.60}, want a Plan")
    if not isinstance(plan.branches, Sequence):
        raise ConfigError(f"{says} {plan.branches!r:.60} as branches, want a list of them")
    for branch in plan.branches:
        if not (isinstance(branch, Branch) and _is_whole(branch.count)):
            raise ConfigError(f"{says} {branch!r:.120}, want a Branch with a whole count")
        if not _is_whole(branch.node, count):
            raise ConfigError(f"{says} {branch!r:.120} for a graph of {count} nodes")
    for node in plan.waiting:
        if not _is_whole(node, count):
            raise ConfigError(f"{says} {node!r:.60} as waiting for a graph of {count} nodes")
    return plan


def _is_whole(value: Any, below: float = np.inf) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < below


def credits_of(
    method: Method, graphs: Sequence[RolloutGraph], classes: Sequence[NDArray[np.int64]]
) -> list[Credit]:
    """What the method's ``assign_credit`` says of each graph.

    Raises:
        ConfigError: it does not say one thing of each, one that does not fit its graph, or one of
            other trajectories than its rows.
    """
    credits = method.assign_credit(graphs, classes)
    says = f"method {method.name}: assign_credit returned"
    if not isinstance(credits, list):
        raise ConfigError(f"{says} {type(credits).__name__}, want a list of credits")
    if len(credits) != len(graphs):
        raise ConfigError(f"{says} {len(credits)} credits for {len(graphs)} graphs")
    for graph, credit in zip(graphs, credits, strict=True):
        if not isinstance(credit, Credit):
            raise ConfigError(f"{says} {credit!r:.60}, want a Credit")
        misfit = _misfit(graph, credit)
        if misfit is not None:
            raise ConfigError(f"method {method.name}: graph {graph.id}: {misfit}")
    return credits


def _misfit(graph: RolloutGraph, credit: Credit) -> str | None:
    """What of a credit does not fit its graph."""
    of_nodes = {"classes": credit.classes, **credit.columns}
    sizes = {name: (values, graph.num_nodes) for name, values in of_nodes.items()}
    if credit.dropped is not None:
        sizes["dropped"] = (credit.dropped, graph.num_nodes)
    if credit.untrained is not None:
        sizes["untrained"] = (credit.untrained, len(graph.token_ids))
    for name, (values, size) in sizes.items():
        if not _is_array(values, size):
            return f"{name} want an array of {size} numbers"
    terms = credit.advantages
    of_edges = isinstance(terms, np.ndarray) and terms.ndim == 2
    if not (of_edges and all(_is_array(term, graph.num_nodes) for term in terms)):
        return f"advantages want an array of numbers, [num_terms, {graph.num_nodes}]"
    of_rows = credit.trajectory_advantages
    if of_rows is not None and not _are_rows(credit.rows, graph.terminals, of_rows):
        return (
            "trajectory_advantages want one number for each terminal, and rows that are the "
            "terminals whose number is not NaN"
        )
    if np.isinf(terms).any() or (of_rows is not None and np.isinf(of_rows).any()):
        return "an advantage is infinite"
    return None


def _is_array(values: Any, size: int) -> bool:
    """Whether these are ``size`` numbers in a numpy array."""
    if not isinstance(values, np.ndarray) or values.shape != (size,):
        return False
    return values.dtype.kind in "bfiu"


def _are_rows(
    rows: NDArray[np.int64] | None, terminals: NDArray[np.int64], of_rows: NDArray[np.float64]
) -> bool:
    if rows is None or len(of_rows) != len(terminals):
        return False
    return np.array_equal(rows, terminals[~np.isnan(of_rows)])
