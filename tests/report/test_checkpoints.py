"""Checkpoints are whole or not there, whatever ends the process."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from graphpo_agent.report.checkpoints import (
    BestModel,
    Checkpoints,
    accuracy_of,
    read_progress,
    step_of,
)


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


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    left = []
    for step, accuracy in enumerate([None, 0.5, None, 0.7, 0.0, 0.7, 0.6, 0.8, None], start=1):
        checkpoints.save(step, {"accuracy": accuracy}, 1, weights)
        left.append([step_of(path) for path in checkpoints.whole()])
    assert left == [[1], [2], [2, 3], [4], [4, 5], [4, 6], [4, 7], [8], [8, 9]]
    best = checkpoints.best()
    assert best is not None and step_of(best) == 8 and accuracy_of(best) == 0.8
    (best / "progress.json").write_text("{")
    assert checkpoints.best() is None and accuracy_of(best) is None
    checkpoints.save(10, {}, 1, weights)
    assert [step_of(path) for path in checkpoints.whole()] == [10]


@pytest.mark.parametrize("links", [True, False])
def test_the_best_model_stays_when_its_checkpoint_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    kept = BestModel(tmp_path / "best")
    for step, accuracy in ((10, 0.0), (20, 0.6), (30, 0.6), (40, 0.5)):
        model = tmp_path / f"global_step_{step}"
        model.mkdir()
        (model / "model.safetensors").write_text(str(step))
        kept.offer(step, accuracy, model)
        shutil.rmtree(model)
    kept = BestModel(tmp_path / "best")  # of a run that goes on
    (model / "sub").mkdir(parents=True)
    (model / "sub/config.json").write_text("{}")
    (best,) = (tmp_path / "best").iterdir()
    assert best.name == "step-000020" and (best / "model.safetensors").read_text() == "20"
    assert read_progress(best) == {"step": 20, "accuracy": 0.6}
    kept.offer(40, 0.7, model)
    (best,) = (tmp_path / "best").iterdir()
    assert (best / "sub/config.json").samefile(model / "sub/config.json") == links


def test_what_is_damaged_is_written_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    weights(tmp_path / "step-000003")  # without the file that is written last
    assert checkpoints.whole() == []
    checkpoints.save(3, {"at": 3}, 1, weights)
    assert read_progress(checkpoints.whole()[0]) == {"at": 3}
