"""Random graph records: all that a graph file may hold, with ties and near-ties on purpose."""

import base64
import json
import math
import random

import numpy as np
from hypothesis import strategies as st

from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.graph.equivalence import MergeOptions
from graphpo_agent.graph.records import parse_graph

ANGLE = math.acos(0.92)  # neighbours on the circle have the default threshold as their cosine
TINY = (0.0, 0.0, 1e-7, -1e-7, 1e-6, -1e-6, 4e-6, 0.03)


def random_embedding(rng):
    """A point on a circle whose neighbours have cosine 0.92, a little off; or zeros; or nothing."""
    kind = rng.choice(["list", "list", "list", "f32", "zero", "absent"])
    if kind == "absent":
        return None
    if kind == "zero":
        return [0.0, 0.0, 0.0]
    angle = rng.choice([0, 1, 2, 3, 6]) * ANGLE / rng.choice([1, 1, 2]) + rng.choice(TINY)
    scale = rng.choice([1.0, 0.25, 3.0, 1e-12])
    point = [scale * math.cos(angle), scale * math.sin(angle), rng.choice([0.0, 0.0, scale])]
    if kind == "list":
        return point
    return {"f32": base64.b64encode(np.array(point, "<f4").tobytes()).decode()}


def random_record(num_nodes, seed, *, keys=True, embeddings=True):
    """A graph record: a random tree, ids in any order, terminals and early-stopped leaves.

    Drawn from one seed rather than by hypothesis's own choices, which is many times faster.
    """
    rng = random.Random(seed)
    ids = list(range(num_nodes))
    if rng.random() < 0.3:
        ids = rng.sample(range(3 * num_nodes), num_nodes)
    reach = rng.choice([2, 4, num_nodes])
    parents = [None, *(rng.randrange(max(0, v - reach), v) for v in range(1, num_nodes))]
    finished = rng.choice([0.2, 0.75, 1.0])
    rewards = rng.choice([(0.0, 1.0), (1.0,), (0.0, 0.25, 1.0, 1 / 3)])
    nodes = []
    for v, parent in enumerate(parents):
        terminal = v > 0 and v not in parents and rng.random() < finished
        node = {
            "id": ids[v],
            "parent": None if parent is None else ids[parent],
            "terminal": terminal,
            "reward": rng.choice(rewards) if terminal else None,
            "num_tokens": rng.randrange(4),
        }
        if embeddings:
            node["embedding"] = random_embedding(rng)
        if keys and rng.random() < (0.3 if embeddings else 0.8):
            node["key"] = rng.choice("pq")
        if rng.random() < 0.3:
            node["state"] = rng.choice(["got 3", "3 then 4", "nothing yet"])
        nodes.append(node)
    if rng.random() < 0.5:
        by_depth(nodes)
    return {"schema": "graphpo.graph/1", "id": "g", "nodes": nodes}


def records(max_nodes=18, **kinds):
    """Records of up to ``max_nodes`` nodes."""
    return st.builds(
        lambda num_nodes, seed: random_record(num_nodes, seed, **kinds),
        st.integers(1, max_nodes),
        st.integers(0, 2**32),
    )


def by_depth(nodes):
    """Put nodes in the order in which a layer-wise growth creates them."""
    depth = {}
    for node in nodes:
        depth[node["id"]] = 0 if node["parent"] is None else depth[node["parent"]] + 1
    nodes.sort(key=lambda node: depth[node["id"]])


def graph_of(record):
    return parse_graph(json.dumps(record))


merge_settings = st.fixed_dictionaries(
    {
        "threshold": st.sampled_from([0.92, 0.92, 0.9, 0.999, 1.0, 0.3]),
        "merge_terminals": st.sampled_from(["same_reward", "never"]),
        "max_layer_gap": st.sampled_from([None, None, 0, 1]),
        "guard": st.sampled_from(["none", "numbers"]),
    }
)
credit_settings = st.fixed_dictionaries(
    {
        "pool_weight": st.sampled_from([0.7, 0.0, 1.0]),
        "efficiency_weight": st.sampled_from([0.2, 0.0, 1.0]),
        "efficiency_combine": st.sampled_from(["mean", "sum"]),
        "singleton": st.sampled_from(["zero", "inherit"]),
        "backup": st.sampled_from(["leaf", "mean", "class"]),
        "normalize": st.sampled_from(["std", "none", "rms"]),
        "trajectory_weight": st.sampled_from([0.0, 1.0]),
    }
)
merge_options = merge_settings.map(lambda x: MergeOptions(**x))
credit_options = credit_settings.map(lambda x: CreditOptions(**x))
