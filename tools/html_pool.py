"""A few processes that turn HTML into text, each killed when a page takes too long.

Parsers of HTML are quadratic on hostile pages and cannot be interrupted; a process can.
"""

import contextlib
import json
import os
import queue
import struct
import subprocess
import sys
import weakref
from pathlib import Path

from graphpo_agent.errors import ToolError
from graphpo_agent.net.alarm import alarm
from graphpo_agent.net.deadline import Deadline
from graphpo_agent.net.failures import CallFailed

__all__ = ["HtmlPool"]

_WORKER = Path(__file__).with_name("html_worker.py")
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""What a worker needs to start; keys and passwords are none of its business."""


_START_S = 120.0


class HtmlPool:
    """Turns pages into text in processes of its own; safe to use from several threads.

    Example::

        HtmlPool(workers=2, seconds=10.0).text("<title>Oak</title><p>a tree", "https://e.org/",
                                               links=False, deadline=Deadline(30.0))
        # ("Oak", "a tree")
    """

    def __init__(self, workers: int, seconds: float) -> None:
        """Allow so many processes and so long for each page; a process starts when needed."""
        self._seconds = seconds
        self._places: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._places.put(None)

    def text(self, html: str, url: str, links: bool, deadline: Deadline) -> tuple[str, str]:
        """Title and text of a page.

        Args:
            html: the page.
            url: where it is; relative links are resolved against it.
            links: keep links, as Markdown.
            deadline: includes the wait for a free process.

        Raises:
            CallFailed: no_result: the page takes too long or too much memory; transient: the
                deadline passed.
            ToolError: no process can be started.
        """
        try:
            worker = self._places.get(timeout=deadline.left())
        except queue.Empty:
            raise deadline.missed() from None
        try:
            worker = worker or _Worker()
            seconds = min(self._seconds, deadline.left())
            request = {"html": html, "url": url, "links": links, "seconds": seconds}
            answer = worker.ask(request, seconds)
        finally:
            self._places.put(worker if worker is not None and worker.alive else None)
        if answer is None:
            if deadline.passed:
                raise deadline.missed()
            raise CallFailed("no_result", f"{url}: the page is too complex to be read")
        return answer["title"], answer["text"]


class _Worker:
    """One process; it ends with this object.

    Raises:
        ToolError: it does not start.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        if self._converse(b"", _START_S) is None:
            raise ToolError(
                f"pages cannot be read: `{sys.executable} -P {_WORKER}` does not start; run it to "
                "see why, or install what it needs: pip install trafilatura lxml_html_clean"
            )

    @property
    def alive(self) -> bool:
        """Whether it can be asked again."""
        return self._stop.alive

    def ask(self, request: dict[str, object], seconds: float) -> dict[str, str] | None:
        """The answer to a request; None: there is none, and the process is gone."""
        message = json.dumps(request).encode()
        answer = self._converse(struct.pack(">I", len(message)) + message, seconds)
        return None if answer is None else json.loads(answer)

    def _converse(self, message: bytes, seconds: float) -> bytes | None:
        """Send bytes and read one message; None: the process is gone before it answered."""
        answer = None
        try:
            with alarm(seconds, self._process.kill):
                answer = _send_and_read(self._process, message)
        finally:
            if answer is None:
                self._stop()
        return answer


def _send_and_read(process: "subprocess.Popen[bytes]", message: bytes) -> bytes | None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(message)
        process.stdin.flush()
    except BrokenPipeError:
        return None
    header = process.stdout.read(4)
    if len(header) < 4:
        return None
    length = struct.unpack(">I", header)[0]
    answer = process.stdout.read(length)
    return answer if len(answer) == length else None


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the process and close its pipes."""
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
