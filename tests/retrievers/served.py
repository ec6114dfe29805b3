"""A retrieval server in a process of its own, over a retriever that tests can steer.

``python -m tests.retrievers.served '{"port": 0, "ready_file": "F", ...}'`` calls ``serve``.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import requests

from graphpo_agent.errors import DataError, GraphPOError, QuotaError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.types import Document, FailureKind
from retrievers.server import serve
from retrievers.server_messages import Bounds

HALF_A_PAIR = "\ud83d"


def documents(query: str, topk: int) -> list[Document]:
    """What ``Steered`` finds: as many as asked for, unless the query says how many."""
    count = int(query.split()[1]) if query.startswith("only ") else topk
    names = [f"{query} {rank}" for rank in range(min(count, topk))]
    return [
        Document(name, f'"{name}"\ntext of {name}', _score(rank), url=f"http://x/{rank}")
        for rank, name in enumerate(names)
    ]


def _score(rank: int) -> Any:
    return np.float32(1.0 / (rank + 1))  # as a retriever has it that counts with numpy


class Steered:
    """``wait PATH`` waits until the file is there, ``broken`` raises, ``half`` finds half a pair.

    ``fail KIND`` is a call that failed so, ``used up`` an empty account. Anything else is found in
    ``documents``.
    """

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        return [self._one(query, topk) for query in queries]

    def _one(self, query: str, topk: int) -> list[Document]:
        if query.startswith("wait "):
            wait_for(Path(query[5:]))
        if query == "broken":
            raise ZeroDivisionError("a bug in the retriever")
        if query.startswith("fail "):
            raise CallFailed(cast(FailureKind, query[5:]), "behind the server")
        if query == "used up":
            raise QuotaError("behind the server")
        if query == "half":
            return [Document("half", HALF_A_PAIR)]
        return documents(query, topk)


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


class Served:
    """A running server process."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.ready_file = directory / "ready"
        self.ready_file.unlink(missing_ok=True)
        options = {"port": 0, "ready_file": str(self.ready_file)} | options
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.retrievers.served", json.dumps(options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def url(self) -> str:
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return "http://" + self.ready_file.read_text()

    def post(self, path: str, body: Any) -> requests.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(self.url + path, data=data, timeout=60)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def retrieve(self, *queries: str, topk: int | None = 2, scores: bool = True) -> Any:
        body = {"queries": queries, "topk": topk, "return_scores": scores}
        reply = self.post("/retrieve", body)
        assert reply.status_code == 200, reply.text
        return reply.json()["result"]

    def metrics(self) -> dict[str, float]:
        """Values by name and labels, as Prometheus' text format has them."""
        lines = self.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def wait_until(self, name: str, value: float) -> None:
        while self.metrics()[name] != value:
            time.sleep(0.01)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def served(directory: Path, **options: Any) -> Iterator[Served]:
    server = Served(directory, **options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def main(options: dict[str, Any]) -> int:
    gate, failure = options.pop("loading_gate", None), options.pop("loading_fails", None)

    def load() -> Steered:
        if gate is not None:
            wait_for(Path(gate))
        if failure is not None:
            raise DataError(failure)
        return Steered()

    paths = {name: Path(options.pop(name)) for name in ("ready_file", "pages") if name in options}
    named = [field.name for field in fields(Bounds) if field.name in options]
    try:
        bounds = Bounds(**{name: options.pop(name) for name in named})
        serves = {"index": "steered", "pid": os.getpid()}
        return serve(load, serves=serves, bounds=bounds, **paths, **options)
    except GraphPOError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
