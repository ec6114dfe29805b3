"""The retrieval server's process: port, signals, loading, ready file.

``graphpo serve DIR`` answers Search-R1's ``POST /retrieve`` and ASearcher's ``POST /access``
(``retrievers.server_messages``), ``GET /health``, ``GET /ready`` and Prometheus' ``GET /metrics``.
"""

import asyncio
import contextlib
import gc
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from graphpo_agent.errors import ToolError, first_line
from graphpo_agent.machine import usable_cpus
from graphpo_agent.net.checks import check_counts, check_seconds
from graphpo_agent.protocols import Retriever
from retrievers.pages import PageFile
from retrievers.server_app import RetrievalApp
from retrievers.server_messages import Bounds

__all__ = ["serve"]

_KEEP_ALIVE_S = 75
"""Longer than a rollout's pause between two searches, so that clients keep their connections."""
_BOUNDS = Bounds()


def serve(
    retriever_factory: Callable[[], Retriever],
    *,
    serves: Mapping[str, Any],
    host: str = "127.0.0.1",
    port: int = 8000,
    ready_file: Path | None = None,
    bounds: Bounds = _BOUNDS,
    queue: int = 256,
    workers: int | None = None,
    max_batch: int = 64,
    deadline_s: float = 60.0,
    pages: Path | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, then answer what was taken in; a second signal ends at once.

    The port opens at once and the retriever is made behind it: ``/health`` answers meanwhile, all
    else is 503. To be called from the main thread.

    Args:
        retriever_factory: makes what is served, in a thread of its own.
        serves: what ``GET /health`` says about it.
        host: the address to bind; 0.0.0.0 lets other machines in.
        port: 0 takes a free one.
        ready_file: receives ``host:port`` once ``/retrieve`` answers; removed at the end, and at
            the start where an earlier server left one.
        bounds: of one request.
        queue: requests taken in at once; more are answered 503 with Retry-After.
        workers: searches at once; None: one for each CPU that this process can keep busy.
        max_batch: waiting queries searched together at most.
        deadline_s: seconds from a request's head to its answer, else 504.
        pages: ASearcher's page file for ``/access``; None: 404.

    Returns:
        0, the exit status.

    Raises:
        ToolError: a limit that cannot be, a port that cannot be bound or a ready file that cannot
            be written.
        GraphPOError: what the factory or the page file raised.
    """
    count = usable_cpus() if workers is None else workers
    check_counts("server", queue=queue, workers=count, max_batch=max_batch)
    check_seconds("server", deadline_s=deadline_s)
    app = RetrievalApp(serves, bounds, max_unanswered=queue, deadline_s=deadline_s)
    with _listening(host, port) as (listener, address):
        ready = _ReadyFile(ready_file, address)

        def load() -> None:
            page_file = None if pages is None else PageFile(pages)
            retriever = retriever_factory()
            gc.freeze()  # an index is never garbage: collections need not look at it
            app.serve_from(retriever, page_file, workers=count, max_batch=max_batch)
            ready.write()
            print(f"serving on http://{address}", flush=True)

        _run(app, deadline_s, listener, load, ready)
    return 0


def _run(
    app: RetrievalApp,
    deadline_s: float,
    listener: socket.socket,
    load: Callable[[], None],
    ready: "_ReadyFile",
) -> None:
    """``_serve`` in an event loop; at its end the workers end and the ready file goes."""
    config = _config(app, deadline_s)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            runner.run(_serve(_Server(config), listener, load))
        finally:  # while there still is a loop that a search may answer to
            app.close()
            ready.remove()


def _config(app: RetrievalApp, deadline_s: float) -> uvicorn.Config:
    """At the end a request has its whole deadline to be answered."""
    return uvicorn.Config(
        app.asgi,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(deadline_s) + 1,
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal it received."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: uvicorn.Server, listener: socket.socket, load: Callable[[], None]) -> None:
    """Answer until a signal, or until loading fails: then raise what it raised."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    def loaded(error: BaseException | None) -> None:
        failures.extend([error] if error else [])
        server.should_exit |= error is not None

    failures: list[BaseException] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    threading.Thread(target=_report, args=(load, loop, loaded), daemon=True).start()
    await server.serve(sockets=[listener])
    if failures:
        raise failures[0]


def _report(
    load: Callable[[], None],
    loop: asyncio.AbstractEventLoop,
    loaded: Callable[[BaseException | None], None],
) -> None:
    """Load, and tell the loop how it went."""
    failure: BaseException | None = None
    try:
        load()
    except BaseException as error:  # raised again in the main thread
        failure = error
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for the index
        loop.call_soon_threadsafe(loaded, failure)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A socket that takes connections from here on, and its address as ``host:port``."""
    if not host:  # which the system takes for every address
        raise ToolError("server: host is empty; 0.0.0.0 lets other machines in")
    family, name = (socket.AF_INET6, f"[{host}]") if ":" in host else (socket.AF_INET, host)
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(2048)
        except (OSError, OverflowError, TypeError) as error:  # TypeError: no name of a host
            raise ToolError(
                f"cannot listen on {host}:{port} ({first_line(error)}); choose another --host or "
                "--port (0 takes a free port)"
            ) from error
        yield listener, f"{name}:{listener.getsockname()[1]}"


class _ReadyFile:
    """The file that says where the server answers, while it does; ``path`` None: none."""

    def __init__(self, path: Path | None, address: str) -> None:
        """Remove what an earlier server left.

        Raises:
            ToolError: it cannot be removed, or there is no directory for one.
        """
        self._path = path
        self._address = address
        self._over = False
        self._lock = threading.Lock()
        if path is not None:
            if not path.parent.is_dir():
                raise ToolError(f"ready file {path}: there is no directory {path.parent}")
            with self._errors():
                path.unlink(missing_ok=True)

    def write(self) -> None:
        """At once and whole; not when it was removed already."""
        if self._path is not None:
            new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            with self._lock, self._errors():
                if not self._over:
                    new.write_text(self._address)
                    new.replace(self._path)

    def remove(self) -> None:
        """Unless another server's has taken its place."""
        path = self._path
        with self._lock:
            self._over = True
            if path is not None and path.exists() and path.read_text() == self._address:
                path.unlink()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ToolError(f"ready file {self._path}: {error.strerror}") from error
