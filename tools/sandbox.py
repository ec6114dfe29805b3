"""Running a Python program that nobody has read, so that it can harm nothing.

Three isolations, the first that works on this machine is taken. With each of them the program is
one process (threads allowed, child processes refused) with no network, no signals to others, no
environment, and limits on CPU time, address space, file size, open files and output:

=============  ====================================================  ============================
isolation      files                                                 besides
=============  ====================================================  ============================
bubblewrap     sees only /usr and the interpreter's directories,     own PID, network, IPC, UTS
               read-only, and an empty /tmp in memory, of bounded    namespaces; host's root is
               size; no /proc                                        "nobody" inside
namespaces     the same, made by this project's own launcher         the same
landlock       opens only those, and an empty directory on disk;     sees the host's process ids,
               *can* tell whether other files exist; the             host name and user id;
               directory's total size is not bounded                 threads bounded by memory only
=============  ====================================================  ============================

An interpreter below /tmp makes the empty directory /scratch. The system-call filter
(``tools.sandbox_filter``) is part of all three. ``none`` has to be asked
for: limits and a deadline only, against accidents, no protection against intent.
"""

import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from graphpo_agent.errors import ToolError
from graphpo_agent.net.failures import CallFailed
from tools.sandbox_filter import system_call_filter
from tools.sandbox_order import Isolation, Limits, find_interpreter, launch_command, launch_order
from tools.sandbox_watch import Watched, watch

__all__ = ["Isolation", "Limits", "Sandbox", "SandboxResult"]


@dataclass(frozen=True, slots=True)
class SandboxResult:
    r"""What became of a program.

    Example: ``print(4)`` gives ``SandboxResult("4\n", "", 0, False, False, False)``.
    """

    stdout: str
    """Decoded as UTF-8; other bytes become U+FFFD."""
    stderr: str
    """Likewise; the program's own file is called ``program.py`` in it."""
    exit_status: int | None
    """128 + n: ended by signal n. None: stopped from outside (the next fields say why)."""
    timed_out: bool
    """It used up its seconds, by the wall clock or the CPU's."""
    memory_exceeded: bool
    """It ended with a MemoryError: told by its last words, so a program can pretend it."""
    truncated: bool
    """It was stopped because it wrote more than ``output_bytes``; the first of them are kept."""


