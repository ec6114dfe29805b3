"""How long the graph core takes, and how it grows.

    python benchmarks/graph_core.py [--graphs 512] [--repeats 3] [--out benchmarks/results]

Step: 512 rollout graphs of schedule {2, 5, 4, 2, 2} (293 nodes each), about 40 % of the nodes
merged. Compared are the similarity products alone (``X @ X.T`` of every graph's embeddings, what
any implementation that compares all pairs must compute) and everything the core does with a
finished step: classes, scores, step rewards and both advantages.
Growth: one graph of 293 to 10,221 nodes, and shapes that are hard on an acyclic merge.

Times are CPU seconds of one thread, the smallest of some repeats; memory is the peak of what
numpy and Python allocate during the call, embeddings themselves left out.
"""

# ruff: noqa: E402 (threads are pinned before numpy is imported)
import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy reads them

import argparse
import json
import platform
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from graphpo_agent.graph.credit import CreditOptions, graph_credits
from graphpo_agent.graph.equivalence import MergeOptions, find_classes_many
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph

SCHEDULE = (2, 5, 4, 2, 2)
FIRST_LAYERS = (2, 7, 21, 70)  # 293, 1,023, 3,067 and 10,221 nodes with the rest of the schedule
MERGE = MergeOptions()
CREDIT = CreditOptions()


def tree(schedule: Sequence[int], seed: int) -> tuple[RolloutGraph, np.ndarray]:
    """A full tree with random rewards, and a state number per node; equal ones are equivalent.

    A node repeats, with probability 0.27, the state of a node of its own or the last layer.
    """
    rng = np.random.default_rng(seed)
    graph = RolloutGraph.root(f"graph {seed}", token_ids=[1])
    states, last, layer = [0], [], [0]
    for h, branching in enumerate(schedule, 1):
        done = h == len(schedule)
        pool, nodes, new = ([] if done else list(last)), [], []
        for u in layer:
            for _ in range(branching):
                state = len(states)
                if pool and rng.random() < 0.27:
                    state = states[pool[rng.integers(len(pool))]]
                v = len(states)
                states.append(state)
                pool.append(v)
                new.append(v)
                reward = float(state % 5 < 2) if done else None  # the same answer is as right
                nodes.append(NewNode(u, (7, 8), (1, 1), (-0.5, -0.5), done, reward))
        graph = graph.append(nodes)
        last, layer = new, new
    return graph, np.array(states)


