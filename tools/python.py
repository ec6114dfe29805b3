"""The Python tool: what a program of the policy's prints, run where it can do no harm."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from graphpo_agent.machine import usable_cpus
from graphpo_agent.net.checks import check_counts, check_rate, check_seconds
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.pace import Pace
from graphpo_agent.net.store import CallStore, request_key
from graphpo_agent.net.workers import Workers
from graphpo_agent.types import ToolResult
from tools.sandbox import Limits, Sandbox, SandboxResult

__all__ = ["PythonTool"]

_TRACEBACK_LINES = 10
_REMARK_CHARACTERS = 50
_SIGNALS = range(129, 129 + 64)
"""Exit statuses of programs that a signal ended."""


class PythonTool:
    r"""A ``Tool`` that runs a Python program and shows what it printed.

    Each call is a program of its own in an empty directory: nothing is kept between calls. What
    is installed for the interpreter can be imported. An exception, a time-out or an exceeded
    limit is the policy's doing: it reads about it, and the call has not failed.

    Example::

        PythonTool().run([{"code": "print(6 * 7)"}, {"code": "1 / 0"}])
        # [ToolResult("42\n"),
        #  ToolResult('Traceback ...\n  File "program.py", line 1 ...\nZeroDivisionError: ...\n')]
    """

    name = "python"
    schema: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "code": {
                "type": "string",
                "description": "A whole Python 3 program; what it prints is the result.",
            }
        },
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        deadline_s: float = 10.0,
        memory_mib: int = 1024,
        max_output_characters: int = 4000,
        concurrency: int = 2,
        per_second: float | None = None,
        isolation: str = "auto",
        python: str | None = None,
        store: CallStore | None = None,
    ) -> None:
        """Find an isolation that works here (``tools.sandbox``) and try it.

        Args:
            deadline_s: wall-clock seconds of one program.
            memory_mib: its address space; numpy alone takes some 150.
            max_output_characters: of the text that the policy reads; a longer one loses its
                middle.
            concurrency: programs at once, over all threads; never more than there are CPUs for,
                so that no program times out for another's sake.
            per_second: programs begun per second at most; None: any number.
            isolation: ``auto``, or one that has to be used: ``bubblewrap``, ``namespaces``,
                ``landlock``; ``none`` runs programs unprotected.
            python: path of the interpreter, e.g. of a virtual environment with the packages
                that programs may import; default: the interpreter of this process.
            store: what became of programs, by their text and limits: it holds those of one
                interpreter, and one that makes no calls needs no isolation. None: none.

        Raises:
            ToolError: an argument out of range, an interpreter that does not run, or no
                isolation that works on this machine.
        """
        owner = "python tool"
        check_seconds(owner, above=0.25, deadline_s=deadline_s)  # Python itself takes 0.1
        check_counts(owner, concurrency=concurrency)
        check_counts(owner, least=64, memory_mib=memory_mib)
        check_counts(owner, least=400, max_output_characters=max_output_characters)
        check_rate(owner, per_second)
        limits = Limits(deadline_s=deadline_s, memory_bytes=memory_mib * 2**20)
        self._pace = Pace(per_second)
        self._store = store
        if store is None or store.asks:
            self._sandbox = Sandbox(isolation, python, limits)
        self._limits = limits
        self._max_output_characters = max_output_characters
        self._workers = Workers(min(concurrency, usable_cpus()))
        self.description = (
            "Runs a Python 3 program and returns what it prints. Nothing is kept between calls; "
            f"there is no network; it may take {deadline_s:g} seconds and {memory_mib} MiB."
        )

    def run(self, calls: Sequence[Mapping[str, Any]]) -> list[ToolResult]:
        """What each call's program printed, in order; several run at once.

        A call without code has the failure ``bad_arguments``; a program that this machine could
        not start, ``transient``.

        Raises:
            ToolError: the store fails, or (``strict``) does not know a program.
        """
        jobs = [self._workers.submit(partial(self._answer, call)) for call in calls]
        try:
            return [job.result() for job in jobs]
        finally:
            for job in jobs:
                job.cancel()

    def _answer(self, call: Mapping[str, Any]) -> ToolResult:
        code = call.get("code")
        if set(call) != {"code"} or not isinstance(code, str) or not code.strip():
            message = "python needs one argument, code: a program as a string"
            return ToolResult(text=message, failure="bad_arguments")
        try:
            result = self._result(code)
        except CallFailed as failure:
            return ToolResult(text=f"python failed: {failure}", failure=failure.kind)
        return ToolResult(text=self._observation(result))

    def _result(self, code: str) -> SandboxResult:
        """What became of a program, now or when it was recorded."""
        if self._store is None:
            return self._run(code)
        key = request_key("RUN", "python", body={"code": code} | asdict(self._limits))
        stored = self._store.fetch(key, lambda: json.dumps(asdict(self._run(code))).encode())
        return SandboxResult(**json.loads(stored))

    def _run(self, code: str) -> SandboxResult:
        time.sleep(self._pace.wait_s())
        return self._sandbox.run(code)

    def _observation(self, result: SandboxResult) -> str:
        """What was printed, then what went wrong, if anything, then why."""
        most = self._max_output_characters
        end = _shortened(_error(result), most // 2) + _remark(result, self._limits)
        printed = _shortened(result.stdout, most - len(end) - bool(end))
        if not printed and not end:
            return "[no output: print what you want to see]"
        return printed + ("\n" if end and printed and not printed.endswith("\n") else "") + end


def _error(result: SandboxResult) -> str:
    """The last lines of a traceback; nothing for a program that ended well or was stopped."""
    if result.exit_status in (0, None):
        return ""
    return "".join(result.stderr.splitlines(keepends=True)[-_TRACEBACK_LINES:])


def _remark(result: SandboxResult, limits: Limits) -> str:
    status = result.exit_status or 0
    if result.timed_out:
        return f"[stopped: it took longer than {limits.deadline_s:g} seconds]"
    if result.truncated:
        return f"[stopped: it wrote more than {limits.output_bytes} bytes]"
    if result.memory_exceeded:
        return f"[the limit is {limits.memory_bytes >> 20} MiB of memory]"
    if status in _SIGNALS:
        return f"[ended by signal {status - 128}]"
    return f"[exit status {status}]" if status and not result.stderr else ""


def _shortened(text: str, most: int) -> str:
    """``text`` of at most ``most`` characters: its start and its end around a remark."""
    if len(text) <= most:
        return text
    kept = most - _REMARK_CHARACTERS
    remark = f"\n[… {len(text) - kept} characters left out …]\n"
    return text[: kept - kept // 2] + remark + text[len(text) - kept // 2 :]
