"""``graphpo score``: the credit of every graph in a file, whoever made it."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from graphpo_agent.atomic import replacing
from graphpo_agent.errors import ConfigError, DataError, GraphError
from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.graph.equivalence import MergeOptions, find_classes_many
from graphpo_agent.graph.jsonl import read_graphs
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.classes import CLASSES
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.method import Credit, Method, credits_of
from graphpo_agent.methods.prm import Prm
from graphpo_agent.methods.tree import tree
from graphpo_agent.methods.tree_grpo import names_trees
from graphpo_agent.methods.whiten import whitened
from graphpo_agent.outputs import check_apart, check_parent, check_place

__all__ = ["OPTIONS", "score_file", "scoring_method"]

_BATCH = 64
"""Graphs credited together."""
_COUNTS = ("total",)
"""Columns that hold whole numbers."""


_THRESHOLD = {"merge_threshold": "threshold"}
"""What an option is called in ``MergeOptions``, where that is another name."""
_GRAPHPO = (
    *("merge", "merge_threshold", "merge_terminals", "max_layer_gap", "guard"),
    *(field.name for field in fields(CreditOptions)),
)
_SETTINGS: Mapping[str, Sequence[str]] = {
    "graphpo": _GRAPHPO,
    "tree": _GRAPHPO,
    "grpo": ("normalize", "singleton"),
    "dapo": ("max_length", "overlong_buffer", "overlong_factor", "singleton"),
    "treerl": ("select", "weighting"),
    "spo_tree": ("normalize", "singleton", "drop_zero", "max_probability", "whiten"),
    "spo_chain": ("max_probability", "whiten"),
    "tree_grpo": ("kept", "singleton"),
    "treepo": ("aggregate", "whiten"),
    "treerpo": ("normalize", "singleton"),
    "prm": ("steps", "prm_weight"),
}
"""Each method's options; their values are those of its fields."""

OPTIONS = frozenset[str]().union(*_SETTINGS.values())
"""All options that some method has."""


def scoring_method(name: str, options: Mapping[str, Any]) -> Method:
    """The method of a name, as its options set it; without them as its authors released it.

    But for whitening and for ``dapo``'s penalty on overlong answers, which nothing does unasked.

    Args:
        name: one of ``METHODS``.
        options: those that were given, by name.

    Raises:
        ConfigError: an option outside its range, or one that the method has not.
    """
    if name == "pros":
        raise ConfigError(
            "pros chooses what to continue from one iteration to the next and credits each with "
            "GRPO: a file of graphs is scored with --method grpo"
        )
    for option, value in options.items():
        _check_option(name, option, value)
    if name in CLASSES:
        return CLASSES[name](**options)
    named = {_THRESHOLD.get(option, option): value for option, value in options.items()}
    of_merging = {field.name for field in fields(MergeOptions)} & named.keys()
    merging = MergeOptions(**{option: named.pop(option) for option in of_merging})
    credit = CreditOptions(**named)
    return tree(credit=credit) if name == "tree" else GraphPO(merging=merging, credit=credit)


def _check_option(name: str, option: str, value: Any) -> None:
    """Raise ConfigError where a method has no such option, or not this value of it."""
    flag = f"--{option.replace('_', '-')}"
    if option not in _SETTINGS[name]:
        theirs = ", ".join(f"--{other.replace('_', '-')}" for other in _SETTINGS[name])
        raise ConfigError(f"{flag} is not a setting of {name}, which has {theirs}")
    kind = _kinds(name)[_THRESHOLD.get(option, option)]
    if value is None and NoneType not in get_args(kind):
        raise ConfigError(f"{flag} none is not a setting of {name}: give a number")
    values = get_args(kind) if get_origin(kind) is Literal else ()
    if (name, option) == ("tree", "merge"):
        values = ("none",)
    if values and value not in values:
        raise ConfigError(f"{flag} {value} is not a setting of {name}: use {' or '.join(values)}")


def _kinds(name: str) -> dict[str, Any]:
    """The types of a method's settings."""
    if name in CLASSES:
        return get_type_hints(CLASSES[name])
    return get_type_hints(MergeOptions) | get_type_hints(CreditOptions)


