"""Following a child process: what it writes, up to a limit, and until when."""

import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import IO, Literal

__all__ = ["Watched", "watch"]

Ending = Literal["itself", "deadline", "output"]
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class Watched:
    r"""How a process ended and what it wrote until then.

    Example: ``Watched(b"4\n", b"", exit_status=0, ending="itself")``
    """

    stdout: bytes
    stderr: bytes
    exit_status: int | None
    """128 + n: ended by signal n; None: stopped by the watcher."""
    ending: Ending
    """By itself, or stopped for its time or the size of its output."""


def watch(process: subprocess.Popen[bytes], deadline_s: float, output_bytes: int) -> Watched:
    """Read both outputs until the process ends; stop it and its process group if it must be.

    Args:
        process: started as the leader of a session, with pipes for both outputs.
        deadline_s: seconds from now.
        output_bytes: the most that is kept of each output; writing more ends the process.
    """
    assert process.stdout is not None and process.stderr is not None
    outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
    with process.stdout, process.stderr:
        try:
            ending = _read(process.pid, outputs, time.monotonic() + deadline_s, output_bytes)
        finally:
            # Before its status is taken, so that its number still is its own.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    stdout, stderr = (bytes(each[:output_bytes]) for each in outputs.values())
    status = code if code >= 0 else 128 - code
    return Watched(stdout, stderr, status if ending == "itself" else None, ending)


def _read(
    pid: int, outputs: dict[IO[bytes], bytearray], deadline: float, output_bytes: int
) -> Ending:
    ended = os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            for pipe in outputs:
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                ready = [key.fileobj for key, _ in selector.select(left)]
                for pipe, kept in outputs.items():
                    if pipe in ready and not _take(pipe, kept):
                        selector.unregister(pipe)
                    if len(kept) > output_bytes:
                        return "output"
                if ended in ready:
                    return _finish(outputs, output_bytes)
            return "deadline"
    finally:
        os.close(ended)


def _take(pipe: IO[bytes], kept: bytearray) -> bool:
    """Keep what is there to read; False: nothing any more."""
    try:
        chunk = os.read(pipe.fileno(), _CHUNK)
    except BlockingIOError:
        return False
    kept += chunk
    return bool(chunk)


def _finish(outputs: dict[IO[bytes], bytearray], output_bytes: int) -> Ending:
    """Take what an ended process left in the pipes."""
    for pipe, kept in outputs.items():
        while len(kept) <= output_bytes and _take(pipe, kept):
            pass
    return "output" if any(len(kept) > output_bytes for kept in outputs.values()) else "itself"
