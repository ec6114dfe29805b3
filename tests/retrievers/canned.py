"""A web service on this machine that answers as a test says and remembers what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Asked:
    """One request: ``body`` is its JSON value or None, ``headers`` has names in lower case."""

    method: str
    path: str
    params: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any


Answer = Callable[[Asked], tuple[int, Any]]
"""Status and body: bytes as they are, else a JSON value."""


class Canned(ThreadingHTTPServer):
    """The service; ``asked`` grows with every request."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[Asked] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Canned

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        params = dict(parse_qsl(parts.query))
        asked = Asked(self.command, parts.path, params, headers, json.loads(data) if data else None)
        self.server.asked.append(asked)
        status, body = self.server.answer(asked)
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        with suppress(ConnectionError):  # the client did not wait
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

    do_GET = do_POST = _handle

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def canned(answer: Answer) -> Iterator[Canned]:
    with Canned(answer) as service:
        thread = threading.Thread(target=service.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.shutdown()
            thread.join()
