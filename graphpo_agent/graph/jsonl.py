"""Graphs as JSON lines, schema ``graphpo.graph/1``: one object per line.

``{"schema": "graphpo.graph/1", "id": str, "nodes": [NODE, …]}``, nodes in creation order, the
root first and parents before children. NODE::

    {"id": int, "parent": int | null, "terminal": bool, "reward": float | null,
     "embedding": [float] | {"f32": base64 of little-endian float32},
     "key": str, "state": str, "tokens": [int], "num_tokens": int, "logprobs": [float],
     "loss_mask": [0 | 1], "step_score": float, "tree": int, "class": int}

The second and later lines may be absent. Without a loss mask every token of an edge is trained;
log-probabilities where the mask is 0 say nothing. They are float32 numbers, of which nine digits
are written.
"""

import base64
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.arrays import Float32Array, FloatArray, IntArray
from graphpo_agent.graph.records import SCHEMA, parse_graph
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = ["count_lines", "graph_to_json", "read_graphs"]

_PART_BYTES = 1 << 20
"""Read at a time."""
_POWERS = np.array([10.0**k for k in range(54)])
"""What brings nine digits of a float32 number before the point; from 10⁹ on they are there."""


def count_lines(path: str | Path) -> int:
    """Complete lines of a file, which are its graphs.

    Raises:
        GraphError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return sum(part.count(b"\n") for part in iter(partial(file.read, _PART_BYTES), b""))
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror}") from None


def read_graphs(path: str | Path, log: bool = False, skip: int = 0) -> Iterator[RolloutGraph]:
    """The graphs of a file, one by one; blank lines are skipped.

    Args:
        path: the file.
        log: a run writes it: it may be empty, and a last line that no newline ends is left out,
            for the run may have been killed there.
        skip: so many lines at the beginning are not looked at.

    Raises:
        GraphError: the file cannot be read, is empty, holds a graph id twice or a line that breaks
            the schema: ``graphs.jsonl:12: node 7: reward 1.2 is outside [0, 1]``.
    """
    lines_by_id: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if number <= skip or not raw.strip() or (log and not raw.endswith(b"\n")):
                    continue
                try:
                    graph = parse_graph(raw.decode("utf-8-sig").rstrip())
                except UnicodeDecodeError as error:
                    raise GraphError(f"{path}:{number}: not UTF-8 at byte {error.start}") from None
                except GraphError as error:
                    raise GraphError(f"{path}:{number}: {error}") from None
                if graph.id in lines_by_id:
                    raise GraphError(
                        f"{path}:{number}: graph id {graph.id!r} occurs twice, "
                        f"first in line {lines_by_id[graph.id]}"
                    )
                lines_by_id[graph.id] = number
                yield graph
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror}") from None
    if not lines_by_id and not log:
        raise GraphError(f"{path}: no graph in it")


def graph_to_json(graph: RolloutGraph, classes: IntArray | None = None) -> str:
    """One line that ``parse_graph`` reads back as the same graph, without the newline.

    Args:
        graph: the graph; float32 embeddings are written as base64.
        classes: [n] equivalence classes as positions, written as ``class``.
    """
    logprobs = _nine_digits(np.where(graph.loss_mask, graph.logprobs, 0))
    nodes = [_node_record(graph, v, logprobs[graph.span(v)]) for v in range(graph.num_nodes)]
    if classes is not None:
        for node, name in zip(nodes, graph.node_ids[classes].tolist(), strict=True):
            node["class"] = name
    record = {"schema": SCHEMA, "id": graph.id, "nodes": nodes}
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def _nine_digits(values: Float32Array) -> FloatArray:
    """Decimals of nine digits, which read back as the same float32 numbers; NaN stays NaN."""
    wide = values.astype(np.float64)
    places = 8 - np.floor(np.log10(np.maximum(np.abs(wide), 1e-45)))
    with np.errstate(invalid="ignore"):
        scale = _POWERS.take(places.astype(np.int64), mode="clip")
    return np.rint(wide * scale) / scale


def _node_record(graph: RolloutGraph, v: int, logprobs: FloatArray) -> dict[str, Any]:
    parent = int(graph.parent[v])
    terminal = bool(graph.terminal[v])
    record: dict[str, Any] = {
        "id": int(graph.node_ids[v]),
        "parent": None if parent < 0 else int(graph.node_ids[parent]),
        "terminal": terminal,
        "reward": float(graph.reward[v]) if terminal else None,
    }
    if not np.isnan(graph.step_scores[v]):
        record["step_score"] = float(graph.step_scores[v])
    if graph.tree[v] >= 0:
        record["tree"] = int(graph.tree[v])
    if graph.keys[v] is not None:
        record["key"] = graph.keys[v]
    if graph.states[v] is not None:
        record["state"] = graph.states[v]
    if graph.embeddings is not None and graph.has_embedding[v]:
        row = graph.embeddings[v]
        if row.dtype == np.float32:
            record["embedding"] = {"f32": base64.b64encode(row.astype("<f4").tobytes()).decode()}
        else:
            record["embedding"] = row.tolist()
    return record | _token_record(graph, v, logprobs)


def _token_record(graph: RolloutGraph, v: int, logprobs: FloatArray) -> dict[str, Any]:
    span = graph.span(v)
    record: dict[str, Any] = {}
    if graph.has_tokens[v]:
        record["tokens"] = graph.token_ids[span].tolist()
    elif graph.num_tokens[v] != 1:
        record["num_tokens"] = int(graph.num_tokens[v])
    loss_mask = graph.loss_mask[span]
    if graph.parent[v] >= 0 and not loss_mask.all():
        record["loss_mask"] = loss_mask.astype(int).tolist()
    if not np.isnan(graph.logprobs[span]).all():
        record["logprobs"] = logprobs.tolist()
    return record
