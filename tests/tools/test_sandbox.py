import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.failures import CallFailed
from tests.tools.sandboxes import LIMITS, WORKING
from tools.sandbox import Sandbox


def test_auto_takes_the_first_isolation_that_works_or_refuses():
    if WORKING:
        assert Sandbox(limits=LIMITS).isolation == WORKING[0]
    else:
        with pytest.raises(ToolError, match="no isolation works here"):
            Sandbox(limits=LIMITS)


def test_a_program_reads_stdin_and_writes_both_outputs(any_sandbox):
    source = "import sys; print(sys.stdin.read()[::-1]); print('é', file=sys.stderr); sys.exit(3)"
    result = any_sandbox.run(source, stdin="Käse")
    assert (result.stdout, result.stderr, result.exit_status) == ("esäK\n", "é\n", 3)
    assert not (result.timed_out or result.memory_exceeded or result.truncated)


def test_the_environment_and_the_directory_are_empty_and_private(any_sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "swordfish")
    source = """
import os, sys
print(dict(os.environ), sys.argv, os.listdir())
open("left-behind", "w").write("x")
"""
    first, second = any_sandbox.run(source), any_sandbox.run(source)
    assert "swordfish" not in first.stdout and "HOME" in first.stdout
    assert first.stdout.endswith("[]\n") and second.stdout.endswith("[]\n")


def test_what_programs_need_works(sandbox):
    source = """
import asyncio, concurrent.futures, os, random, sqlite3, tempfile, threading, time
async def wait():
    await asyncio.sleep(0.01)
    return 1
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(abs, range(5))), asyncio.run(wait()))
with tempfile.TemporaryDirectory() as place:
    with open(place + "/x", "w") as file:
        file.write("x")
    os.rename(place + "/x", place + "/y")
    print(os.listdir(place))
print(sqlite3.connect("a.db").execute("select 1 + 1").fetchall(), random.SystemRandom().random())
open("/dev/null", "w").write(open("/dev/urandom", "rb").read(3).hex())
try:
    raise KeyError
except KeyError:
    print("caught")
"""
    result = sandbox.run(source)
    assert result.stderr == ""
    assert result.stdout.startswith("10 1\n['y']\n[(2,)] 0.")
    assert result.stdout.endswith("\ncaught\n")


def test_installed_packages_can_be_imported(any_sandbox):
    source = """
import numpy as np
print(np.linalg.solve(np.eye(200) * 2, np.ones(200)).sum(), np.random.default_rng(0).integers(1))
"""
    result = any_sandbox.run(source)
    assert (result.stdout, result.stderr) == ("100.0 0\n", "")


@pytest.mark.parametrize("name", WORKING)
def test_an_interpreter_below_the_directory_for_temporary_files(name, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    purelib = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    asked = subprocess.run([python, "-c", purelib], capture_output=True, text=True, check=True)
    Path(asked.stdout.strip(), "only_there.py").write_text("ANSWER = 42")
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(tmp_path / "env")
    for one in (python, link / "bin" / "python"):
        source = "import only_there, os; print(only_there.ANSWER, os.listdir())"
        assert Sandbox(name, str(one), LIMITS).run(source).stdout == "42 []\n"
    assert "No module" in Sandbox(name, limits=LIMITS).run("import only_there").stderr


def test_bytes_that_are_no_text_are_replaced(any_sandbox):
    result = any_sandbox.run("import os; os.write(1, bytes(range(256)))")
    assert result.stdout == bytes(range(256)).decode(errors="replace")


def test_eight_programs_at_once_do_not_meet(any_sandbox):
    source = """
import os, time
number = input()
open("mine", "w").write(number)
time.sleep(0.1)
print(os.listdir(), open("mine").read())
"""
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: any_sandbox.run(source, stdin=f"{n}\n"), range(8)))
    assert [each.stdout for each in results] == [f"['mine'] {number}\n" for number in range(8)]


def test_nothing_stays_on_disk_however_deep(any_sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = "import os\nfor _ in range(1200): os.mkdir('d'); os.chdir('d')\nprint('made')"
    assert any_sandbox.run(source).stdout == "made\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("source", ["1 +", "x = '\ud800'", "x = 'a\0b'"])
def test_a_source_that_is_no_program_is_told_so(any_sandbox, source):
    result = any_sandbox.run(source)
    assert result.exit_status == 1 and "SyntaxError" in result.stderr
    assert "program.py" in result.stderr and "/program.py" not in result.stderr


def test_a_warning_names_the_programs_own_file_only(any_sandbox):
    source = "import sys\nprint(1 is 1, 'a/program.py', file=sys.stderr)"
    result = any_sandbox.run(source)
    assert result.stderr.startswith("program.py:2: SyntaxWarning")
    assert "a/program.py" in result.stderr


def test_no_room_for_the_program_is_an_outage(any_sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(CallFailed, match="could not start") as failure:
        any_sandbox.run("print(1)")
    assert failure.value.kind == "transient"


def test_an_interpreter_that_vanished_is_an_outage_not_the_programs_doing(tmp_path):
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    sandbox = Sandbox("none", str(python), LIMITS)
    python.unlink()
    with pytest.raises(CallFailed, match="could not start"):
        sandbox.run("print(1)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"isolation": "docker"}, "isolation must be one of auto, bubblewrap, .* found 'docker'"),
        ({"python": "/nowhere/python"}, "'/nowhere/python' does not run: No such"),
        ({"python": "/bin/false"}, "python '/bin/false' does not run"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message):
    with pytest.raises(ToolError, match=message) as error:
        Sandbox(**arguments)
    assert "\n" not in str(error.value)


def test_a_machine_that_can_isolate_nothing_is_refused():
    # A container without rights, made by a system-call filter on a child: no namespaces, no
    # Landlock. Numbers: unshare, clone, mount, clone3.
    program = textwrap.dedent("""
        import ctypes, json, platform, struct, sys
        unshare, clone, mount = {"x86_64": (272, 56, 165), "aarch64": (97, 220, 40)}[
            platform.machine()
        ]
        load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
        code = [(load, 0, 0, 0)]
        for number, error in ((unshare, 1), (mount, 1), (444, 38), (435, 38)):
            code += [(equal, 0, 1, number), (give, 0, 0, 0x50000 | error)]
        code += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, 0x7E020000)]
        code += [(give, 0, 0, 0x50001), (give, 0, 0, 0x7FFF0000)]
        bytecode = b"".join(struct.pack("=HBBI", *each) for each in code)
        buffer = ctypes.create_string_buffer(bytecode, len(bytecode))
        filter = struct.pack("@HP", len(code), ctypes.addressof(buffer))
        libc = ctypes.CDLL(None)
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
        from graphpo_agent.errors import ToolError
        from tools.sandbox import Sandbox
        try:
            Sandbox()
        except ToolError as error:
            print(json.dumps([str(error), Sandbox("none").run("print(1)").stdout]))
        """)
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert asked.stdout, asked.stderr
    message, unprotected = json.loads(asked.stdout)
    assert message.startswith("sandbox: no isolation works here (bubblewrap: ")
    assert "apt-get install bubblewrap" in message and "\n" not in message
    assert unprotected == "1\n"