def with_embeddings(graph: RolloutGraph, states: np.ndarray, dim: int, seed: int) -> RolloutGraph:
    """Cosine about 0.97 within a state and about 0.7 between states, as real encoders have it."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(dim, dtype=np.float32)
    names, place = np.unique(states, return_inverse=True)
    centres = rng.standard_normal((len(names), dim), dtype=np.float32)
    rows = rng.standard_normal((len(states), dim), dtype=np.float32)
    rows *= np.float32(0.17)
    rows += np.float32(0.53) * centres[place]
    rows += np.float32(0.83) * common
    return replace(graph, embeddings=rows, has_embedding=np.ones(len(rows), np.bool_))


def with_keys(graph: RolloutGraph, states: np.ndarray) -> RolloutGraph:
    return replace(graph, keys=tuple(f"state {s}" for s in states.tolist()))


def chains(length: int, keys: int) -> RolloutGraph:
    """Two chains whose states share ``keys`` keys in turn."""
    key = [None, *(str(v // 2 % keys) for v in range(2 * length))]
    parent = np.concatenate([[-1, 0, 0], np.arange(1, 2 * length - 1)])
    return bare(parent, key)


def bare(parent: np.ndarray, key: Sequence[str | None]) -> RolloutGraph:
    """A graph without tokens or answers."""
    graph = RolloutGraph.root("bare", token_ids=[])
    n = len(parent)
    depth = np.zeros(n, np.int64)
    for v in range(1, n):
        depth[v] = depth[parent[v]] + 1
    zeros = np.zeros(n, np.int64)
    return replace(
        graph,
        node_ids=np.arange(n),
        parent=parent,
        depth=depth,
        terminal=zeros > 0,
        reward=np.full(n, np.nan),
        keys=tuple(key),
        states=(None,) * n,
        has_embedding=zeros > 0,
        tree=zeros,
        offsets=np.zeros(n + 1, np.int64),
        has_tokens=zeros > 0,
        num_tokens=zeros + 1,
        num_trained=zeros + 1,
    )


def products(graphs: Sequence[RolloutGraph]) -> None:
    for graph in graphs:
        assert graph.embeddings is not None
        np.dot(graph.embeddings, graph.embeddings.T)


def cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def peak_bytes(call: Callable[[], Any]) -> int:
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def merged_share(graphs: Sequence[RolloutGraph], classes: Sequence[np.ndarray]) -> float:
    sizes = [np.bincount(c, minlength=len(c))[c] for c in classes]
    return sum(int((s > 1).sum()) for s in sizes) / sum(g.num_edges for g in graphs)


def measure(graphs: Sequence[RolloutGraph], repeats: int, *, embedded: bool) -> dict[str, Any]:
    """Times of a step in one pass each, taken in turn so that all see the same machine."""
    times: dict[str, list[float]] = {"products_s": [], "merge_s": [], "credit_s": []}
    classes = find_classes_many(graphs, MERGE)
    for _ in range(repeats):
        if embedded:
            times["products_s"].append(cpu_seconds(lambda: products(graphs)))
        times["merge_s"].append(cpu_seconds(lambda: find_classes_many(graphs, MERGE)))
        times["credit_s"].append(cpu_seconds(lambda: graph_credits(graphs, classes, CREDIT)))
    row: dict[str, Any] = {name: min(values) for name, values in times.items() if values}
    if embedded:
        row["ratio"] = (row["merge_s"] + row["credit_s"]) / row["products_s"]
    peaks = [
        peak_bytes(lambda: find_classes_many(graphs, MERGE)),
        peak_bytes(lambda: graph_credits(graphs, classes, CREDIT)),
    ]
    return row | {
        "graphs": len(graphs),
        "nodes_per_graph": graphs[0].num_nodes,
        "merged_share": merged_share(graphs, classes),
        "peak_mb": max(peaks) / 1e6,
    }


def step(num_graphs: int, repeats: int) -> list[dict[str, Any]]:
    trees = [tree(SCHEDULE, seed) for seed in range(num_graphs)]
    rows = []
    for dim in (4096, 1024):
        graphs = [with_embeddings(g, s, dim, seed) for seed, (g, s) in enumerate(trees)]
        rows.append({"case": f"{dim} dimensions"} | measure(graphs, repeats, embedded=True))
        del graphs
    graphs = [with_keys(g, s) for g, s in trees]
    rows.append({"case": "state keys"} | measure(graphs, repeats, embedded=False))
    return rows


def growth(repeats: int) -> list[dict[str, Any]]:
    rows = []
    for first in FIRST_LAYERS:
        graph, states = tree((first, *SCHEDULE[1:]), seed=first)
        keyed = measure([with_keys(graph, states)], repeats, embedded=False)
        rows.append({"case": "state keys"} | keyed)
        graph = with_embeddings(graph, states, 1024, first)
        rows.append({"case": "1024 dimensions"} | measure([graph], repeats, embedded=True))
    return rows


def hard_shapes(repeats: int) -> list[dict[str, Any]]:
    wide, _ = tree((70, *SCHEDULE[1:]), seed=1)
    unfinished = bare(wide.parent, wide.keys)
    twenty = replace(unfinished, keys=tuple(str(v % 20) for v in range(wide.num_nodes)))
    one = replace(unfinished, keys=("same",) * wide.num_nodes)
    cases = {
        "two chains of 5,000, 5,000 keys": chains(5000, 5000),
        "two chains of 5,000, 20 keys": chains(5000, 20),
        "two chains of 5,000, one key": chains(5000, 1),
        "wide tree, 20 keys": twenty,
        "wide tree, one key": one,
    }
    return [
        {"case": name} | measure([graph], repeats, embedded=False) for name, graph in cases.items()
    ]


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # pyright: ignore
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": 1,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = {
        "case": "case",
        "nodes_per_graph": "nodes a graph",
        "merged_share": "merged",
        "products_s": "products alone (s)",
        "merge_s": "merging (s)",
        "credit_s": "credit (s)",
        "ratio": "merging + credit / products",
        "peak_mb": "peak memory (MB)",
    }
    lines = ["| " + " | ".join(names.values()) + " |", "|" + " --- |" * len(names)]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(name)) for name in names) + " |")
    return lines


def cell(value: float | int | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def report(result: dict[str, Any]) -> str:
    m = result["machine"]
    return "\n".join(
        [
            "# The graph core: time and memory",
            "",
            "Made by `python benchmarks/graph_core.py`. CPU seconds of one thread, the smallest of "
            f"{result['repeats']} runs; {m['cpu']}, {m['cores']} cores, Python {m['python']}, "
            f"numpy {m['numpy']}, {m['blas']}.",
            "",
            f"## A training step: {result['step'][0]['graphs']} graphs of schedule "
            "{2, 5, 4, 2, 2}",
            "",
            "*Products alone*: `X @ X.T` for every graph. *Merging* contains the products that it "
            "needs: terminals and states to be continued are never compared with each other, so "
            "those are fewer. *Credit* contains the similarity of every edge in float64.",
            "",
            *table(result["step"]),
            "",
            "## One graph, growing",
            "",
            *table(result["growth"]),
            "",
            "## Shapes that are hard on an acyclic merge",
            "",
            *table(result["hard_shapes"]),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--graphs", type=int, default=512, help="graphs in the step")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the best counts")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result = {
        "machine": machine(),
        "repeats": args.repeats,
        "step": step(args.graphs, args.repeats),
        "growth": growth(args.repeats),
        "hard_shapes": hard_shapes(args.repeats),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "graph_core.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "graph_core.md").write_text(report(result))
    print(report(result))


if __name__ == "__main__":
    main()
