"""A Ray cluster for what runs on one that is there already."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worlds import ROOT


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster of two nodes that was started in another directory."""
    from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    Config.initialize("")  # in this process Ray may have looked before
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.verl.ray_cluster"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert started.stdout is not None
    yield started.stdout.readline().strip()
    started.communicate(timeout=60)
