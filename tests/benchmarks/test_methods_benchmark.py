"""The benchmark of methods trains what it says, and writes the files that README names."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks import methods
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from tests.worlds import ROOT


@pytest.mark.parametrize("world", methods.WORLDS)
@pytest.mark.parametrize("method", methods.METHODS)
def test_the_methods_differ_in_nothing_but_the_method(
    world: str, method: str, tmp_path: Path
) -> None:
    settings = methods.WORLDS[world]
    name, overrides = methods.arguments(world, tmp_path)
    file = tmp_path / "method.yaml"
    file.write_text(yaml.safe_dump({"method": settings.method(method)}))
    own = load_config(RunConfig, ROOT / name, overrides)
    config = load_config(RunConfig, ROOT / name, [str(file), *overrides])
    assert config.model_copy(update={"method": own.method}) == own
    assert config.method.name == method
    if method == "graphpo":
        assert config.method == own.method  # the world's own method is not changed
    assert config.train.steps is None and config.train.token_budget == settings.token_budget


def test_file_names() -> None:
    names = {f"methods_{methods.slug(world)}.svg" for world in methods.WORLDS}
    assert names == {"methods_kb.svg", "methods_reach.svg", "methods_reach-5lines.svg"}


@pytest.mark.slow
def test_a_small_benchmark(
    reach: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(reach, tmp_path / "work/reach")
    small = replace(methods.WORLDS["reach, 5 lines"], token_budget=2000)
    monkeypatch.setitem(methods.WORLDS, "reach, 5 lines", small)
    monkeypatch.setattr(methods, "RESULTS", tmp_path / "results")
    names = ["graphpo", "grpo"]
    found = methods.compare("reach, 5 lines", names, 2, tmp_path / "work")
    methods.write_results({"reach, 5 lines": found})
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "methods.md",
        "methods.json",
        "methods_reach-5lines.svg",
    }
    page = (tmp_path / "results/methods.md").read_text()
    assert "### reach, 5 lines\n" in page and "| difference to graphpo |" in page
    (record,) = json.loads((tmp_path / "results/methods.json").read_text())
    assert record["world"] == "reach, 5 lines" and record["budget"] == 2000
    assert [method["method"] for method in record["methods"]] == names
    assert str(tmp_path) not in json.dumps(record)
