"""Real HTTP servers on 127.0.0.1 whose every reply a test scripts."""

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from graphpo_agent.net.client import Limits

QUICK = Limits(deadline_s=20.0, tries=3, max_backoff_s=0.01)
"""Of calls that end soon, whatever a server does."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[[int, Request], tuple[int, Mapping[str, str], bytes]]
"""(how many requests came before, request) -> status, headers, body."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away early is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers), body)
        with self.server.lock:
            before = len(self.server.requests)
            self.server.requests.append(request)
        status, headers, answer = self.server.script(before, request)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = _serve

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    server = Server(script)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def raw_server(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """Bytes as they are; ``talk`` gets each connection and an event that is set at the end."""
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            talk(self.request, over)

    class Tcp(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that goes away early is part of the tests."""

    with Tcp(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            over.set()
            server.shutdown()


def drip(first: bytes) -> Callable[[socket.socket, threading.Event], None]:
    """Sends ``first`` and then a byte every 20 ms for as long as somebody listens."""

    def talk(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(first)
        while not over.wait(0.02):
            connection.sendall(b"x")

    return talk


def answer(value: Any, status: int = 200, **headers: str) -> tuple[int, Mapping[str, str], bytes]:
    """A JSON reply; underscores in header names stand for hyphens."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return status, {"Content-Type": "application/json", **named}, json.dumps(value).encode()


def always(value: Any, status: int = 200, **headers: str) -> Script:
    return lambda before, request: answer(value, status, **headers)


def in_turn(*replies: tuple[int, Mapping[str, str], bytes]) -> Script:
    """The replies one after another, the last one again and again."""
    return lambda before, request: replies[min(before, len(replies) - 1)]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
