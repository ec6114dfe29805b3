import json
import os
import socket
import subprocess
import sys
import textwrap
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.failures import CallFailed
from tests.tools.sandboxes import LIMITS, WORKING, is_running, wait_until
from tools.sandbox import Sandbox

# Prints "held" unless one of ATTEMPTS (a dict of functions) does not raise an OSError.
ATTACK = """
def attack(attempts):
    for name, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        print(name, "was possible")
    print("held")
"""
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


@pytest.fixture(scope="module", params=WORKING)
def sandbox(request):
    return Sandbox(request.param, limits=LIMITS)


@pytest.fixture(scope="module", params=[*WORKING, "none"])
def any_sandbox(request):
    return Sandbox(request.param, limits=LIMITS)


def run_attack(sandbox, setup: str, attempts: str):
    result = sandbox.run(f"{setup}\n{ATTACK}\nattack({{{attempts}}})")
    assert (result.stdout, result.stderr) == ("held\n", "")


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


def test_no_process_shows_its_environment(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "swordfish")
    attempts = ", ".join(
        f"{path!r}: lambda: open({path!r}).read()"
        for path in ("/proc/self/environ", "/proc/1/environ", f"/proc/{os.getpid()}/environ")
    )
    run_attack(sandbox, "", attempts)


def test_there_is_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run_attack(
            sandbox,
            "import socket, urllib.request",
            f"""
            "tcp": lambda: socket.create_connection(("127.0.0.1", {port}), timeout=5),
            "http": lambda: urllib.request.urlopen("http://127.0.0.1:{port}", timeout=5),
            "udp": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53)),
            "unix": lambda: socket.socket(socket.AF_UNIX),
            "raw": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
            "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
            "names": lambda: socket.gethostbyname("example.com"),
            """,
        )
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("kind", ["SOCK_DGRAM", "SOCK_STREAM", "SOCK_SEQPACKET"])
def test_a_pair_of_sockets_sends_to_no_other_socket(sandbox, tmp_path, kind):
    source = f"""
import socket
for name in NAMES:
    try:
        own, other = socket.socketpair(type=socket.{kind})
        own.sendto(b"out", name)
    except OSError:
        pass
if "{kind}" != "SOCK_DGRAM":
    own, other = socket.socketpair(type=socket.{kind})
    own.send(b"in")
    print(other.recv(9))
"""
    with ExitStack() as stack:
        names, logs = [str(tmp_path / "log"), f"\0{uuid.uuid4().hex}"], []
        for name in names:
            logs.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)))
            logs[-1].bind(name)
            logs[-1].settimeout(0)
        result = sandbox.run(source.replace("NAMES", repr(names)))
        assert result.exit_status == 0, result.stderr
        assert result.stdout == ("" if kind == "SOCK_DGRAM" else "b'in'\n")
        for log in logs:
            with pytest.raises(BlockingIOError):
                log.recv(9)


def test_files_outside_cannot_be_read(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    paths = ["/etc/shadow", "/etc/passwd", __file__, str(secret), f"/proc/1/root{secret}"]
    attempts = [f"{path!r}: lambda: open({path!r}).read()" for path in paths]
    attempts += [
        f"'home': lambda: os.listdir({str(Path.home() / '.ssh')!r})",
        f"'directory': lambda: os.listdir({str(tmp_path)!r})",
        f"'link': lambda: (os.symlink({str(secret)!r}, 'link'), open('link').read())",
    ]
    run_attack(sandbox, "import os", ", ".join(attempts))


def test_nothing_outside_can_be_changed(sandbox, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    kept.chmod(0o640)
    before = kept.stat()
    run_attack(
        sandbox,
        f"import os, shutil, sys, json; kept = {str(kept)!r}",
        """
        "new": lambda: open(kept + ".new", "w"),
        "write": lambda: open(kept, "a"),
        "truncate": lambda: os.truncate(kept, 0),
        "delete": lambda: os.remove(kept),
        "rename": lambda: os.rename(kept, "stolen"),
        "link": lambda: os.link(kept, "linked"),
        "mode": lambda: os.chmod(kept, 0o777),
        "owner": lambda: os.chown(kept, 1, 1),
        "times": lambda: os.utime(kept, (0, 0)),
        "attribute": lambda: os.setxattr(kept, "user.x", b"x"),
        "library": lambda: open(json.__file__, "a"),
        "library mode": lambda: os.chmod(json.__file__, 0o777),
        "packages": lambda: os.mkdir(sys.prefix + "/made"),
        "usr": lambda: open("/usr/made", "w"),
        "root": lambda: open("/made", "w"),
        "sysctl": lambda: open("/proc/sys/kernel/core_pattern", "a"),
        "memory": lambda: open("/dev/shm/made", "w"),
        "device": lambda: os.mknod("device", 0o20666, os.makedev(1, 1)),
        """,
    )
    after = kept.stat()
    assert os.listdir(tmp_path) == ["kept"] and kept.read_text() == "kept"
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)


def test_there_are_no_child_processes_and_so_no_fork_bomb(sandbox):
    run_attack(
        sandbox,
        """
import multiprocessing, os, subprocess, sys
def bomb():
    while True:
        os.fork()
""",
        """
        "bomb": bomb,
        "subprocess": lambda: subprocess.run([sys.executable, "-c", ""]),
        "spawn": lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}),
        "multiprocessing": lambda: multiprocessing.Process(target=print).start(),
        """,
    )


def test_signals_reach_nobody(sandbox):
    run_attack(
        sandbox,
        """
import fcntl, os, resource, socket, time
own, other = socket.socketpair()
def by_file():
    fcntl.fcntl(own, fcntl.F_SETSIG, 9)
def by_owner():
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getppid())
""",
        f"""
        "parent": lambda: os.kill(os.getppid(), 9),
        "first": lambda: os.kill(1, 9),
        "all": lambda: os.kill(-1, 9),
        "group": lambda: os.killpg(0, 9),
        "trainer": lambda: os.kill({os.getpid()}, 9),
        "signal of a file": by_file,
        "owner of a file": by_owner,
        "limits": lambda: resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (1, 1)),
        "priority": lambda: os.setpriority(os.PRIO_USER, 0, 19),
        """,
    )


def test_the_kernel_offers_nothing_else(sandbox):
    # One number on x86_64 and aarch64: io_uring_setup, pidfd_send_signal, pidfd_open, clone3,
    # pidfd_getfd, open_tree, fsopen, mount_setattr, landlock_create_ruleset, memfd_secret.
    source = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print([libc.syscall(n, 0, 0, 0, 0) for n in (425, 424, 434, 435, 438, 428, 430, 442, 444, 447)])
print([libc.unshare(0x10000000), libc.setns(0, 0), libc.mount(b"x", b"/", b"tmpfs", 0, None)])
print([libc.ptrace(0, 0, 0, 0), libc.chroot(b"."), libc.setuid(0), libc.memfd_create(b"x", 0)])
print([libc.prctl(1, 0, 0, 0, 0), libc.shmget(0, 4096, 0o1600), libc.personality(0)])
"""
    result = sandbox.run(source)
    assert result.stdout == f"{[-1] * 10}\n{[-1] * 3}\n{[-1] * 4}\n{[-1] * 3}\n"


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


def test_bytes_that_are_no_text_are_replaced(any_sandbox):
    result = any_sandbox.run("import os; os.write(1, bytes(range(256)))")
    assert result.stdout == bytes(range(256)).decode(errors="replace")


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
    assert any_sandbox.run(crash).exit_status == 128 + 11  # SIGSEGV


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
