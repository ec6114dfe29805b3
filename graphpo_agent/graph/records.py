"""One JSON object of schema ``graphpo.graph/1`` to a graph; everything else is refused."""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np

from graphpo_agent.errors import GraphError, json_mistake, json_reason
from graphpo_agent.graph.arrays import BoolArray, EmbeddingArray, Float32Array, FloatArray, IntArray
from graphpo_agent.graph.equivalence import name_classes
from graphpo_agent.graph.new_node import check_reward
from graphpo_agent.graph.rollout_graph import RolloutGraph

__all__ = ["SCHEMA", "parse_graph"]

SCHEMA = "graphpo.graph/1"

_INT_LIMIT = 2**63
_COUNT_LIMIT = 2**40
"""Of an edge's tokens, so that sums over paths and files are still 64-bit integers."""


def parse_graph(text: str) -> RolloutGraph:
    """The graph of one JSON object.

    Raises:
        GraphError: what breaks the schema, and at which node: ``node 7: reward 1.2 is outside
            [0, 1]``.
    """
    record = _object(_load(text))
    if record is None:
        raise GraphError("not a JSON object")
    if "schema" not in record:
        raise GraphError(f"schema is missing, want {SCHEMA!r}")
    if record["schema"] != SCHEMA:
        raise GraphError(f"schema is {_show(record['schema'])}, want {SCHEMA!r}")
    if not isinstance(record.get("id"), str):
        raise GraphError("the graph's id is missing or not a string")
    nodes = _array(record.get("nodes"))
    if not nodes:
        raise GraphError("nodes is missing, empty or not a list")
    return _graph(record["id"], nodes)


def _object(value: Any) -> dict[str, Any] | None:
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _array(value: Any) -> list[Any] | None:
    return cast(list[Any], value) if isinstance(value, list) else None


