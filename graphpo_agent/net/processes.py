"""A few processes that are asked, each killed when an answer takes too long.

For work that hostile input makes endless, and that cannot be interrupted in a thread.
"""

import contextlib
import json
import os
import queue
import struct
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphpo_agent.errors import ToolError
from graphpo_agent.net.alarm import alarm
from graphpo_agent.net.deadline import Deadline

__all__ = ["ProcessPool"]

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""What a worker needs to start; keys and passwords are none of its business."""

_START_S = 120.0


class ProcessPool:
    """Processes of one kind; safe to use from several threads.

    Example::

        pool = ProcessPool(Path("html_worker.py"), workers=2, purpose="pages cannot be read",
                           needs="trafilatura lxml_html_clean")
        pool.ask({"html": "<p>a tree"}, seconds=10.0)
    """

    def __init__(self, worker: Path, workers: int, *, purpose: str, needs: str) -> None:
        """Name the file; a process starts when it is needed.

        Args:
            worker: a program that calls ``net.answering.answer_requests``.
            workers: processes at most.
            purpose: what does not work where it does not start, for the message.
            needs: what it imports, for the same.
        """
        self._worker = worker
        self._trouble = (
            f"{purpose}: `{sys.executable} -P {worker}` does not start; run it to see why, or "
            f"install what it needs: pip install {needs}"
        )
        self._places: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(workers):
            self._places.put(None)

    def ask(
        self, request: Mapping[str, Any], seconds: float, deadline: Deadline | None = None
    ) -> dict[str, Any] | None:
        """The answer to a request; None: it took too long or too much memory.

        Args:
            request: JSON values by name.
            seconds: that the answer may take, the wait for a free process not included.
            deadline: of that wait.

        Raises:
            CallFailed: transient: no process was free by then.
            ToolError: no process can be started.
        """
        try:
            process = self._places.get(timeout=None if deadline is None else deadline.left())
        except queue.Empty:
            assert deadline is not None
            raise deadline.missed() from None
        try:
            if process is None or not process.alive:
                process = _Process(self._worker, self._trouble)
            return process.ask({**request, "seconds": seconds}, seconds)
        finally:
            self._places.put(process if process is not None and process.alive else None)


class _Process:
    """One process; it ends with this object.

    Raises:
        ToolError: it does not start.
    """

    def __init__(self, worker: Path, trouble: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,  # an interrupt of the keyboard is for who asks
        )
        self._owner = os.getpid()
        self._stop = weakref.finalize(self, _stop, self._process, self._owner)
        if self._converse(b"", _START_S) is None:
            raise ToolError(trouble)

    @property
    def alive(self) -> bool:
        """Whether it can be asked again, and by this process: a forked child has its own."""
        own = self._owner == os.getpid()
        return own and self._stop.alive and self._process.poll() is None

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
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


def _stop(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End the process and close its pipes; nothing in a forked child, whose it is not."""
    if os.getpid() != owner:
        return
    process.kill()
    with contextlib.suppress(BrokenPipeError):
        process.communicate()
