"""One index, built or searched in a process of its own, so that its memory can be told apart.

``python -m benchmarks.retrieval_parts.indexes ORDER_JSON`` prints its result as JSON.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.retrieval_parts.servers import resident_mb
from retrievers.faiss_index import build_faiss, map_faiss, parse_type, search_faiss
from retrievers.index import build_index, open_index

__all__ = ["DENSE_TYPES", "agreement", "apart", "recall"]

DENSE_TYPES = ("Flat", "SQ8", "IVF,SQ8", "HNSW32")
_NPROBE = 32
_EF_SEARCH = 64


def apart(**order: Any) -> dict[str, Any]:
    """``build`` or ``search``, as ``order["do"]`` says, in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.retrieval_parts.indexes", json.dumps(order)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def build(kind: str, source: str, out: str) -> dict[str, Any]:
    """Build an index of a corpus (bm25, lucene) or of a file of vectors (a faiss type)."""
    started = time.perf_counter()
    if kind in DENSE_TYPES:
        vectors = np.load(source, mmap_mode="r")
        build_faiss(vectors, parse_type(kind, len(vectors)), Path(out))
    else:
        build_index(kind, source, out)
    seconds = time.perf_counter() - started
    return {"build_s": seconds, "build_mb": _peak_mb(), "disk_mb": _disk_mb(Path(out))}


def search(kind: str, index: str, queries: str, found: str) -> dict[str, Any]:
    """Open an index and ask all queries, ten documents each; what is found goes to a file.

    They are asked twice; the second time counts.
    """
    before = resident_mb()
    started = time.perf_counter()
    ask = _opened(kind, index)
    open_s = time.perf_counter() - started
    asked = np.load(queries) if kind in DENSE_TYPES else json.loads(Path(queries).read_text())
    parts = [asked[start : start + 64] for start in range(0, len(asked), 64)]
    for part in parts:  # compiles what Java and numba compile, reads what is mapped
        ask(part)
    started = time.perf_counter()
    results = [row for part in parts for row in ask(part)]
    seconds = time.perf_counter() - started
    Path(found).write_text(json.dumps(results))
    after = resident_mb()
    return {
        "open_s": open_s,
        "queries_per_s": len(asked) / seconds,
        **{f"{name}_mb": after[name] - before[name] for name in after},
    }


def _opened(kind: str, index: str) -> Callable[[Any], Iterable[Sequence[Any]]]:
    """Queries to the ids (with scores) or the rows of their documents, best first."""
    if kind in DENSE_TYPES:
        mapped = map_faiss(Path(index))
        return lambda rows: search_faiss(mapped, rows, 10, _NPROBE, _EF_SEARCH)[1].tolist()
    retriever = open_index(index)
    return lambda texts: [[d.id for d in found] for found in retriever.search(texts, 10)]


def recall(found: Sequence[Sequence[Any]], exact: Sequence[Sequence[Any]]) -> float:
    """The share of the exact documents that were found.

    Example: ``recall([[1, 2]], [[2, 3]])`` is 0.5.
    """
    shares = [
        len(set(a) & set(b)) / len(set(b)) for a, b in zip(found, exact, strict=True) if len(b)
    ]
    return float(np.mean(shares))


def agreement(found: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> dict[str, float]:
    """How alike two rankings are: documents shared, the same first one, the same list."""
    pairs = [(a, b) for a, b in zip(found, other, strict=True) if a or b]
    return {
        "overlap@10": float(np.mean([len({*a} & {*b}) / max(len(a), len(b)) for a, b in pairs])),
        "top1": float(np.mean([a[:1] == b[:1] for a, b in pairs])),
        "identical": float(np.mean([a == b for a, b in pairs])),
        "queries": len(pairs),
    }


def _peak_mb() -> float:
    """The most memory that this process, or a child that has ended, ever had at one moment."""
    lines = Path("/proc/self/status").read_text().splitlines()
    own = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024 / 1e6


def _disk_mb(path: Path) -> float:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    print(json.dumps({"build": build, "search": search}[order.pop("do")](**order)))
