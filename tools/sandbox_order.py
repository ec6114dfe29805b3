"""What the sandbox's launcher has to do, for each isolation, and how it is started."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphpo_agent.errors import ToolError, first_line

__all__ = [
    "Interpreter",
    "Isolation",
    "Limits",
    "find_interpreter",
    "launch_command",
    "launch_order",
]

Isolation = Literal["bubblewrap", "namespaces", "landlock", "none"]
"""What keeps a program in; ``tools.sandbox`` has the table."""


_LAUNCHER = Path(__file__).with_name("sandbox_launcher.py")
_FILE_BYTES = 2**26  # one file, and all of a directory in memory
_THREADS = 256  # of all sandboxed programs of one user together
_OPEN_FILES = 64
_STACK_BYTES = 2**23
_DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
_SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one program may use.

    Example: ``Limits(deadline_s=10.0, memory_bytes=2**30)``
    """

    deadline_s: float = 10.0
    """Wall-clock seconds from start to end, the start of the interpreter (some 0.1) included;
    also, rounded down and plus one, the CPU seconds of all threads together."""
    memory_bytes: int = 2**30
    """Address space; an interpreter with numpy maps some 150 MiB."""
    output_bytes: int = 2**20
    """Standard output, and as much standard error."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python and all that a program in it may see of this machine's files.

    Example: ``Interpreter("/opt/env/bin/python", ("/bin", "/etc/ld.so.cache", "/lib", "/lib64",
    "/opt/env", "/sbin", "/usr"))``
    """

    path: str
    visible: tuple[str, ...]
    """Files, directories and links to such; none is below another."""


def launch_order(
    isolation: Isolation, place: Path, interpreter: Interpreter, limits: Limits, code: bytes
) -> dict[str, Any]:
    """What the launcher has to do, as the JSON object that it reads.

    Args:
        isolation: what keeps the program in.
        place: a directory with the program, ``program.py``, and two empty directories: ``root``,
            to build a root directory upon, and ``directory``, to run in where that is not built.
        interpreter: runs the program.
        limits: of the program.
        code: the system-call filter.
    """
    own_root = isolation in ("bubblewrap", "namespaces")
    program = str(place / "program.py")
    directory = _scratch(interpreter.visible) if own_root else str(place / "directory")
    resources = {
        "RLIMIT_CPU": int(limits.deadline_s) + 1,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": _FILE_BYTES,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_STACK": _STACK_BYTES,
        "RLIMIT_CORE": 0,
    }
    if own_root:  # elsewhere the user's other processes would count
        resources["RLIMIT_NPROC"] = _THREADS
    links = [path for path in interpreter.visible if os.path.islink(path)]
    paths = [path for path in interpreter.visible if path not in links]
    return {
        "isolation": isolation,
        "python": interpreter.path,
        "program": "/program.py" if own_root else program,
        "root": str(place / "root"),
        "directory": directory,
        "directory_bytes": _FILE_BYTES,
        "read_only": [*zip(paths, paths, strict=True), (program, "/program.py")],
        "links": [(path, os.readlink(path)) for path in links],
        "devices": _DEVICES,
        "limits": resources,
        "environment": _environment(directory),
        "filter": code.hex(),
    }


def launch_command(order: Mapping[str, Any], spec: int, status: int) -> list[str]:
    """What starts the launcher; bubblewrap is around it, the others are its own doing.

    Args:
        order: from ``launch_order``.
        spec: the file descriptor it is read from.
        status: the file descriptor that tells how far the launcher got.
    """
    start, arguments = [order["python"], "-I", "-S", "-B"], [str(spec), str(status)]
    if order["isolation"] == "bubblewrap":
        return [*_bubblewrap(order), *start, "/launcher.py", *arguments]
    return [*start, str(_LAUNCHER), *arguments]


def find_interpreter(python: str) -> Interpreter:
    """Ask an interpreter where its parts are.

    Raises:
        ToolError: it does not run.
    """
    ask = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix]))"
    try:
        asked = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, check=True, timeout=60, env={}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolError(f"sandbox: python {python!r} does not run: {first_line(error)}") from error
    executable, prefix, base_prefix = json.loads(asked.stdout)
    if executable.startswith(f"{prefix}/"):  # the environment may be reached through a link
        executable = os.path.realpath(prefix) + executable.removeprefix(prefix)
    prefix = os.path.realpath(prefix)
    real = str(Path(executable).resolve().parent.parent)
    found = {path for path in (*_SYSTEM, prefix, base_prefix, real) if os.path.exists(path)}
    visible = sorted(path for path in found if not _is_below(path, found))
    return Interpreter(executable, tuple(visible))


def _is_below(path: str, others: set[str]) -> bool:
    return any(path.startswith(f"{other}/") for other in others)


def _scratch(visible: Sequence[str]) -> str:
    """The directory of a program in a root of its own, where nothing else is shown."""
    return "/scratch" if any(path.startswith("/tmp/") for path in visible) else "/tmp"


def _environment(directory: str) -> dict[str, str]:
    """One thread per numeric library: each would map its buffers for every core."""
    return {
        "HOME": directory,
        "TMPDIR": directory,
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _bubblewrap(order: Mapping[str, Any]) -> list[str]:
    """The order's files as a bubblewrap command line, without what it starts.

    Root keeps the right to become "nobody", which the launcher uses and loses.
    """
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--cap-drop", "ALL"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if os.getuid() == 0:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    size = str(order["directory_bytes"])
    command += ["--perms", "1777", "--size", size, "--tmpfs", order["directory"]]
    files = [*order["read_only"], (str(_LAUNCHER), "/launcher.py")]
    # bubblewrap would make missing parents for root alone.
    targets = [*(target for _, target in files), *order["devices"]]
    for parent in sorted({str(each) for target in targets for each in Path(target).parents}):
        command += ["--perms", "0755", "--dir", parent]
    for source, target in files:
        command += ["--ro-bind", source, target]
    for device in order["devices"]:
        command += ["--dev-bind", device, device]
    for link, target in order["links"]:
        command += ["--symlink", target, link]
    return [*command, "--remount-ro", "/", "--"]
