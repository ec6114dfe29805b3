"""The retrieval server as an ASGI application: what happens to one request."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from graphpo_agent.errors import GraphPOError, QuotaError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.protocols import Retriever
from graphpo_agent.types import Document
from retrievers.batching import Batcher
from retrievers.pages import PageFile
from retrievers.server_messages import Bounds, Refusal, dump, parse_access, parse_retrieve, render
from retrievers.server_metrics import PATHS, Measured, ServerMetrics

__all__ = ["RetrievalApp"]

_LOG = logging.getLogger(__name__)

_STATUS = {"bad_arguments": 422, "no_result": 422, "rate_limit": 503, "transient": 502}
"""What a served retriever's failed call (it may itself be remote) is answered with."""


class RetrievalApp:
    """The application and what it serves; not ready until ``serve_from`` was called.

    Example::

        app = RetrievalApp({"index": "wiki"}, bounds, max_unanswered=256, deadline_s=30.0)
        app.serve_from(retriever, None, workers=2, max_batch=64)
        uvicorn.run(app.asgi)

    Attributes:
        asgi: the ASGI callable.
    """

    def __init__(
        self, serves: Mapping[str, Any], bounds: Bounds, *, max_unanswered: int, deadline_s: float
    ) -> None:
        """Prepare the routes.

        Args:
            serves: what ``GET /health`` says is served.
            bounds: of one request.
            max_unanswered: ``/retrieve`` requests taken in at once; more are answered 503.
            deadline_s: seconds from a request's head to its answer, else 504.
        """
        self._serves = serves
        self._bounds = bounds
        self._max_unanswered = max_unanswered
        self._deadline_s = deadline_s
        self._started = time.monotonic()
        self._unanswered = 0
        self._batcher: Batcher | None = None
        self._pages: PageFile | None = None
        self._metrics = ServerMetrics()
        self._metrics.unanswered.set_function(lambda: self._unanswered)
        endpoints = (self._retrieve, self._access, self._health, self._ready, self._show_metrics)
        methods = ("POST", "POST", "GET", "GET", "GET")
        self.asgi = Starlette(
            routes=[
                Route(path, _checked(endpoint), methods=[method])
                for path, endpoint, method in zip(PATHS, endpoints, methods, strict=True)
            ],
            middleware=[Middleware(Measured, metrics=self._metrics)],
            exception_handlers={HTTPException: _no_route},
        )

    def serve_from(
        self, retriever: Retriever, pages: PageFile | None, *, workers: int, max_batch: int
    ) -> None:
        """Be ready: answer from these. Any thread may call it, once."""
        observe = self._metrics.batch_queries.observe
        batcher = Batcher(retriever.search, workers=workers, max_batch=max_batch, observe=observe)
        self._metrics.waiting.set_function(lambda: batcher.waiting)
        self._pages = pages
        self._batcher = batcher

    def close(self) -> None:
        """End the workers."""
        if self._batcher is not None:
            self._batcher.close()

    async def _retrieve(self, request: Request) -> Response:
        batcher = self._loaded()
        with self._taken_in():
            async with asyncio.timeout(self._deadline_s):
                asked = parse_retrieve(await self._body(request), self._bounds)
                found = await batcher.search(asked.queries, asked.topk)
        self._count(found)
        return Response(render(asked, found), media_type="application/json")

    async def _access(self, request: Request) -> Response:
        self._loaded()
        pages = self._pages
        if pages is None:
            raise Refusal(404, "this server has no pages; start it with --pages FILE")
        with self._taken_in():
            async with asyncio.timeout(self._deadline_s):
                urls = parse_access(await self._body(request), self._bounds)
                rows = await run_in_threadpool(lambda: [pages.row(url) for url in urls])
        return _json(200, {"result": rows})

    async def _health(self, request: Request) -> Response:
        ready = self._batcher is not None
        uptime = round(time.monotonic() - self._started, 3)
        state = {"status": "ok", "ready": ready, "uptime_s": uptime, "serves": self._serves}
        return _json(200, state)

    async def _ready(self, request: Request) -> Response:
        self._loaded()
        return _json(200, {"ready": True})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    def _loaded(self) -> Batcher:
        if self._batcher is None:
            raise Refusal(503, "the index is still being loaded", retry_after_s=1)
        return self._batcher

    @contextlib.contextmanager
    def _taken_in(self) -> Iterator[None]:
        """Count the request while it is unanswered."""
        if self._unanswered >= self._max_unanswered:
            message = f"busy: {self._unanswered} requests are unanswered"
            raise Refusal(503, message, retry_after_s=1)
        self._unanswered += 1
        try:
            yield
        finally:
            self._unanswered -= 1

    async def _body(self, request: Request) -> bytes:
        """The body, which is never held beyond its bound."""
        chunks, size = [], int(request.headers.get("content-length", 0))
        if size <= self._bounds.max_body_bytes:
            size = 0
            async for chunk in request.stream():
                size += len(chunk)
                if size > self._bounds.max_body_bytes:
                    break
                chunks.append(chunk)
        if size > self._bounds.max_body_bytes:
            message = f"the body is longer than {self._bounds.max_body_bytes} bytes"
            raise Refusal(413, message)
        return b"".join(chunks)

    def _count(self, found: Sequence[Sequence[Document]]) -> None:
        self._metrics.queries.inc(len(found))
        self._metrics.hits.inc(sum(map(len, found)))
        self._metrics.empty.inc(sum(not documents for documents in found))


Endpoint = Callable[[Request], Awaitable[Response]]


def _checked(endpoint: Endpoint) -> Endpoint:
    """The endpoint with every failure as an HTTP status and one JSON line."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Refusal as refusal:
            return _json(refusal.status, {"error": str(refusal)}, refusal.headers)
        except ClientDisconnect:
            return _json(400, {"error": "the client left before its request was complete"})
        except TimeoutError:
            return _json(504, {"error": "the search took longer than this server allows"})
        except CallFailed as failure:
            headers = {"Retry-After": "1"} if failure.kind == "rate_limit" else {}
            return _json(_STATUS[failure.kind], {"error": str(failure)}, headers)
        except GraphPOError as error:
            status = 402 if isinstance(error, QuotaError) else 500
            return _json(status, {"error": str(error)})
        except asyncio.CancelledError:  # the process ends without waiting
            return _json(503, {"error": "the server is being stopped"}, {"Retry-After": "1"})
        except Exception as error:  # one request's bug must not end the others'
            _LOG.exception("%s failed", request.url.path)
            return _json(500, {"error": f"{type(error).__name__}: {error}"})

    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; there are {', '.join(PATHS)}"
    return _json(error.status_code, {"error": message}, error.headers)


def _json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, media_type="application/json")
