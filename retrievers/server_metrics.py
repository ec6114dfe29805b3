"""What the retrieval server counts, for Prometheus."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["PATHS", "Measured", "ServerMetrics"]

PATHS = ("/retrieve", "/access", "/health", "/ready", "/metrics")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """The counters of one server; ``registry`` holds nothing else.

    Example: ``ServerMetrics().text()`` is the body of ``GET /metrics``.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "graphpo_requests", "Answered requests.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "graphpo_request_seconds",
            "From a request's head to its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.waiting = Gauge(
            "graphpo_waiting_queries", "Queries not yet being searched.", registry=self.registry
        )
        self.unanswered = Gauge(
            "graphpo_unanswered_requests", "Retrieve requests taken in.", registry=self.registry
        )
        self.batch_queries = Histogram(
            "graphpo_batch_queries",
            "Queries searched together.",
            buckets=_QUERIES,
            registry=self.registry,
        )
        self.queries = Counter("graphpo_queries", "Queries answered.", registry=self.registry)
        self.hits = Counter("graphpo_hits", "Documents returned.", registry=self.registry)
        self.empty = Counter(
            "graphpo_queries_without_hit", "Queries that found nothing.", registry=self.registry
        )

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class Measured:
    """ASGI middleware that counts and times requests; unknown paths share the label ``other``."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        path = scope["path"] if scope["path"] in PATHS else "other"
        started = time.perf_counter()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
                self._metrics.seconds.labels(path).observe(time.perf_counter() - started)
            await send(message)

        await self._app(scope, receive, note)
