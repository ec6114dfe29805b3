"""Runs of a comparison in processes of their own: how many at once, and what stops them or
keeps them from going on.
"""

import errno
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from graphpo_agent.cli import main
from graphpo_agent.compare_run import train_apart
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.types import Outcome, Task
from tests.worlds import run_arguments


def full_disk(task: Task, outcome: Outcome) -> float:
    """A verifier that keeps a file of its own."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def config(reach: Path, output: Path, *overrides: str) -> RunConfig:
    path, *more = run_arguments(reach, output, "train.steps=1", *overrides)
    return load_config(RunConfig, path, more)


def test_no_more_runs_go_on_at_once_than_asked_for(reach: Path, tmp_path: Path) -> None:
    runs = {name: config(reach, tmp_path / name) for name in "abc"}
    told = [(each.name, each.what) for each in train_apart(runs, 1) if each.what != "row"]
    assert told == [(name, what) for name in "abc" for what in ("begins", "ends")]
    assert not multiprocessing.active_children()


def test_a_disk_that_is_full_in_a_run_stops_them_all(reach: Path, tmp_path: Path) -> None:
    runs = {
        name: config(reach, tmp_path / name, f"reward={__name__}:full_disk") for name in ("a", "b")
    }
    with pytest.raises(OSError, match="No space left on device"):
        list(train_apart(runs, 2))
    assert not multiprocessing.active_children()


def test_a_run_with_another_policy_or_other_tasks_is_not_compared(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = shutil.copytree(reach / "policy", tmp_path / "policy")
    heldout = shutil.copy(reach / "heldout.jsonl", tmp_path)
    inputs = [f"model.path={policy}", f"tasks.heldout={heldout}", "train.steps=1"]
    path, *more = run_arguments(reach, tmp_path / "out", *inputs)
    more = [each for each in more if not each.startswith("output=")]
    words = ["--methods", "grpo", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main(["compare", path, *more, *words]) == 0
    with (policy / "model.safetensors").open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"x")
    Path(heldout).write_text("".join(Path(heldout).read_text().splitlines(keepends=True)[:-1]))
    capsys.readouterr()
    assert main(["compare", path, *more, *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "runs/grpo/seed-0 was run with other " in error
    assert " other tasks.heldout, weights, which changed since: " in error
