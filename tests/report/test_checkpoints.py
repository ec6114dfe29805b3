"""Checkpoints are whole or not there, whatever ends the process."""

import os
from pathlib import Path

import pytest

from graphpo_agent.report.checkpoints import Checkpoints, read_progress, step_of


def weights(directory: Path) -> None:
    directory.mkdir(parents=True)
    for name in ("model", "optimizer"):
        (directory / name).write_text(name)


@pytest.mark.parametrize("deletion", range(3))
def test_an_interrupt_in_the_middle_of_a_deletion_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletion: int
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"at": 1}, 1, weights)
    unlink, deleted = os.unlink, 0

    def interrupted(path: str, *, dir_fd: int | None = None) -> None:
        nonlocal deleted
        deleted += 1
        if deleted == deletion + 1:
            raise KeyboardInterrupt
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, {"at": 2}, 1, weights)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert step_of(checkpoints.whole()[0]) == 2
    assert read_progress(tmp_path / "step-000002") == {"at": 2}
    assert deleted == 4  # of the three files of the older one, the interrupted one again


def test_the_newest_is_that_of_the_largest_step(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (999_999, 1_000_000, 1_000_001):
        checkpoints.save(step, {}, 2, weights)
    assert [step_of(path) for path in checkpoints.whole()] == [1_000_000, 1_000_001]


def test_what_is_damaged_is_written_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    weights(tmp_path / "step-000003")  # without the file that is written last
    assert checkpoints.whole() == []
    checkpoints.save(3, {"at": 3}, 1, weights)
    assert read_progress(checkpoints.whole()[0]) == {"at": 3}
