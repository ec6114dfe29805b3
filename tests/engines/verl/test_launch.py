"""How a run begins on a Ray cluster that runs already."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.engines.verl import launch as launching
from graphpo_agent.engines.verl.launch import environment, launch
from graphpo_agent.errors import RunError
from tests.worlds import ROOT

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster that was started in another directory."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
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


def runner() -> Any:
    """In place of verl's: says where it is, and leaves a queue as a run does that goes on."""
    import ray

    @ray.remote(num_cpus=0)
    class Queue:
        pass

    @ray.remote(num_cpus=0)
    class Runner:
        def run(self, config: dict[str, str]) -> None:
            Path(config["said"]).write_text(os.getcwd())
            names = {"name": "TransferQueueController", "namespace": "transfer_queue"}
            Queue.options(**names, lifetime="detached").remote()

    return Runner


def test_a_cluster_is_entered_where_the_run_is_and_holds_one_at_a_time(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_task_runner", runner)
    monkeypatch.setattr(launching, "_verls_environment", lambda config: {})
    monkeypatch.chdir(ROOT)
    said, variables = tmp_path / "said", environment("cpu", 1.0, shares_prefixes=False)
    config = {"said": str(said)}
    launch(config, variables, cluster, None, lambda: None)
    assert said.read_text() == str(ROOT)
    said.unlink()
    with pytest.raises(RunError, match="a run through verl is on this Ray cluster"):
        launch(config, variables, cluster, None, lambda: None)
    assert not said.exists()
