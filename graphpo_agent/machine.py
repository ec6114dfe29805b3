"""What a process may use of the machine: less than all of it in a cluster's job or a container.

Linux keeps such limits in control groups. A process is in one of them, or in one for each kind of
limit (version 1), and what all those around it are limited to holds for it as well.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_memory", "limit_threads", "usable_cpus"]

_ROOT = Path("/")


def usable_cpus(root: Path = _ROOT) -> int:
    """How many CPUs this process can keep busy: those it may run on, and the time it is given.

    A container with ``--cpus 4`` may run on all CPUs of the machine, for the time of four.

    Args:
        root: the directory in which ``proc`` and ``sys/fs/cgroup`` lie.
    """
    cpus = _cpus()
    for group, version in _groups("cpu", root):
        names = ("max",) if version == 2 else ("cfs_quota_us", "cfs_period_us")
        try:
            quota, period = " ".join(_text(group / f"cpu.{name}") for name in names).split()
        except OSError:  # of this group no time is said
            continue
        if quota != "max" and int(quota) > 0:
            cpus = min(cpus, math.ceil(int(quota) / int(period)))
    return cpus


def limit_threads(root: Path = _ROOT) -> None:
    """Let libraries of this process, and of those it starts, make no more threads than it has CPUs.

    By themselves they make one for each CPU that they may run on, and those that are given no time
    hold up the others. To be called before they are imported; a user's OMP_NUM_THREADS stays.
    """
    cpus = usable_cpus(root)
    if cpus < _cpus():
        os.environ.setdefault("OMP_NUM_THREADS", str(cpus))


def free_memory(root: Path = _ROOT) -> int:
    """Bytes that this process can still take: of the machine, and of every group it is in.

    Cached files that nobody has read again are free, as the kernel drops them first.

    Args:
        root: the directory in which ``proc`` and ``sys/fs/cgroup`` lie.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = int(_rows(meminfo)["MemAvailable:"]) * 1024
    for group, version in _groups("memory", root):
        names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        cached = "inactive_file" if version == 2 else "total_inactive_file"
        try:
            limit, used = (_text(group / f"memory.{name}") for name in names)
            held = int(used) - int(_rows(group / "memory.stat").get(cached, 0))
        except OSError:  # of this group no memory is said
            continue
        if limit != "max":
            free = min(free, max(0, int(limit) - held))
    return free


def _cpus() -> int:
    """CPUs on which this process may run; all there are on a system that does not say, as a Mac."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(kind: str, root: Path) -> Iterator[tuple[Path, int]]:
    """The control groups around this process that may limit this kind of thing; their version.

    A container may see its own group as the outermost one and be told its path on the machine:
    such a group is not there.
    """
    own = root / "proc/self/cgroup"
    for line in _text(own).splitlines() if own.exists() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and kind not in kinds.split(","):
            continue
        top = root / "sys/fs/cgroup" / (kind if kinds else "")
        inner = top / path.lstrip("/")
        for group in (inner, *inner.parents[: len(inner.parts) - len(top.parts)]):
            yield group, 1 if kinds else 2


def _rows(path: Path) -> dict[str, str]:
    """The second word of each line by its first."""
    return dict(line.split()[:2] for line in _text(path).splitlines())


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()
