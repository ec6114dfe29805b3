"""What is left of a machine for a process in a job or a container."""

import os
from pathlib import Path

import pytest

from graphpo_agent.machine import free_memory, limit_threads, usable_cpus

MIB = 2**20
CPUS = len(os.sched_getaffinity(0))


def machine(root: Path, *memberships: str) -> Path:
    """A machine with 64 MiB left, whose kernel says these lines of a process's control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   65536 kB\nHuge: 0\n")
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in memberships))
    return root


def group(root: Path, place: str, **files: object) -> None:
    """A control group below ``sys/fs/cgroup``; a file's first word is before the first ``__``."""
    directory = root / "sys/fs/cgroup" / place
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(f"{text}\n")


def memory(limit: object, used: int, cached: int = 0) -> dict[str, object]:
    """Of a group of version 2."""
    stat = f"anon 5\ninactive_file {cached}\nactive_file 7"
    return {"memory__max": limit, "memory__current": used, "memory__stat": stat}


def old_memory(limit: int, used: int, cached: int = 0) -> dict[str, object]:
    """Of a group of version 1: its own cached files, and those of the groups in it."""
    stat = f"inactive_file 1\ntotal_inactive_file {cached}"
    sizes = {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": used}
    return {**sizes, "memory__stat": stat}


def test_free_memory_of_this_machine_is_plausible():
    assert 2**24 < free_memory() < 2**50


@pytest.mark.parametrize(
    ("limit", "used", "cached", "free"),
    [
        (3 * MIB, MIB, 0, 2 * MIB),
        (3 * MIB, 3 * MIB, MIB, MIB),  # files that were read once are given up first
        (MIB, 2 * MIB, 0, 0),
        ("max", 5, 0, 64 * MIB),
        (900 * MIB, 5, 0, 64 * MIB),  # more than the machine has
    ],
)
def test_memory_of_a_container(tmp_path, limit, used, cached, free):
    machine(tmp_path, "0::/")
    group(tmp_path, "", **memory(limit, used, cached))
    assert free_memory(tmp_path) == free


def test_memory_of_a_clusters_job_is_limited_above_its_steps(tmp_path):
    machine(tmp_path, "0::/slice/job_7/step_0/task_1")
    group(tmp_path, "")  # the machine's own group says nothing of memory
    group(tmp_path, "slice", **memory("max", 60 * MIB))
    group(tmp_path, "slice/job_7", **memory(40 * MIB, 9 * MIB, MIB))
    group(tmp_path, "slice/job_7/step_0", **memory("max", 8 * MIB))
    group(tmp_path, "slice/job_7/step_0/task_1", **memory("max", 8 * MIB))
    group(tmp_path, "slice/job_8", **memory(MIB, MIB))  # somebody else's
    assert free_memory(tmp_path) == 32 * MIB


def test_memory_of_groups_of_version_1(tmp_path):
    machine(tmp_path, "9:cpuset:/", "4:cpu,memory:/slurm/job_7", "0::/")
    group(tmp_path, "memory", **old_memory(2**63 - 4096, 50 * MIB))
    group(tmp_path, "memory/slurm", **old_memory(50 * MIB, 20 * MIB, 2 * MIB))
    group(tmp_path, "memory/slurm/job_7", **old_memory(40 * MIB, 9 * MIB, 3 * MIB))
    assert free_memory(tmp_path) == 32 * MIB


@pytest.mark.parametrize("path", ["/docker/0c1d", "/../../kubepods/pod7"])
def test_a_container_that_is_told_its_path_outside(tmp_path, path):
    machine(tmp_path, f"4:memory:{path}", f"3:cpu:{path}", f"0::{path}")
    group(tmp_path, "memory", **old_memory(40 * MIB, 9 * MIB))
    group(tmp_path, "cpu", cpu__cfs_quota_us=50_000, cpu__cfs_period_us=100_000)
    assert free_memory(tmp_path) == 31 * MIB
    assert usable_cpus(tmp_path) == 1


@pytest.mark.parametrize(
    ("time", "cpus"),
    [("max 100000", CPUS), ("50000 100000", 1), ("100000 100000", 1), ("9900000 100000", CPUS)],
)
def test_cpus_of_a_container(tmp_path, time, cpus):
    machine(tmp_path, "0::/pod/container")
    group(tmp_path, "pod", cpu__max=time)
    group(tmp_path, "pod/container", cpu__max="max 100000")
    assert usable_cpus(tmp_path) == cpus


def test_a_part_of_a_cpus_time_keeps_one_more_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    machine(tmp_path, "3:cpu,cpuacct:/docker/0c1d", "0::/")
    group(tmp_path, "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert usable_cpus(tmp_path) == 64
    group(tmp_path, "cpu/docker/0c1d", cpu__cfs_quota_us=250_000, cpu__cfs_period_us=100_000)
    assert usable_cpus(tmp_path) == 3


def test_cpus_that_a_process_may_run_on(tmp_path):
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cpus(machine(tmp_path)) == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("time", "own", "threads"),
    [("250000 100000", None, "3"), ("250000 100000", "5", "5"), ("max 100000", None, None)],
)
def test_libraries_make_no_more_threads_than_a_container_has_cpus(
    tmp_path, monkeypatch, time, own, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(os, "environ", {} if own is None else {"OMP_NUM_THREADS": own})
    machine(tmp_path, "0::/")
    group(tmp_path, "", cpu__max=time)
    limit_threads(tmp_path)
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_a_system_that_says_no_process_where_it_may_run(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cpus(tmp_path) == 5
