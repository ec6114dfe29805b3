"""How a run begins on a Ray cluster that runs already."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.engines.ports import PORTS
from graphpo_agent.engines.verl import launch as launching
from graphpo_agent.engines.verl.launch import environment, launch
from graphpo_agent.errors import RunError, ToolError
from tests.worlds import ROOT

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]


def runner() -> Any:
    """In place of verl's: says where it is, and leaves a queue as a run does that goes on."""
    import ray

    @ray.remote(num_cpus=0)
    class Queue:
        pass

    @ray.remote(num_cpus=0)
    class Runner:
        def run(self, config: dict[str, str]) -> None:
            Path(config["said"]).write_text(f"{os.getcwd()} {os.environ['VLLM_PORT']}")
            names = {"name": "TransferQueueController", "namespace": "transfer_queue"}
            Queue.options(**names, lifetime="detached").remote()

    return Runner


@pytest.fixture
def without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_task_runner", runner)
    monkeypatch.setattr(launching, "_verls_environment", lambda config: {})


@pytest.mark.usefixtures("without_verl")
def test_a_cluster_is_entered_where_the_run_is_and_holds_one_at_a_time(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    said, variables = tmp_path / "said", environment("cpu", 1.0, shares_prefixes=False)
    config = {"said": str(said)}

    def start(*paths: str) -> None:
        launch(config, variables, cluster, None, paths, lambda: None)

    with pytest.raises(RunError, match=r"node \S+ of the Ray cluster does not see gone/away: all"):
        start("README.md", "gone/away")
    assert not said.exists()
    start("README.md", str(tmp_path))
    directory, port = said.read_text().split()
    assert directory == str(ROOT) and int(port) in PORTS
    said.unlink()
    with pytest.raises(RunError, match="a run through verl is on this Ray cluster"):
        start()
    assert not said.exists()


def test_a_cluster_that_asks_for_a_token_is_one_line(cluster: str) -> None:
    start = "import sys; from graphpo_agent.engines.verl.launch import _start_ray as start; "
    tried = subprocess.run(  # Ray remembers for a process what it has read
        [sys.executable, "-c", start + "start(sys.argv[1], None, {})", cluster],
        env={name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    *_, last = tried.stderr.splitlines()
    assert last.startswith("graphpo_agent.errors.RunError: Ray cannot be started: ")
    assert last.endswith("for a token, set RAY_AUTH_MODE=token (docs/verl.md)")


@pytest.mark.usefixtures("without_verl")
def test_a_node_without_the_package_is_named(cluster: str, tmp_path: Path) -> None:
    shadow = tmp_path / "shadow/graphpo_agent"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").touch()
    variables = environment("cpu", 1.0, shares_prefixes=False)
    variables["PYTHONPATH"] = str(shadow.parent)
    with pytest.raises(RunError, match=r"node \S+ of the Ray cluster cannot run graphpo_agent"):
        launch({}, variables, cluster, None, [], lambda: None)


def test_what_a_server_raised_is_told_from_what_a_worker_did() -> None:
    from ray.exceptions import RayTaskError

    from graphpo_agent.engines.verl.loop import _told

    own = RayTaskError("generate", "Traceback:\n  many lines", ValueError("no room\nat all"))
    assert _told(own).startswith("a vLLM server failed: ValueError: no room")
    assert _told(own).endswith("(set GRAPHPO_RAY_LOG=1 to see what the processes say)")
    assert _told(RayTaskError("grow", "", ToolError("quota"))) == "quota"
    assert _told(KeyError("id")) == "KeyError: 'id'"


def test_a_mistake_is_told_with_its_place_and_its_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from graphpo_agent.engines.verl.loop import _told

    try:
        (tmp_path / "answers.json").read_text()
    except OSError as error:
        told = _told(error)
    assert told.startswith(f"FileNotFoundError: No such file or directory: {tmp_path}/answers.json")
    assert re.search(r" in \S+\.py:\d+ \(set GRAPHPO_RAY_LOG=1", told)
    assert "test_launch.py" in capsys.readouterr().err
