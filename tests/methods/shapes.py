"""Graphs from a few lists, and random ones whose nodes belong to trees."""

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from graphpo_agent.graph.records import parse_graph
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.method import Credit, Method
from tests.graph.strategies import random_record

__all__ = [
    "credit_of",
    "forests",
    "graph_from",
    "plain_records",
    "record_from",
    "trajectory_advantages",
    "untrained",
]


def record_from(
    parents: Sequence[int | None],
    rewards: Sequence[float | None],
    trees: Sequence[int | None] | None = None,
    **node_fields: Sequence[Any],
) -> dict[str, Any]:
    """A graph record; a node without a reward is not terminal. Node i has id i."""
    fields = dict(node_fields) if trees is None else {"tree": trees, **node_fields}
    nodes = [
        {"id": i, "parent": parent, "terminal": reward is not None, "reward": reward}
        | {name: values[i] for name, values in fields.items() if values[i] is not None}
        for i, (parent, reward) in enumerate(zip(parents, rewards, strict=True))
    ]
    return {"schema": "graphpo.graph/1", "id": "g", "nodes": nodes}


def graph_from(
    parents: Sequence[int | None],
    rewards: Sequence[float | None],
    trees: Sequence[int | None] | None = None,
    **node_fields: Sequence[Any],
) -> RolloutGraph:
    """The graph of ``record_from``."""
    return parse_graph(json.dumps(record_from(parents, rewards, trees, **node_fields)))


def credit_of(method: Method, graph: RolloutGraph) -> Credit:
    """The credit of one graph, every node a class of its own."""
    (credit,) = method.assign_credit([graph], [np.arange(graph.num_nodes)])
    return credit


def trajectory_advantages(method: Method, graph: RolloutGraph) -> NDArray[np.float64]:
    """[num_terminals] of a method whose advantages belong to trajectories."""
    found = credit_of(method, graph).trajectory_advantages
    assert found is not None
    return found


def untrained(credit: Credit) -> list[bool]:
    """Of a credit that names untrained tokens: whether each token is one."""
    assert credit.untrained is not None
    return credit.untrained.tolist()


def plain_records(max_nodes: int = 18) -> st.SearchStrategy[dict[str, Any]]:
    """Random trees with terminals and early-stopped leaves, without states."""
    return st.builds(
        lambda num_nodes, seed: random_record(num_nodes, seed, keys=False, embeddings=False),
        st.integers(1, max_nodes),
        st.integers(0, 2**32),
    )


def forests(max_nodes: int = 24) -> st.SearchStrategy[dict[str, Any]]:
    """Random graphs whose nodes belong to up to three trees with one root."""

    def build(num_nodes: int, seed: int) -> dict[str, Any]:
        record = random_record(num_nodes, seed, keys=False, embeddings=False)
        rng, tree = random.Random(seed), {}
        root = record["nodes"][0]["id"]
        for node in record["nodes"][1:]:
            below_root = node["parent"] == root
            tree[node["id"]] = rng.choice([5, 0, 2]) if below_root else tree[node["parent"]]
            node["tree"] = tree[node["id"]]
        return record

    return st.builds(build, st.integers(1, max_nodes), st.integers(0, 2**32))
