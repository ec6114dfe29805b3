"""The two servers that are compared, each in a process of its own, over one and the same index.

``python -m benchmarks.retrieval_parts.servers ours|stand-in INDEX READY_FILE``
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrievers.index import open_index
from retrievers.server import serve

__all__ = ["NAMES", "cpu_seconds", "resident_mb", "running"]

NAMES = ("ours", "stand-in")


@contextmanager
def running(name: str, index: Path, directory: Path) -> Iterator[tuple[str, int]]:
    """A server that answers: its ``host:port`` and the process' id."""
    ready = directory / f"ready-{name}-{time.monotonic_ns()}"
    module = "benchmarks.retrieval_parts.servers"
    command = [sys.executable, "-m", module, name, str(index), str(ready)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit(f"the server {name!r} ended with status {process.returncode}")
            time.sleep(0.05)
        yield ready.read_text(), process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int | str = "self") -> dict[str, float]:
    """Memory of a process in MB: ``private``, and ``mapped`` from files (shared, given back)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = {"private": "RssAnon", "mapped": "RssFile"}
    return {name: int(fields[field].split()[0]) * 1024 / 1e6 for name, field in names.items()}


def _ours(index: Path, ready: Path) -> int:
    return serve(lambda: open_index(index), serves={}, port=0, ready_file=ready)


def _stand_in(index: Path, ready: Path) -> int:
    """The design of Search-R1's server: see ``benchmarks.retrieval_parts.stand_in``."""
    import uvicorn

    from benchmarks.retrieval_parts.stand_in import make_app

    app = make_app(open_index(index))
    listener = socket.create_server(("127.0.0.1", 0))
    ready.write_text(f"127.0.0.1:{listener.getsockname()[1]}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    _, name, index, ready = sys.argv
    start = {"ours": _ours, "stand-in": _stand_in}[name]
    sys.exit(start(Path(index), Path(ready)))
