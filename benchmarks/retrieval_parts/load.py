"""Many clients at once against one server: requests per second and how long each waited."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import requests

from retrievers.remote import RemoteRetriever

__all__ = ["CLIENTS", "Load", "drive_client", "drive_server"]

TOPK = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What some clients did in a time.

    Example: ``Load(queries=400, seconds=2.0, waits_s=[0.01, ...], errors=0, cpu_s=0.5)``
    """

    queries: int
    seconds: float
    waits_s: Sequence[float]
    """Of each request."""
    errors: int
    cpu_s: float
    """Of this process: the clients'."""

    def row(self) -> dict[str, float]:
        """Rates and percentiles for a table."""
        waits = np.array(self.waits_s)
        return {
            "queries_per_s": self.queries / self.seconds,
            "p50_ms": float(np.percentile(waits, 50)) * 1e3,
            "p99_ms": float(np.percentile(waits, 99)) * 1e3,
            "errors": self.errors,
        }


def drive_server(
    address: str, queries: Sequence[str], clients: int, per_request: int, seconds: float
) -> Load:
    """Ask with as little work of its own as possible: kept connections, bodies made before."""
    bodies = [_http(address, batch) for batch in _batches(queries, per_request)]
    return asyncio.run(_drive(address, bodies, clients, per_request, seconds))


def _batches(queries: Sequence[str], size: int) -> list[list[str]]:
    """As many requests as queries, each beginning at another one."""
    endless = [*queries, *queries[:size]]
    return [endless[start : start + size] for start in range(len(queries))]


def _http(address: str, queries: Sequence[str]) -> bytes:
    fields = {"queries": queries, "topk": TOPK, "return_scores": True}
    body = json.dumps(fields).encode()
    head = (
        f"POST /retrieve HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _drive(
    address: str, bodies: Sequence[bytes], clients: int, per_request: int, seconds: float
) -> Load:
    waits: list[float] = []
    statuses: list[bytes] = []
    started, cpu = time.perf_counter(), time.process_time()
    end = started + seconds

    async def client(number: int) -> None:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**24)
        shift = number * len(bodies) // clients
        for body in itertools.islice(itertools.cycle(bodies), shift, None):
            begun = time.perf_counter()
            writer.write(body)
            statuses.append(await _read_reply(reader))
            waits.append(time.perf_counter() - begun)
            if begun + waits[-1] >= end:
                break
        writer.close()

    await asyncio.gather(*(client(number) for number in range(clients)))
    took = time.perf_counter() - started
    errors = sum(status != b"200" for status in statuses)
    return Load(len(waits) * per_request, took, waits, errors, time.process_time() - cpu)


async def _read_reply(reader: asyncio.StreamReader) -> bytes:
    """Read one reply; its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    await reader.readexactly(length)
    return head.split(b" ", 2)[1]


def drive_client(
    search: Callable[[list[str]], object],
    queries: Sequence[str],
    threads: int,
    per_request: int,
    seconds: float,
) -> Load:
    """Threads that search through a client library."""
    waits: list[float] = []
    turn = itertools.count()
    lock = threading.Lock()
    batches = _batches(queries, per_request)
    started, cpu = time.perf_counter(), time.process_time()
    end = started + seconds

    def client(_: int) -> None:
        begun = 0.0
        while begun < end:
            begun = time.perf_counter()
            search(batches[next(turn) % len(batches)])
            with lock:
                waits.append(time.perf_counter() - begun)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(client, range(threads)))
    took = time.perf_counter() - started
    return Load(len(waits) * per_request, took, waits, 0, time.process_time() - cpu)


def _ours(address: str, clients: int) -> Callable[[list[str]], object]:
    retriever = RemoteRetriever(address, concurrency=clients)
    return lambda batch: retriever.search(batch, TOPK)


def _stand_in(address: str, clients: int) -> Callable[[list[str]], object]:
    """The design of Search-R1's client: a bare call, a new connection each time."""

    def search(batch: list[str]) -> object:
        body = {"queries": batch, "topk": TOPK, "return_scores": True}
        return requests.post(f"http://{address}/retrieve", json=body).json()["result"]

    return search


CLIENTS = {"ours": _ours, "stand-in": _stand_in}
"""By name: ``(address, clients)`` to a search function."""
