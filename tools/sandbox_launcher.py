"""The first program inside the sandbox: gives up every right, then becomes the program to run.

Started as ``python -I -S sandbox_launcher.py SPEC STATUS``, two open file descriptors: the order
as one JSON object (``tools.sandbox`` writes it) and a pipe, which receives ``ok`` just before the
program starts, else why it does not. Standard library only: it runs without any package.
"""

import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOBODY = 65534

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_SECCOMP_MODE_FILTER, _LAST_CAPABILITY, _SIGKILL = 2, 63, 9
_CLONE_NEWUSER = 0x10000000
# mount, cgroup, UTS, IPC, PID and network
_CLONE_NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x20000000 | 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK = 442, 444  # numbers shared by x86_64 and aarch64
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_READ_FILES = 1 | 4 | 8  # Landlock: execute, read file, read directory
_USE_DEVICE = 2 | 4


def main() -> None:
    """Carry out the order; never returns."""
    spec_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status_fd, False)
    with os.fdopen(spec_fd) as file:
        spec = json.load(file)
    try:
        _confine(spec)
        os.write(status_fd, b"ok")
        command = [spec["python"], "-I", "-u", "-X", "utf8", spec["program"]]
        os.execve(spec["python"], command, spec["environment"])
    except OSError as error:
        os.write(status_fd, str(error).encode())
        os._exit(1)


def _confine(spec: dict[str, Any]) -> None:
    """Everything between here and the program, in the one order that works."""
    _die_with_parent()
    isolation = spec["isolation"]
    if isolation == "namespaces":
        _enter_namespaces(spec)
    os.chdir(spec["directory"])
    for name, value in spec["limits"].items():
        _limit(getattr(resource, name), value)
    if isolation == "none":
        return
    _drop_privileges(becomes_nobody=isolation != "landlock")
    if isolation == "landlock":
        _restrict_files(spec)
    _filter_system_calls(bytes.fromhex(spec["filter"]))


def _limit(number: int, value: int) -> None:
    """No more than ``value``, nor than was allowed before."""
    _, most = resource.getrlimit(number)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    # Seconds between SIGXCPU, which says why, and SIGKILL.
    hard = value + 1 if number == resource.RLIMIT_CPU and value != most else value
    resource.setrlimit(number, (value, hard))


def _call(name: str, *arguments: Any) -> int:
    """A function of the C library, its failure an OSError with the function's name."""
    result = getattr(_LIBC, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _die_with_parent() -> None:
    _call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def _enter_namespaces(spec: dict[str, Any]) -> None:
    """New namespaces, whose first process waits for the program: its end is everybody's end.

    Root needs no user namespace; anybody else is "nobody" in one of their own.
    """
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _call("unshare", _CLONE_NAMESPACES)
    else:
        _call("unshare", _CLONE_NAMESPACES | _CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_NOBODY} {uid} 1")
        _write("/proc/self/gid_map", f"{_NOBODY} {gid} 1")
    _wait_for_fork()
    _die_with_parent()
    _build_root(spec)
    _wait_for_fork()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _wait_for_fork() -> None:
    """Go on as a child; the parent waits and ends as the child does (128 + n for signal n)."""
    child = os.fork()
    if child:
        ended, status = os.wait()
        while ended != child:  # an orphan of the program's
            ended, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)


def _build_root(spec: dict[str, Any]) -> None:
    """A root directory with nothing but the mounts, devices and links of the order."""
    root = spec["root"]
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _mount_memory(root, "mode=755")
    os.mkdir(root + spec["directory"])
    _mount_memory(root + spec["directory"], f"mode=1777,size={spec['directory_bytes']}")
    for source, target in spec["read_only"]:
        _bind(source, root + target, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV)
    for device in spec["devices"]:
        _bind(device, root + device, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    for link, target in spec["links"]:
        os.symlink(target, root + link)
    os.chdir(root)
    _call("syscall", _SYS_PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    _set_mount("/", _MOUNT_ATTR_RDONLY, 0)


def _mount_memory(target: str, options: str) -> None:
    flags = _MS_NOSUID | _MS_NODEV
    _call("mount", b"tmpfs", target.encode(), b"tmpfs", flags, options.encode())


def _bind(source: str, target: str, attributes: int) -> None:
    """Show ``source`` at ``target``, with all that is mounted below it."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _call("mount", source.encode(), target.encode(), None, _MS_BIND | _MS_REC, None)
    _set_mount(target, attributes, _AT_RECURSIVE)


def _set_mount(target: str, attributes: int, flags: int) -> None:
    path, change, size = target.encode(), struct.pack("=QQQQ", attributes, 0, 0, 0), 32
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, change, ctypes.c_size_t(size))


def _drop_privileges(becomes_nobody: bool) -> None:
    """No capability, now or through any file; root turns into "nobody" where it may."""
    if os.getuid() == 0:
        for capability in range(_LAST_CAPABILITY + 1):
            _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # the kernel may know fewer
        if becomes_nobody:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    _call("capset", header, nothing)
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _die_with_parent()  # a change of user forgets it


def _restrict_files(spec: dict[str, Any]) -> None:
    """Landlock: the order's files can be read and its directory written, no other opened."""
    version = _call("syscall", _SYS_LANDLOCK, None, ctypes.c_size_t(0), 1)
    handled = (1 << 13) - 1
    for bit, since in ((13, 2), (14, 3), (15, 5)):  # refer, truncate, device ioctl
        handled |= (version >= since) << bit
    rights = struct.pack("=Q", handled)
    ruleset = _call("syscall", _SYS_LANDLOCK, rights, ctypes.c_size_t(8), 0)
    readable = [source for source, _ in spec["read_only"]]
    _allow(ruleset, readable, _READ_FILES)
    _allow(ruleset, spec["devices"], _USE_DEVICE)
    _allow(ruleset, [spec["directory"]], handled)
    _call("syscall", _SYS_LANDLOCK + 2, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, paths: list[str], rights: int) -> None:
    for path in paths:
        place = os.open(path, os.O_PATH)
        usable = rights if os.path.isdir(path) else rights & ~8
        rule = struct.pack("=Qi", usable, place)
        _call("syscall", _SYS_LANDLOCK + 1, ruleset, 1, rule, 0)
        os.close(place)


def _filter_system_calls(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0)


if __name__ == "__main__":
    main()
