"""How much memory is left: on a GPU, in the machine, in the job or container of a process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["free_memory"]


class _Files(NamedTuple):
    """What a control group calls its limit, what it uses, and the cached files in that."""

    limit: str
    used: str
    cached: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that are free on a GPU or, for a CPU, to this process.

    That is the least that the machine, and any control group which this process is in or below,
    has left: the job of a cluster, a container, a service. Cached files that nobody has read
    again are free, as the kernel drops them first.

    Args:
        device: where the model computes.
        root: the directory in which ``proc`` and ``sys/fs/cgroup`` lie.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rows = dict(line.split(":", 1) for line in _text(meminfo).splitlines())
    machine = int(rows["MemAvailable"].split()[0]) * 1024
    return min([machine, *_free_in_groups(root)])


def _free_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process has left, where it has a limit."""
    for group, files in _groups(root):
        try:
            limit, used = _text(group / files.limit).strip(), int(_text(group / files.used))
            rows = dict(line.split() for line in _text(group / "memory.stat").splitlines())
        except OSError:  # this controller does not limit memory, or not here
            continue
        if limit != "max":
            yield max(0, int(limit) - used + int(rows.get(files.cached, 0)))


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The control groups of this process and all that these lie in, of version 1 and of version 2.

    A container may see its own group as the outermost one and still be told its whole path: what
    is not there is passed over by the caller.
    """
    own = root / "proc/self/cgroup"
    for line in _text(own).splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / path.lstrip("/")
        files = _V1 if controllers else _V2
        yield group, files
        while group != top:
            group = group.parent
            yield group, files


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii")
