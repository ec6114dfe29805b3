"""What this machine can isolate with, asked without the sandbox: the sandbox must know how."""

import ctypes
import os
import shutil
import subprocess

from tests.tools.sandboxes import WORKING

LANDLOCK_CREATE_RULESET = 444  # on x86_64 and aarch64


def runs(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def has_landlock() -> bool:
    libc = ctypes.CDLL(None)
    return libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1) > 0


def test_every_isolation_that_this_machine_knows_works():
    spaces = [f"--unshare-{space}" for space in ("pid", "net", "ipc", "uts")]
    flags = "-fmpniuC" if os.getuid() == 0 else "-rfmpniuC"
    possible = {
        "bubblewrap": runs("bwrap", "--ro-bind", "/", "/", *spaces, "true"),
        "namespaces": runs("unshare", flags, "mount", "-t", "tmpfs", "none", "/tmp"),
        "landlock": has_landlock(),
    }
    assert [name for name, works in possible.items() if works and name not in WORKING] == []
