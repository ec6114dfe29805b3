r"""Programs: whether the one that a response ends with passes all tests of its task.

Each test is a process in the sandbox of ``tools.sandbox``, and its output is compared here: a
program sees what goes in, never what has to come out, so it cannot pretend to be right.

A configuration names the reward as ``{class: graphpo_agent.rewards.code:CodeReward}``.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from graphpo_agent.errors import DataError, ToolError
from graphpo_agent.machine import usable_cpus
from graphpo_agent.net.checks import check_counts, check_seconds
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.program_tests import ProgramTests
from graphpo_agent.types import Outcome, Task
from tools.sandbox import Limits, Sandbox

__all__ = ["CodeReward", "last_program", "same_output"]

_FENCE = re.compile(r"^([^\n`]*)`{3,}([^\n`]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"[\w+#.-]+[ \t\r]*")
_OUTPUT_BYTES = 2**24
_MARK = "<result of the call>"
_HARNESS = """
import sys
sys.setrecursionlimit(50_000)
sys.set_int_max_str_digits(50_000)
_names = ("sys typing re string datetime collections heapq bisect copy math random statistics "
          "itertools functools operator json io").split()
for _name in _names:
    exec(f"from {_name} import *")
exec("import " + ", ".join(_names))
from builtins import *
def _caller(function, arguments, mark, json=json, say=print, scope=globals()):
    def call():
        found = scope["Solution"]() if "Solution" in scope else sys.modules["__main__"]
        value = getattr(found, function)(*json.loads(arguments))
        say("\\n" + mark + json.dumps(value, default=lambda number: number.item()))
    return call
_call = None if _function is None else _caller(_function, _arguments, _mark)
if _call is not None:
    __name__ = "solution"  # it is not what is run
    sys.modules["solution"] = sys.modules["__main__"]
try:
    exec(compile(_source, "solution.py", "exec"))
except SystemExit:
    pass  # whatever the status
if _call is not None:
    _call()