class Sandbox:
    r"""Runs Python programs. Thread-safe; each program has a process and a directory of its own.

    Example::

        Sandbox().run("print(6 * 7)").stdout  # "42\n"
        Sandbox().run("open('/etc/shadow')").stderr  # "... No such file or directory ..."

    Attributes:
        isolation: what keeps the programs in.
    """

    def __init__(
        self, isolation: str = "auto", python: str | None = None, limits: Limits | None = None
    ) -> None:
        """Try the isolation with a program that attacks it.

        Args:
            isolation: one of ``Isolation``, or ``auto``: the first that works, never ``none``.
            python: the interpreter; what is installed for it can be imported. Default: the
                one that runs this.
            limits: of each program.

        Raises:
            ToolError: the isolation, or every isolation, does not work here.
        """
        known: tuple[Isolation, ...] = get_args(Isolation)
        if isolation not in ("auto", *known):
            raise ToolError(
                f"sandbox: isolation must be one of auto, {', '.join(known)}, found {isolation!r}"
            )
        self._limits = limits or Limits()
        self._interpreter = find_interpreter(python or sys.executable)
        if isolation == "none":
            self._filter = b""
            self.isolation: Isolation = "none"
            return
        self._filter = system_call_filter(platform.machine())
        reasons: list[str] = []
        for candidate in known[:-1] if isolation == "auto" else (isolation,):
            self.isolation = candidate
            reason = self._weakness()
            if reason is None:
                return
            reasons.append(f"{candidate}: {reason}")
        raise ToolError(
            f"sandbox: no isolation works here ({'; '.join(reasons)}); install bubblewrap "
            "(apt-get install bubblewrap), allow user namespaces or use a kernel with Landlock; "
            "'isolation: none' runs programs unprotected"
        )

    def run(self, source: str, stdin: str = "") -> SandboxResult:
        """Run a program to its end or its limits.

        Raises:
            CallFailed: transient: the machine could not start it (processes, memory, disk).
        """
        try:
            place = Path(tempfile.mkdtemp(prefix="sandbox-"))
            # Unlike shutil, rm removes directories of any depth; an interrupted process does so
            # as it ends.
            command = ["rm", "-rf", str(place)]
            remove = weakref.finalize(self, subprocess.run, command, stderr=subprocess.DEVNULL)
            try:
                return self._run_in(place, source, stdin)
            finally:
                remove()
        except OSError as error:
            raise CallFailed("transient", f"the sandbox could not start: {error}") from error

    def _run_in(self, place: Path, source: str, stdin: str) -> SandboxResult:
        program = place / "program.py"
        program.write_bytes(source.encode("utf-8", "surrogatepass"))
        program.chmod(0o644)
        (place / "root").mkdir()
        (place / "directory").mkdir()
        order = launch_order(self.isolation, place, self._interpreter, self._limits, self._filter)
        with ExitStack() as stack:
            spec = _sealed(stack, json.dumps(order).encode())
            given = _sealed(stack, stdin.encode("utf-8", "replace"))
            read_end, write_end = os.pipe()
            reader = stack.enter_context(os.fdopen(read_end, "rb"))
            with os.fdopen(write_end, "wb") as writer:
                process = subprocess.Popen(
                    launch_command(order, spec, writer.fileno()),
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(spec, writer.fileno()),
                    start_new_session=True,
                    cwd="/",
                    env={},
                )
            watched = watch(process, self._limits.deadline_s, self._limits.output_bytes)
            said = reader.read()  # ends when the launcher has
        if said != b"ok":
            reason = _last_line(said or watched.stderr) or f"no sign of it ({watched.ending})"
            raise CallFailed("transient", f"the sandbox could not start: {reason}")
        return _result(watched, order["program"])

    def _weakness(self) -> str | None:
        """Why this isolation must not be used: it does not start, or something gets out."""
        with tempfile.TemporaryDirectory(prefix="sandbox-outside-") as outside:
            Path(outside, "secret").touch()
            try:
                result = self.run(_ATTACK.replace("OUTSIDE", repr(outside)))
            except CallFailed as failure:
                return str(failure)
            if os.listdir(outside) != ["secret"]:
                return "writing outside is not prevented"
        if result.stdout == "held\n" and result.exit_status == 0:
            return None
        return _last_line((result.stderr + result.stdout).encode()) or "the trial was stopped"


_ATTACK = """
import os, socket
attempts = {
    "sockets": lambda: socket.socket(),
    "datagrams": lambda: socket.socketpair(type=socket.SOCK_DGRAM),
    "child processes": lambda: os.fork() or os._exit(0),
    "signals to others": lambda: os.kill(os.getppid(), 0),
    "reading outside": lambda: open(OUTSIDE + "/secret"),
    "writing outside": lambda: open(OUTSIDE + "/made", "w"),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    raise SystemExit(name + " not prevented")
open("inside", "w").close()
print("held")
"""


def _sealed(stack: ExitStack, data: bytes) -> int:
    """A file descriptor to read ``data`` from, which nobody can write to."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = stack.enter_context(os.fdopen(descriptor, "wb"))
    file.write(data)
    file.seek(0)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _result(watched: Watched, program: str) -> SandboxResult:
    status = watched.exit_status
    named = re.compile(rf"(?<![\w./-]){re.escape(program)}\b")
    stderr = named.sub("program.py", watched.stderr.decode(errors="replace"))
    return SandboxResult(
        stdout=watched.stdout.decode(errors="replace"),
        stderr=stderr,
        exit_status=status,
        timed_out=watched.ending == "deadline" or status == 128 + signal.SIGXCPU,
        memory_exceeded=status == 1 and "MemoryError" in _last_line(watched.stderr),
        truncated=watched.ending == "output",
    )


def _last_line(text: bytes) -> str:
    told = text.decode(errors="replace").strip()
    # So Python 3.13 ends where memory is too short for a whole traceback.
    lines = told.removesuffix("\nlost sys.stderr").splitlines()
    return lines[-1] if lines else ""
