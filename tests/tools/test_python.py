import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.store import CallStore
from graphpo_agent.protocols import Tool
from graphpo_agent.types import ToolResult
from tests.tools.interrupts import status_after_interrupt
from tests.tools.sandboxes import WORKING, is_running, wait_until
from tools.python import PythonTool

ISOLATION = "auto" if WORKING else "none"


@pytest.fixture(scope="module")
def tool():
    return PythonTool(deadline_s=60.0, max_output_characters=1000, isolation=ISOLATION)


def text(tool, code):
    [result] = tool.run([{"code": code}])
    assert result.failure is None and result.findings == ()
    return result.text


def test_it_is_a_tool_and_says_its_limits(tool):
    assert isinstance(tool, Tool)
    assert tool.name == "python" and set(tool.schema["properties"]) == {"code"}
    assert "60 seconds" in tool.description and "1024 MiB" in tool.description


def test_without_isolation_it_is_refused_unless_asked_for():
    if not WORKING:
        with pytest.raises(ToolError, match="no isolation works here"):
            PythonTool()
    assert text(PythonTool(deadline_s=60.0, isolation="none"), "print(1)") == "1\n"


def test_results_come_in_the_order_of_the_calls(tool):
    calls = [{"code": f"import time; time.sleep({0.05 * (5 - n)}); print({n})"} for n in range(5)]
    assert tool.run(calls) == [ToolResult(text=f"{number}\n") for number in range(5)]
    assert tool.run([]) == []


def test_an_exception_is_read_by_the_policy_and_no_failure(tool):
    call = "    ~^^\n" if sys.version_info >= (3, 13) else ""
    assert text(tool, "print('before')\ndef f():\n    1 / 0\nf()") == (
        "before\n"
        "Traceback (most recent call last):\n"
        '  File "program.py", line 4, in <module>\n'
        "    f()\n"
        f"{call}"
        '  File "program.py", line 3, in f\n'
        "    1 / 0\n"
        "    ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )
    assert "SyntaxError" in text(tool, "print(")
    assert text(tool, "print(1, end=''); raise SystemExit('no')") == "1\nno\n"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("x = 1", "[no output: print what you want to see]"),
        ("import warnings; warnings.warn('w')", "[no output: print what you want to see]"),
        ("import sys; print(1); sys.exit(4)", "1\n[exit status 4]"),
        ("import os; os.abort()", "[ended by signal"),
        ("import sys; sys.exit(-1)", "[exit status 255]"),
        ("x = bytearray(2**32)", "MemoryError\n[the limit is 1024 MiB of memory]"),
    ],
)
def test_the_policy_is_told_what_happened(tool, code, shown):
    assert shown in text(tool, code)


def test_a_program_that_takes_too_long_is_told_so():
    short = PythonTool(deadline_s=3.0, isolation=ISOLATION)
    code = "print('begun')\nwhile True: pass"
    assert text(short, code) == "begun\n[stopped: it took longer than 3 seconds]"


def test_endless_output_is_stopped_and_told(tool):
    shown = text(tool, "while True: print('spam')")
    assert shown.startswith("spam\nspam\n") and "characters left out" in shown
    assert shown.endswith("[stopped: it wrote more than 1048576 bytes]")


@pytest.mark.parametrize("printed", [999, 1000, 1001, 5000, 100_000])
@pytest.mark.parametrize("error", ["", "; raise ValueError('y' * 5000)"])
def test_what_is_read_is_never_longer_than_allowed(tool, printed, error):
    shown = text(
        tool, f"print('a' * {printed // 2} + 'b' * {printed - printed // 2}, end=''){error}"
    )
    assert len(shown) <= 1000
    whole = printed <= 1000 and not error
    assert ("left out" in shown) != whole
    assert shown.startswith("a") and "b" in shown
    if not whole:
        assert len(shown) > 900


@pytest.mark.parametrize(
    "call", [{}, {"code": ""}, {"code": " \n"}, {"code": 3}, {"code": None}, {"code": "1", "n": 1}]
)
def test_a_call_without_code_fails_alone(tool, call):
    bad, good = tool.run([call, {"code": "print(1)"}])
    assert bad.failure == "bad_arguments" and "code" in bad.text
    assert good == ToolResult(text="1\n")


def test_a_machine_in_trouble_is_an_outage(tool, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    [result] = tool.run([{"code": "print(1)"}])
    assert result.failure == "transient" and "could not start" in result.text


def test_programs_at_once_are_bounded_over_all_threads(tool):
    code = "import time; a = time.time(); time.sleep(0.3); print(a, time.time())"
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda _: tool.run([{"code": code}] * 2), range(4))
        spans = [tuple(map(float, each.text.split())) for answer in answers for each in answer]
    assert len(spans) == 8
    assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) <= 2


INTERRUPTED = """
import threading, time
from pathlib import Path
from tools.python import PythonTool

tool = PythonTool(concurrency=1, deadline_s=900, isolation={isolation!r})
calls = [{{"code": f"import time; time.sleep(300 + {{number}})"}} for number in range(4)]
threading.Thread(target=tool.run, args=(calls,), daemon=True).start()
while not list(Path({directory!r}).glob("sandbox-*/program.py")):
    time.sleep(0.01)
print("begun", flush=True)
threading.Event().wait()
"""


def test_an_interrupted_process_waits_for_no_program_and_leaves_nothing(tmp_path):
    program = INTERRUPTED.format(isolation=ISOLATION, directory=str(tmp_path))
    assert status_after_interrupt(program, tmp_path) == -signal.SIGINT
    assert wait_until(lambda: not is_running(f"{tmp_path}/sandbox-"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"deadline_s": "10"},
        {"deadline_s": float("inf")},
        {"memory_mib": 1024.5},
        {"memory_mib": 1},
        {"max_output_characters": 10},
        {"concurrency": 0},
        {"concurrency": True},
    ],
)
def test_arguments_out_of_range_are_told_in_one_line(arguments):
    [name] = arguments
    with pytest.raises(ToolError, match=f"python tool: {name} must be a "):
        PythonTool(**arguments)


def test_recorded_programs_repeat_without_a_sandbox(tmp_path):
    path, draw = tmp_path / "calls.sqlite", "import random; print(random.random())"
    recording = PythonTool(deadline_s=60.0, isolation=ISOLATION, store=CallStore(path))
    drawn, late = text(recording, draw), text(recording, "print('x' * 3000)")
    assert text(recording, draw) == drawn
    fresh = PythonTool(deadline_s=60.0, isolation=ISOLATION)
    assert text(fresh, draw) != drawn

    store = CallStore(path, "strict")
    strict = PythonTool(deadline_s=60.0, python="/no/such/python", store=store)
    assert text(strict, draw) == drawn and text(strict, "print('x' * 3000)") == late
    with pytest.raises(ToolError, match="no answer is stored for RUN python"):
        strict.run([{"code": "print(1)"}])
    hasty = PythonTool(deadline_s=2.0, store=store)
    with pytest.raises(ToolError, match="no answer is stored"):  # it might not have ended
        hasty.run([{"code": draw}])


def test_programs_begin_at_a_pace(tmp_path):
    store = CallStore(tmp_path / "calls.sqlite")
    tool = PythonTool(deadline_s=60.0, isolation=ISOLATION, per_second=5, store=store)
    began = time.monotonic()
    tool.run([{"code": f"print({n})"} for n in range(4)])
    assert time.monotonic() - began >= 0.6
    with pytest.raises(ToolError, match="per_second"):
        PythonTool(isolation=ISOLATION, per_second=0)
