"""Memory that is left: of this machine, and of the control groups that a process is in."""

from pathlib import Path

import pytest
import torch

from graphpo_agent.engines.local.free_memory import free_memory

CPU = torch.device("cpu")
MIB = 2**20


def test_free_memory_of_this_machine_is_plausible():
    assert 2**24 < free_memory(CPU) < 2**50


def machine(root: Path, *memberships: str) -> Path:
    """A machine with 64 MiB left, whose kernel says these lines of a process's control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   65536 kB\n")
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in memberships))
    return root


def group(directory: Path, limit: str, used: int, cached: int) -> None:
    """A control group of version 2."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 7\n")


def old_group(directory: Path, limit: int, used: int, cached: int) -> None:
    """A control group of version 1; its own cached files and those of the groups in it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached}\n")


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [
        (f"{3 * MIB}", MIB, 0, 2 * MIB),
        (f"{3 * MIB}", 3 * MIB, MIB, MIB),  # files that were read once are given up first
        (f"{MIB}", 2 * MIB, 0, 0),
        ("max", 5, 0, 64 * MIB),
        (f"{900 * MIB}", 5, 0, 64 * MIB),  # more than the machine has
    ],
)
def test_a_containers_limit_is_respected(tmp_path, limit, used, cached, free):
    machine(tmp_path, "0::/")
    group(tmp_path / "sys/fs/cgroup", limit, used, cached)
    assert free_memory(CPU, tmp_path) == free


def test_the_limit_of_a_clusters_job_lies_deep_and_above_its_steps(tmp_path):
    machine(tmp_path, "0::/system.slice/job_7/step_0/task_1")
    top = tmp_path / "sys/fs/cgroup"
    top.mkdir(parents=True)  # the machine's own group says nothing of memory
    group(top / "system.slice", "max", 60 * MIB, 0)
    group(top / "system.slice/job_7", f"{40 * MIB}", 9 * MIB, MIB)
    group(top / "system.slice/job_7/step_0", "max", 8 * MIB, 0)
    group(top / "system.slice/job_7/step_0/task_1", "max", 8 * MIB, 0)
    group(top / "system.slice/job_8", f"{MIB}", MIB, 0)  # somebody else's
    assert free_memory(CPU, tmp_path) == 32 * MIB


def test_limits_of_version_1(tmp_path):
    machine(tmp_path, "9:cpuset:/", "4:cpu,memory:/slurm/job_7", "0::/")
    top = tmp_path / "sys/fs/cgroup/memory"
    old_group(top, 2**63 - 4096, 50 * MIB, 0)
    old_group(top / "slurm", 50 * MIB, 20 * MIB, 2 * MIB)
    old_group(top / "slurm/job_7", 40 * MIB, 9 * MIB, 3 * MIB)
    assert free_memory(CPU, tmp_path) == 32 * MIB


@pytest.mark.parametrize("path", ["/docker/0c1d", "/../../kubepods/pod7"])
def test_a_container_that_is_told_its_path_outside(tmp_path, path):
    machine(tmp_path, f"4:memory:{path}", f"0::{path}")
    old_group(tmp_path / "sys/fs/cgroup/memory", 40 * MIB, 9 * MIB, 0)
    assert free_memory(CPU, tmp_path) == 31 * MIB
