"""What programs in the sandbox try and must not be able to do."""

import os
import socket
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

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


def run_attack(sandbox, setup: str, attempts: str):
    result = sandbox.run(f"{setup}\n{ATTACK}\nattack({{{attempts}}})")
    assert (result.stdout, result.stderr) == ("held\n", "")


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