def _load(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise GraphError("JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise GraphError(f"not JSON: {json_mistake(error)}") from None
    except ValueError as error:
        raise GraphError(f"not JSON that can be read: {json_reason(error)}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise GraphError(f"{name} is not a number in JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise GraphError(f"key {_show(name)} occurs twice in one object")
            seen.add(name)
    return record


def _show(value: Any) -> str:
    """A value in a message: one short line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """What a node says of its tokens; empty arrays where it says nothing but perhaps a count."""

    token_ids: IntArray
    loss_mask: BoolArray
    logprobs: Float32Array
    known: bool
    count: int
    num_trained: int


def _graph(graph_id: str, nodes: list[Any]) -> RolloutGraph:
    node_ids, parent = _links(nodes)
    names = [f"node {v}" for v in node_ids.tolist()]
    n = len(nodes)
    depth, terminal, reward = np.zeros(n, np.int64), np.zeros(n, np.bool_), np.full(n, np.nan)
    tokens: list[_Tokens] = []
    for v, (node, name) in enumerate(zip(nodes, names, strict=True)):
        if v:
            if terminal[parent[v]]:
                raise GraphError(f"{name}: parent {node['parent']} is terminal")
            depth[v] = depth[parent[v]] + 1
        terminal[v], reward[v] = _outcome(node, name)
        tokens.append(_tokens(node, name, trained=v > 0))
    pairs = list(zip(nodes, names, strict=True))
    embeddings, has_embedding = _embeddings(pairs)
    trees = [_whole(node, "tree", name) for node, name in pairs]
    labels = [_whole(node, "class", name) for node, name in pairs]
    given = None if None in labels else name_classes(node_ids, np.array(labels, np.int64))
    lengths = [len(x.token_ids) for x in tokens]
    return RolloutGraph(
        id=graph_id,
        node_ids=node_ids,
        parent=parent,
        depth=depth,
        terminal=terminal,
        reward=reward,
        keys=tuple(_text(node, "key", name) for node, name in pairs),
        states=tuple(_text(node, "state", name) for node, name in pairs),
        embeddings=embeddings,
        has_embedding=has_embedding,
        step_scores=np.array([_step_score(node, name) for node, name in pairs]),
        tree=np.array([-1 if x is None else x for x in trees], np.int64),
        given_classes=given,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        token_ids=np.concatenate([x.token_ids for x in tokens]),
        loss_mask=np.concatenate([x.loss_mask for x in tokens]),
        logprobs=np.concatenate([x.logprobs for x in tokens]),
        has_tokens=np.array([x.known for x in tokens]),
        num_tokens=np.array([x.count for x in tokens], np.int64),
        num_trained=np.array([x.num_trained for x in tokens], np.int64),
    )


def _links(nodes: Sequence[Any]) -> tuple[IntArray, IntArray]:
    """Ids, and parents as positions."""
    position: dict[int, int] = {}
    parents: list[int] = []
    for v, item in enumerate(nodes):
        node = _object(item)
        if node is None:
            raise GraphError(f"nodes[{v}] is not an object")
        node_id = _whole(node, "id", f"nodes[{v}]")
        if node_id is None:
            raise GraphError(f"nodes[{v}]: id is missing")
        name = f"node {node_id}"
        if node_id in position:
            raise GraphError(f"{name}: id occurs twice")
        if "parent" not in node:
            raise GraphError(f"{name}: parent is missing")
        parent = _whole(node, "parent", name)
        if v == 0 and parent is not None:
            raise GraphError(f"{name}: the first node is the root, its parent must be null")
        if v > 0 and parent is None:
            raise GraphError(f"{name}: a second root, its parent is null")
        if parent is not None and parent not in position:
            raise GraphError(f"{name}: parent {parent} does not come before it")
        parents.append(-1 if parent is None else position[parent])
        position[node_id] = v
    return np.array(list(position), np.int64), np.array(parents, np.int64)


def _outcome(node: dict[str, Any], name: str) -> tuple[bool, float]:
    """Whether the node is terminal, and its reward (NaN where not)."""
    terminal = node.get("terminal")
    if not isinstance(terminal, bool):
        raise GraphError(f"{name}: terminal is missing or not true or false")
    reward = node.get("reward")
    if reward is not None:
        if type(reward) not in (int, float):
            raise GraphError(f"{name}: reward {_show(reward)} is not a number")
        reward = float(_floats([reward], "reward", name)[0])
    mistake = check_reward(terminal, reward)
    if mistake:
        raise GraphError(f"{name}: {mistake}")
    return terminal, np.nan if reward is None else reward


def _step_score(node: dict[str, Any], name: str) -> float:
    """What a process reward model says of the edge; NaN where it was not asked."""
    value = node.get("step_score")
    if value is None:
        return np.nan
    score = float(_floats([value], "step_score", name)[0])
    if not 0.0 <= score <= 1.0:
        raise GraphError(f"{name}: step_score {value} is outside [0, 1]")
    return score


def _tokens(node: dict[str, Any], name: str, *, trained: bool) -> _Tokens:
    """Tokens, loss mask and log-probabilities, their lengths compared. The root trains nothing."""
    token_ids = _list(node, "tokens", name)
    if token_ids and (set(map(type, token_ids)) != {int} or min(token_ids) < 0):
        raise GraphError(f"{name}: tokens is not a list of token ids")
    if token_ids and max(token_ids) >= _INT_LIMIT:
        raise GraphError(f"{name}: token id {_show(max(token_ids))} is too large")
    mask = _list(node, "loss_mask", name)
    if mask and (set(map(type, mask)) != {int} or not set(mask) <= {0, 1}):
        raise GraphError(f"{name}: loss_mask is not a list of 0 and 1")
    logprobs = _list(node, "logprobs", name)
    lists = {"tokens": token_ids, "loss_mask": mask, "logprobs": logprobs}
    count = _common_length(lists, _num_tokens(node, name), name)
    span = count if any(values is not None for values in lists.values()) else 0
    loss_mask = np.full(span, trained) if mask is None else np.array(mask, np.bool_) & trained
    scores = np.full(span, np.nan, np.float32)
    if logprobs is not None:
        scores[loss_mask] = _logprobs(logprobs, name)[loss_mask]
    known = token_ids is not None
    if not known and np.isnan(scores).all() and (loss_mask == trained).all():
        span = 0  # the lists told no more than the count
    return _Tokens(
        token_ids=np.array(token_ids if known else [-1] * span, np.int64),
        loss_mask=loss_mask[:span],
        logprobs=scores[:span],
        known=known,
        count=count,
        num_trained=(count if mask is None else int(loss_mask.sum())) if trained else 0,
    )


def _logprobs(values: list[Any], name: str) -> FloatArray:
    numbers = _floats(values, "logprobs", name)
    if (np.abs(numbers) > np.finfo(np.float32).max).any():
        raise GraphError(f"{name}: logprobs holds a number that is too large for 32 bits")
    return numbers


def _num_tokens(node: dict[str, Any], name: str) -> int | None:
    count = _whole(node, "num_tokens", name)
    if count is not None and count >= _COUNT_LIMIT:
        raise GraphError(f"{name}: num_tokens {_show(count)} is too large, want less than 2**40")
    return count


def _common_length(lists: dict[str, list[Any] | None], num_tokens: int | None, name: str) -> int:
    """The length that all agree on; 1 where nothing is said."""
    lengths = {field: len(values) for field, values in lists.items() if values is not None}
    if num_tokens is not None:
        lengths = {"num_tokens": num_tokens} | lengths
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{field} {length}" for field, length in lengths.items())
        raise GraphError(f"{name}: lengths disagree: {told}")
    return next(iter(lengths.values()), 1)


def _embeddings(
    nodes: Sequence[tuple[dict[str, Any], str]],
) -> tuple[EmbeddingArray | None, BoolArray]:
    """[n, d] rows in float32, or in float64 if a list holds numbers that float32 does not."""
    rows: dict[int, FloatArray] = {}
    for v, (node, name) in enumerate(nodes):
        value = node.get("embedding")
        if value is None:
            continue
        packed = _object(value)
        row = _listed(node, name) if packed is None else _packed(packed, name)
        if rows and len(row) != len(next(iter(rows.values()))):
            width = len(next(iter(rows.values())))
            raise GraphError(f"{name}: embedding has {len(row)} numbers, earlier ones {width}")
        rows[v] = row
    has_embedding = np.zeros(len(nodes), np.bool_)
    if not rows:
        return None, has_embedding
    places = list(rows)
    has_embedding[places] = True
    values = np.stack(list(rows.values()))
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    exact = single if (single == values).all() else values
    matrix = np.zeros((len(nodes), values.shape[1]), exact.dtype)
    matrix[places] = exact
    return matrix, has_embedding


def _listed(node: dict[str, Any], name: str) -> FloatArray:
    values = _list(node, "embedding", name)
    if not values:
        raise GraphError(f"{name}: embedding is empty")
    return _floats(values, "embedding", name)


def _packed(value: dict[str, Any], name: str) -> FloatArray:
    text = value.get("f32")
    if len(value) != 1 or not isinstance(text, str):
        raise GraphError(f'{name}: embedding is neither a list nor {{"f32": base64}}')
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise GraphError(f"{name}: embedding is not base64") from None
    if not data or len(data) % 4:
        raise GraphError(f"{name}: embedding has {len(data)} bytes, not whole float32 numbers")
    row = np.frombuffer(data, "<f4").astype(np.float64)
    if not np.isfinite(row).all():
        raise GraphError(f"{name}: embedding holds a number that is not finite")
    return row


def _floats(values: list[Any], field: str, name: str) -> FloatArray:
    if not set(map(type, values)) <= {int, float}:
        raise GraphError(f"{name}: {field} is not a list of numbers")
    try:
        numbers = np.array(values, np.float64)
    except OverflowError:
        raise GraphError(f"{name}: {field} holds a number that is not finite") from None
    if not np.isfinite(numbers).all():
        raise GraphError(f"{name}: {field} holds a number that is not finite")
    return numbers


def _list(node: dict[str, Any], field: str, name: str) -> list[Any] | None:
    value = node.get(field)
    values = _array(value)
    if value is not None and values is None:
        raise GraphError(f"{name}: {field} is not a list")
    return values


def _whole(node: dict[str, Any], field: str, name: str) -> int | None:
    """A non-negative integer, or None where it is absent or null."""
    value = node.get(field)
    if value is not None and (type(value) is not int or value < 0):
        raise GraphError(f"{name}: {field} {_show(value)} is not a non-negative integer")
    if value is not None and value >= _INT_LIMIT:
        raise GraphError(f"{name}: {field} {_show(value)} is too large, want less than 2**63")
    return value


def _text(node: dict[str, Any], field: str, name: str) -> str | None:
    value = node.get(field)
    if value is not None and not isinstance(value, str):
        raise GraphError(f"{name}: {field} is not a string")
    return value