def score_file(
    source: str,
    out: str,
    method_name: str,
    options: Mapping[str, Any],
    keep_classes: bool = False,
) -> str | None:
    """Credit a file of graphs and write one JSON line per graph; whole or not at all.

    Args:
        source: ``graphpo.graph/1`` lines.
        out: replaced by a complete file only.
        method_name: one of ``METHODS``.
        options: its settings.
        keep_classes: take the classes of graphs whose every node has one; graphpo only.

    Returns:
        One line on what the method reads, the file lacks and a default stood for; None: nothing.

    Raises:
        ConfigError: a bad option, or an output that is the input.
        GraphError: a malformed line (file and line number in the message), or a graph (file and id)
            without what the method or an option reads.
        DataError: the input cannot be read or the output cannot be written.
    """
    method = scoring_method(method_name, options)
    if keep_classes and method_name != "graphpo":
        raise ConfigError(f"--keep-classes is not a setting of {method_name}, only of graphpo")
    path = Path(out)
    check_place(path)
    check_parent(path, DataError)
    check_apart([path], [Path(source)])
    treeless: list[str] = []
    try:
        with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
            graphs = iter(tqdm(read_graphs(source), unit="graph", disable=None))
            if options.get("max_probability") is not None:
                graphs = _with_probabilities(source, graphs)
            if method_name == "tree_grpo":
                graphs = _noting_treeless(graphs, treeless)
            file.writelines(_lines(source, graphs, method, keep_classes))
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror}") from None
    if not treeless:
        return None
    return (
        f"{source}: no node of graph {treeless[0]!r}"
        + (f" and of {len(treeless) - 1} more" if len(treeless) > 1 else "")
        + " has the number of its tree (field `tree`): each child of the root is taken as a tree"
    )


def _noting_treeless(graphs: Iterable[RolloutGraph], treeless: list[str]) -> Iterator[RolloutGraph]:
    """The graphs; noted are those that branch at the root and name no tree of any node."""
    for graph in graphs:
        if graph.num_children[0] > 1 and not names_trees(graph):
            treeless.append(graph.id)
        yield graph


def _lines(
    source: str, graphs: Iterable[RolloutGraph], method: Method, keep_classes: bool
) -> Iterator[str]:
    # Whitening takes the file as one batch.
    batches = [list(graphs)] if method.whiten == "batch" else _batches(graphs)
    for batch in batches:
        try:
            classes = _classes(batch, method, keep_classes)
            if isinstance(method, Prm):
                method.check_scores(batch)
            with np.errstate(over="raise", invalid="raise"):
                credits = credits_of(method, batch, classes)
                if method.whiten == "batch":
                    credits = whitened(batch, credits)
        except FloatingPointError:
            raise ConfigError(
                f"{source}: the credit of graph {batch[0].id!r} or one after it is no finite "
                "number: give smaller weights"
            ) from None
        except GraphError as error:
            raise GraphError(f"{source}: {error}") from None
        for graph, credit in zip(batch, credits, strict=True):
            yield json.dumps(_record(graph, credit, method.name), allow_nan=False) + "\n"


def _with_probabilities(source: str, graphs: Iterable[RolloutGraph]) -> Iterator[RolloutGraph]:
    """The graphs, if the log-probabilities of their trained tokens are all known."""
    for graph in graphs:
        node = np.repeat(np.arange(graph.num_nodes), np.diff(graph.offsets))
        known = node[graph.loss_mask & ~np.isnan(graph.logprobs)]
        lacking = np.bincount(known, minlength=graph.num_nodes) < graph.num_trained
        if lacking.any():
            raise GraphError(
                f"{source}: graph {graph.id!r}, node {graph.node_ids[lacking.argmax()]}: "
                "--max-probability needs the log-probabilities of its tokens (field `logprobs`)"
            )
        yield graph


def _batches(graphs: Iterable[RolloutGraph]) -> Iterator[Sequence[RolloutGraph]]:
    source = iter(graphs)
    while batch := list(islice(source, _BATCH)):
        yield batch


def _classes(graphs: Sequence[RolloutGraph], method: Method, keep: bool) -> list[NDArray[np.int64]]:
    """The file's own classes where they are kept and complete, else those found."""
    given = [graph.given_classes if keep else None for graph in graphs]
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
            advantages = np.repeat(credit.trajectory_advantages[i], len(path))
        else:
            advantages = of_edge[path]
        yield {
            "leaf": int(graph.node_ids[leaf]),
            "edges": graph.node_ids[path].tolist(),
            "advantages": _json_numbers(advantages, "advantage"),
        }


_EDGE_FIELDS = frozenset(
    {
        "step_reward",
        "correctness_advantage",
        "efficiency_advantage",
        "trajectory_advantage",
        "advantage",
    }
)


def _without_root_edge(root: dict[str, object]) -> dict[str, object]:
    """The root has no edge that leads to it."""
    return {name: value for name, value in root.items() if name not in _EDGE_FIELDS}


def _json_numbers(values: NDArray[np.float64], name: str) -> list[object]:
    if name in _COUNTS:
        return [int(value) for value in values]
    return [None if np.isnan(value) else value for value in values.tolist()]
