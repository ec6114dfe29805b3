"""``graphpo score``: the credit of every graph in a file, whoever made it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.graph.equivalence import MergeOptions, find_classes_many
from graphpo_agent.graph.jsonl import read_graphs
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Credit, Method
from graphpo_agent.methods.tree import tree

__all__ = ["ScoreOptions", "score_file", "scoring_method"]

_BATCH = 64
"""Graphs credited together."""
_COUNTS = ("total",)
"""Columns that hold whole numbers."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The flags of ``graphpo score``, by name."""

    merge: Literal["similarity", "none"] = "similarity"
    merge_threshold: float = 0.92
    merge_terminals: Literal["same_reward", "never"] = "same_reward"
    max_layer_gap: int | None = None
    guard: Literal["numbers", "none"] = "none"
    keep_classes: bool = False
    pool_weight: float = 0.7
    efficiency_weight: float = 0.2
    efficiency_combine: Literal["mean", "sum"] = "mean"
    singleton: Literal["zero", "inherit"] = "zero"
    backup: Literal["leaf", "mean", "class"] = "leaf"
    normalize: Literal["std", "none", "rms"] = "std"
    trajectory_weight: float = 0.0


def scoring_method(name: str, options: ScoreOptions) -> Method:
    """The method of a name, as the flags set it.

    Raises:
        ConfigError: an option outside its range, or one the method cannot take.
    """
    merging, credit = _merging(options), _credit(options)
    if name == "grpo":
        if options.normalize == "rms":
            raise ConfigError("--normalize rms is not a setting of grpo: use std or none")
        return Grpo(normalize=options.normalize)
    return tree(credit=credit) if name == "tree" else GraphPO(merging=merging, credit=credit)


def _merging(options: ScoreOptions) -> MergeOptions:
    return MergeOptions(
        merge=options.merge,
        threshold=options.merge_threshold,
        merge_terminals=options.merge_terminals,
        max_layer_gap=options.max_layer_gap,
        guard=options.guard,
    )


def _credit(options: ScoreOptions) -> CreditOptions:
    return CreditOptions(
        pool_weight=options.pool_weight,
        efficiency_weight=options.efficiency_weight,
        efficiency_combine=options.efficiency_combine,
        singleton=options.singleton,
        backup=options.backup,
        normalize=options.normalize,
        trajectory_weight=options.trajectory_weight,
    )


def score_file(source: str, out: str, method_name: str, options: ScoreOptions) -> None:
    """Credit a file of graphs and write one JSON line per graph; whole or not at all.

    Raises:
        ConfigError: a bad option.
        GraphError: a malformed line (file and line number in the message).
        DataError: the input cannot be read or the output cannot be written.
    """
    method = scoring_method(method_name, options)
    path = Path(out)
    if not path.name or (path.exists() and not path.is_file()):
        raise DataError(f"output {out!r} is not a file")
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(_lines(read_graphs(source), method, options.keep_classes))
        partial.replace(path)
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def _lines(graphs: Iterable[RolloutGraph], method: Method, keep_classes: bool) -> Iterator[str]:
    for batch in _batches(graphs):
        classes = _classes(batch, method, keep_classes)
        for graph, credit in zip(batch, method.assign_credit(batch, classes), strict=True):
            yield json.dumps(_record(graph, credit, method.name), allow_nan=False) + "\n"


def _batches(graphs: Iterable[RolloutGraph]) -> Iterator[Sequence[RolloutGraph]]:
    source = iter(graphs)
    while batch := list(islice(source, _BATCH)):
        yield batch


def _classes(graphs: Sequence[RolloutGraph], method: Method, keep: bool) -> list[NDArray[np.int64]]:
    """The file's own classes where they are kept and complete, else those found."""
    given = [graph.given_classes if keep and method.name != "tree" else None for graph in graphs]
    open_graphs = [graph for graph, own in zip(graphs, given, strict=True) if own is None]
    found = iter(find_classes_many(open_graphs, method.merging))
    return [next(found) if own is None else own for own in given]


def _record(graph: RolloutGraph, credit: Credit, method_name: str) -> dict[str, object]:
    ids = graph.node_ids
    columns: dict[str, list[object]] = {"class": ids[credit.classes].tolist()}
    columns |= {name: _json_numbers(values, name) for name, values in credit.columns.items()}
    nodes = [
        {"id": node} | {name: values[i] for name, values in columns.items()}
        for i, node in enumerate(ids.tolist())
    ]
    return {
        "id": graph.id,
        "method": method_name,
        "nodes": [_without_root_edge(nodes[0]), *nodes[1:]],
        "trajectories": list(_trajectories(graph, credit)),
    }


def _trajectories(graph: RolloutGraph, credit: Credit) -> Iterator[dict[str, object]]:
    of_edge = credit.advantages.sum(axis=0)
    for i, leaf in enumerate(graph.terminals.tolist()):
        path = graph.path(leaf)
        if credit.trajectory_advantages is not None:
            advantages = [float(credit.trajectory_advantages[i])] * len(path)
        else:
            advantages = of_edge[path].tolist()
        yield {
            "leaf": int(graph.node_ids[leaf]),
            "edges": graph.node_ids[path].tolist(),
            "advantages": advantages,
        }


_EDGE_FIELDS = frozenset(
    {"step_reward", "correctness_advantage", "efficiency_advantage", "advantage"}
)


def _without_root_edge(root: dict[str, object]) -> dict[str, object]:
    """The root has no edge that leads to it."""
    return {name: value for name, value in root.items() if name not in _EDGE_FIELDS}


def _json_numbers(values: NDArray[np.float64], name: str) -> list[object]:
    if name in _COUNTS:
        return [int(value) for value in values]
    return [None if np.isnan(value) else value for value in values.tolist()]
