"""What a program may take and how long it may last."""

import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.tools.sandboxes import LIMITS, WORKING, is_running, wait_until
from tools.sandbox import Sandbox

# Nothing of it is left when the sandbox returns; {marker} is in the command line of each process.
MARKED = """
import os, sys
try:
    if os.fork() == 0:
        os.setsid()
        os.fork()
except OSError:
    pass
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{marker}"])
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_ends_the_program(any_sandbox, stream):
    result = any_sandbox.run(f"import sys\nwhile True: sys.{stream}.write('spam' * 1000)")
    assert result.truncated and result.exit_status is None and not result.timed_out
    assert getattr(result, stream) == "spam" * (LIMITS.output_bytes // 4)


@pytest.mark.parametrize("size", [LIMITS.output_bytes, LIMITS.output_bytes + 1])
def test_output_up_to_the_limit_is_whole(any_sandbox, size):
    result = any_sandbox.run(f"import os; os.write(1, b'x' * {size})")
    assert result.stdout == "x" * LIMITS.output_bytes
    assert result.truncated == (size > LIMITS.output_bytes)


@pytest.mark.parametrize(
    "source",
    [
        "x = bytearray(3 * 2**30)",
        "x = []\nwhile True: x.append(bytearray(2**28))",
        "x = {}\nwhile True: x[len(x)] = str(len(x)) * 10**5",
        "import numpy as np; np.ones(3 * 2**30, dtype=np.uint8)",
    ],
)
def test_memory_is_limited(any_sandbox, source):
    result = any_sandbox.run(source)
    assert result.memory_exceeded and result.exit_status == 1
    assert "MemoryError" in result.stderr


def test_an_honest_failure_is_no_memory_error(any_sandbox):
    result = any_sandbox.run("print('MemoryError')\n1 / 0")
    assert not result.memory_exceeded and result.exit_status == 1
    assert result.stderr.splitlines()[1] == '  File "program.py", line 2, in <module>'


def test_limits_that_are_already_tighter_are_kept():
    # In a process of its own: a hard limit cannot be raised again.
    program = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
    program += "from tools.sandbox import Sandbox\nresult = Sandbox('none').run('"
    program += "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))')\n"
    program += "print(result.stdout)"
    command = [sys.executable, "-c", program]
    if os.getuid() == 0:  # root may raise its limits unless it lacks the capability
        command = ["setpriv", "--bounding-set=-all", *command]
    asked = subprocess.run(command, capture_output=True, text=True)
    assert asked.stdout.strip() == "(40, 40)", asked.stderr


def test_endless_recursion_ends(any_sandbox):
    result = any_sandbox.run("def f(): f()\nf()")
    assert "RecursionError" in result.stderr and result.exit_status == 1
    crash = """
import sys
sys.setrecursionlimit(10**9)
nested = []
for _ in range(2 * 10**5): nested = [nested]
repr(nested)
"""
    status = 1 if sys.version_info >= (3, 12) else 128 + 11  # an error, or SIGSEGV
    assert any_sandbox.run(crash).exit_status == status


def test_a_crash_of_the_interpreter_is_its_signal(any_sandbox):
    assert any_sandbox.run("import ctypes; ctypes.string_at(0)").exit_status == 128 + 11


def test_files_are_limited(sandbox):
    result = sandbox.run("open('big', 'wb').write(bytes(2**27))")
    assert "OSError" in result.stderr or result.exit_status == 128 + 25  # SIGXFSZ


@pytest.mark.parametrize("name", [each for each in WORKING if each != "landlock"])
def test_all_files_together_and_all_threads_together_are_limited(name):
    source = """
import threading
try:
    for number in range(9):
        open(str(number), "wb").write(bytes(2**24))
except OSError as error:
    print(error.strerror)
threading.stack_size(2**15)
stop = threading.Event()
try:
    for started in range(2000):
        threading.Thread(target=stop.wait, daemon=True).start()
except RuntimeError:
    print(started < 256)
stop.set()
"""
    result = Sandbox(name, limits=LIMITS).run(source)
    assert result.stdout == "No space left on device\nTrue\n"


def test_nothing_is_left_of_a_program_that_outstays_its_deadline(any_sandbox):
    marker = uuid.uuid4().hex
    short = Sandbox(any_sandbox.isolation, limits=replace(LIMITS, deadline_s=3.0))
    source = "import os\nos.fork = os.setsid\n" if short.isolation == "none" else ""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(short.run, "print('begun')\n" + source + MARKED.format(marker=marker))
        assert wait_until(lambda: is_running(marker))
        result = running.result()
    assert result.timed_out and result.exit_status is None and result.stdout == "begun\n"
    assert wait_until(lambda: not is_running(marker))


def test_busy_threads_end_at_the_deadline_or_their_cpu_time(any_sandbox):
    short = Sandbox(any_sandbox.isolation, limits=replace(LIMITS, deadline_s=1.5))
    source = """
import hashlib, threading
def burn():
    while True: hashlib.sha256(bytes(10**6)).digest()
for _ in range(4): threading.Thread(target=burn).start()
"""
    assert short.run(source).timed_out


@pytest.mark.parametrize("name", WORKING)
def test_a_program_does_not_outlive_the_trainer(name, tmp_path):
    marker = uuid.uuid4().hex
    trainer = f"from tools.sandbox import Sandbox; Sandbox({name!r}).run({MARKED!r}.format("
    trainer += "marker=input()))"
    command, environment = [sys.executable, "-c", trainer], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        process.stdin.write(marker.encode() + b"\n")
        process.stdin.flush()
        assert wait_until(lambda: is_running(marker))
        process.kill()
    assert wait_until(lambda: not is_running(marker))