"""

CodeStatus = Literal["passed", "failed", "no_program", "timeout"]


class CodeReward:
    """1 for a program that passes all tests of ``task.metadata["tests"]``, else 0; a ``RewardFn``.

    The program is ``last_program`` of the response; in agent mode of the marked answer. As in
    LiveCodeBench, what programs usually import is imported already, a test is passed by the same
    lines (``same_output``) or the same JSON value, and a program may exit with any status but not
    end with another exception. One test after another is run, up to the first that fails.

    Example::

        tests = ProgramTests((("1 2", "3"),)).packed()
        CodeReward()(Task("a", "Add them.", (), {"tests": tests}), Outcome(response))
    """

    def __init__(
        self,
        *,
        seconds: Annotated[float, Field(gt=0.25)] = 6.0,
        memory_mib: Annotated[int, Field(ge=64)] = 1024,
        isolation: str = "auto",
        python: str | None = None,
    ) -> None:
        """Find an isolation that works here (``tools.sandbox``) and try it.

        Args:
            seconds: of one test, by the wall clock.
            memory_mib: address space of one test.
            isolation: as of ``tools.python:PythonTool``.
            python: the interpreter; default: that of this process.

        Raises:
            ToolError: a limit out of range, or no isolation works on this machine.
        """
        check_seconds("CodeReward", above=0.25, seconds=seconds)  # Python itself takes 0.1
        check_counts("CodeReward", least=64, memory_mib=memory_mib)
        limits = Limits(seconds, memory_mib * 2**20, _OUTPUT_BYTES)
        self._sandbox = Sandbox(isolation, python, limits)
        self._free = threading.BoundedSemaphore(usable_cpus())
        self._counts: Counter[CodeStatus] = Counter()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Mapping[str, int]:
        """Responses so far without a program, and those whose program took too long."""
        return {
            "code/no_program": self._counts["no_program"],
            "code/timeout": self._counts["timeout"],
        }

    def __call__(self, task: Task, outcome: Outcome) -> float:
        """1 or 0.

        Raises:
            DataError: the task has no tests.
            ToolError: the sandbox does not start any more.
        """
        packed = task.metadata.get("tests")
        if not isinstance(packed, str):
            raise DataError(f"task {task.id}: has no tests in field 'metadata.tests'")
        text = outcome.response if outcome.answer is None else outcome.answer
        status = self.status(text, _unpacked(packed))
        with self._lock:
            self._counts[status] += 1
        return float(status == "passed")

    def status(self, response: str, tests: ProgramTests) -> CodeStatus:
        """What becomes of a response's program; not counted.

        Raises:
            ToolError: the sandbox does not start any more.
        """
        source = last_program(response)
        if source is None:
            return "no_program"
        for given, wanted in tests.cases:
            status = self._test(source, tests.function, given, wanted)
            if status != "passed":
                return status
        return "passed"

    def _test(self, source: str, function: str | None, given: str, wanted: str) -> CodeStatus:
        arguments = None if function is None else "[" + given.strip().replace("\n", ",") + "]"
        names = {"source": source, "function": function, "arguments": arguments, "mark": _MARK}
        header = "".join(f"_{name} = {value!r}\n" for name, value in names.items())
        try:
            with self._free:
                result = self._sandbox.run(header + _HARNESS, given if function is None else "")
        except CallFailed as failure:
            raise ToolError(f"a program cannot be tested: {failure}") from None
        if result.timed_out:
            return "timeout"
        if result.exit_status != 0:
            return "failed"
        if function is None:
            passed = not result.truncated and same_output(result.stdout, wanted)
        else:
            passed = _same_value(result.stdout.rpartition(_MARK)[2], wanted)
        return "passed" if passed else "failed"


def last_program(response: str) -> str | None:
    """The last complete block between three backticks; None without one.

    A line that ends with them, and perhaps a language, begins a block, and one that begins with
    them ends it. What stands before ``</think>`` does not count.
    """
    text = response.rpartition("</think>")[2]
    begin, found = None, None
    for fence in _FENCE.finditer(text):
        leads = not fence[1].strip()
        if begin is None:
            opens = not fence[2].strip() or _LANGUAGE.fullmatch(fence[2].strip())
        else:  # what names a language begins another one
            opens = leads and _LANGUAGE.fullmatch(fence[2])
        if opens:
            begin = fence.end() + 1
        elif begin is not None and leads:
            begin, found = None, text[begin : fence.start()]
    return found


def same_output(found: str, wanted: str) -> bool:
    r"""Whether a program printed what it had to, as LiveCodeBench compares.

    Line by line, white space around lines and around the whole not counted; lines of numbers are
    the same where these are equal.

    Example: ``same_output("1.50 2 \n", "1.5 2.0")`` is true; there is no tolerance.
    """
    golds = wanted.strip().split("\n")
    lines = found.strip().split("\n", len(golds))  # one too many tells enough of a flood
    return len(lines) == len(golds) and all(map(_same_line, lines, golds))


def _same_line(found: str, wanted: str) -> bool:
    if found.strip() == wanted.strip():
        return True
    golds = _numbers(wanted.split())
    return golds is not None and _numbers(found.split(maxsplit=len(golds))) == golds


def _numbers(words: list[str]) -> list[Decimal] | None:
    try:
        numbers = [Decimal(word) for word in words]
    except InvalidOperation:
        return None
    return numbers if all(number.is_finite() for number in numbers) else None


def _same_value(found: str, wanted: str) -> bool:
    try:
        values = [json.loads(text, parse_int=_whole) for text in (found, wanted)]
        return values[0] == values[1]
    except (ValueError, RecursionError):
        return False


def _whole(digits: str) -> int | Decimal:
    """A whole number; Python reads no longer ones as an int."""
    return int(digits) if len(digits) < 4000 else Decimal(digits)


@lru_cache(maxsize=64)
def _unpacked(packed: str) -> ProgramTests:
    return ProgramTests.unpacked(packed)
