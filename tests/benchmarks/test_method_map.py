"""The map of methods trains what it says, and writes what it found."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from benchmarks import method_map, method_pages, method_prm
from benchmarks.method_pages import Page, read_page, write_map, write_page
from benchmarks.method_settings import METHODS, WORLDS, Setting, settings
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.report.compare_stats import MEASURES, Comparison, Outcome
from graphpo_agent.train_run import check_run
from tests.worlds import ROOT


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_settings_differ_in_how_the_same_tokens_are_spent_and_in_the_learning_rate(
    world: str, method: str, tmp_path: Path
) -> None:
    name, *overrides = method_map.arguments(world, tmp_path)
    (tmp_path / world).mkdir()
    (tmp_path / world / "train.jsonl").write_text("{}\n" * 4000)
    own = load_config(RunConfig, ROOT / name, overrides)
    configs: list[RunConfig] = []
    for setting in settings(method, WORLDS[world]):
        file = method_map.write_setting(
            tmp_path / f"{setting.label}.yaml", world, setting, tmp_path
        )
        config = load_config(RunConfig, ROOT / name, [str(file), *overrides])
        check_run(config)
        assert config.budget.tokens is not None
        assert (
            config.train.prompts_per_step * config.budget.tokens * WORLDS[world].updates
            == config.train.token_budget
            == WORLDS[world].token_budget
        )
        assert config.update.learning_rate == setting.learning_rate
        half = config.update.minibatch_graphs
        assert half < config.train.prompts_per_step <= 2 * half, "two minibatches"
        free = ("method", "update", "budget", "train", "tasks")
        assert config.model_dump(exclude=set(free)) == own.model_dump(exclude=set(free))
        (tasks,) = map(Path, config.tasks.train)
        asked = config.train.prompts_per_step * WORLDS[world].updates
        come_back = asked // len(tasks.read_text().splitlines())
        assert come_back == (4 if method == "pros" else 0)
        configs.append(config)
    assert len({config.model_dump_json() for config in configs}) == len(configs)
    assert len(configs) == (1 if WORLDS[world].large else 4)
    assert {config.train.token_budget for config in configs} == {own.train.token_budget}
    kinds = {config.method.name for config in configs}
    assert kinds == {"graphpo" if method in ("plus", "waves") else method}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_small_benchmark(
    reach: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(reach, tmp_path / "work/reach")
    small = replace(WORLDS["reach"], prompts=4, tokens=120, updates=4, learning_rates=(2e-4,))
    monkeypatch.setitem(WORLDS, "reach", small)
    monkeypatch.setattr(method_prm, "STEPS", 3)
    monkeypatch.setattr(method_pages, "RESULTS", tmp_path / "results")
    method_map.measure("reach", ["graphpo", "prm"], 1, tmp_path / "work", 2)
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "map.md",
        "map-reach.md",
        "map-reach.json",
        "map-reach.svg",
    }
    record = json.loads((tmp_path / "results/map-reach.json").read_text())
    assert record["world"] == "reach" and record["budget"] == small.token_budget
    assert [method["method"] for method in record["methods"]] == ["graphpo", "prm"]
    assert str(tmp_path) not in json.dumps(record)
    tuned = json.loads((tmp_path / "work/tuning/reach/compare.json").read_text())
    curves = {each["method"]: each["curve_accuracy"]["mean"] for each in tuned["methods"]}
    assert len(curves) == 4
    assert curves == {key: pytest.approx(fmean(own)) for key, own in record["tuning"].items()}
    page = (tmp_path / "results/map.md").read_text()
    for name, chosen in record["settings"].items():
        label = f"{name}-p{chosen['prompts']}-lr{chosen['lr']:g}"
        own = {key: value for key, value in curves.items() if key.startswith(f"{name}-")}
        assert own[label] == max(own.values())
        assert f"| {name} | " in page and f"({chosen['prompts']}, {chosen['lr']:g})" in page
    assert page.count("**") >= 2


def test_the_better_settings_of_one_seed_meet_again_with_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = ["grpo-p18-lr0.0002", "grpo-p18-lr0.0005", "grpo-p9-lr0.0002", "grpo-p9-lr0.0005"]
    means = ([0.3, 0.9, 0.9], [0.5, 0.1, 0.1], [0.4, 0.3, 0.2], [0.1] * 3)
    curves = dict(zip(labels, means, strict=True))
    asked: list[list[tuple[str, int]]] = []

    def trained(
        world: str, tried: Mapping[str, list[Setting]], seeds: range, work: Path, jobs: int
    ) -> dict[str, list[float]]:
        own = [setting.label for choices in tried.values() for setting in choices]
        asked.append([(label, seed) for label in own for seed in seeds])
        return {label: curves[label][: len(seeds)] for label in own}

    monkeypatch.setattr(method_map, "curve_means", trained)
    tried = {"grpo": list(settings("grpo", WORLDS["hops"]))}
    best, tuning = method_map.tune("hops", tried, tmp_path, 2)
    assert best["grpo"].label == labels[2]
    assert tuning == {
        labels[0]: curves[labels[0]][:1],
        labels[1]: curves[labels[1]],
        labels[2]: curves[labels[2]],
        labels[3]: curves[labels[3]][:1],
    }
    assert asked[0] == [(label, 100) for label in labels]
    assert sorted(asked[1]) == [(label, 100 + k) for label in labels[1:3] for k in range(3)]


def test_a_world_leaves_the_files_of_another_whose_name_begins_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {f"map-reach-large.{end}" for end in ("md", "json", "svg")}
    for name in (*large, "map-reach-2.svg", "map-reach.svg"):
        (tmp_path / name).write_text("of before")
    (tmp_path / "map-reach-large.json").write_text(
        json.dumps({"world": "reach-large", "budget": 1000, "settings": {}, "methods": []})
    )
    outcome = Outcome(np.array([0.0, 9.0]), np.array([0.1, 0.2]), dict.fromkeys(MEASURES, 1.0))
    found = Comparison({"grpo": {0: outcome, 1: outcome}}, None)
    monkeypatch.setattr(method_pages, "RESULTS", tmp_path)
    write_page("reach", Page({}, {}, found))
    own = {"map-reach.md", "map-reach.json", "map-reach.svg"}
    assert {path.name for path in tmp_path.iterdir()} == large | own
    assert "of before" not in (tmp_path / "map-reach.svg").read_text()
    assert (tmp_path / "map-reach-large.md").read_text() == "of before"


def test_a_method_is_measured_again_and_the_page_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(method_pages.RESULTS / "map-hops.json", tmp_path)
    monkeypatch.setattr(method_pages, "RESULTS", tmp_path)
    before, page = json.loads((tmp_path / "map-hops.json").read_text()), read_page("hops")
    again = {
        seed: replace(run, measures={**run.measures, "final_accuracy": 0.25})
        for seed, run in page.found.outcomes["treepo"].items()
    }
    settings = {"treepo": {"prompts": 1, "lr": 0.1, "structure": {"width": 3}}}
    found = Comparison({"treepo": again}, WORLDS["hops"].token_budget)
    write_page("hops", page.renewed(Page(settings, {"treepo-p9-lr0.0002": [0.5]}, found)))
    after = json.loads((tmp_path / "map-hops.json").read_text())
    assert after["settings"] == before["settings"] | settings
    assert after["tuning"] == before["tuning"] | {"treepo-p9-lr0.0002": [0.5]}
    for old, new in zip(before["methods"], after["methods"], strict=True):
        if old["method"] == "treepo":
            assert new["final_accuracy"] == {"mean": 0.25, "half_width": 0.0}
        assert old["method"] == new["method"] and old["runs"][0]["curve"] == new["runs"][0]["curve"]
        for name in MEASURES:
            if (old["method"], name) != ("treepo", "final_accuracy"):
                assert new[name] == pytest.approx(old[name], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("other", ["seeds", "policy"])
def test_runs_from_another_policy_or_with_other_seeds_share_no_page(
    other: str,
) -> None:
    page = read_page("hops")
    runs = page.found.outcomes["treepo"]
    if other == "seeds":
        again = {seed + 1: run for seed, run in runs.items()}
    else:
        again = {seed: replace(run, accuracy=run.accuracy + 0.0025) for seed, run in runs.items()}
    newer = replace(page, found=replace(page.found, outcomes={"treepo": again}))
    with pytest.raises(SystemExit, match="other seeds or another policy"):
        page.renewed(newer)


def test_worlds_that_other_methods_ran_on_share_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method_pages, "RESULTS", tmp_path)
    setting = {"prompts": 18, "lr": 6e-05, "structure": {"schedule": [4, 1], "refill": "uncertain"}}
    for world, accuracies in {
        "reach": {"grpo": 0.5, "waves": 0.4},
        "reach-large": {"grpo": 0.1, "plus": 0.2},
    }.items():
        record = {
            "world": world,
            "budget": 1000,
            "settings": dict.fromkeys(accuracies, setting),
            "methods": [
                {
                    "method": name,
                    "final_accuracy": {"mean": mean, "half_width": 0.01},
                    "runs": [{"tokens": 1000.0}, {"tokens": 1000 + 100 * mean}],
                }
                for name, mean in accuracies.items()
            ],
        }
        (tmp_path / f"map-{world}.json").write_text(json.dumps(record))
    write_map()
    assert "up to 5.0 %" in (tmp_path / "map.md").read_text()
    rows = [line for line in (tmp_path / "map.md").read_text().splitlines() if line[:2] == "| "]
    assert rows[2:5] == [
        "| plus | – | **20.0 ± 1.0** (18, 6e-05) |",
        "| waves | 40.0 ± 1.0 (18, 6e-05) | – |",
        "| grpo | **50.0 ± 1.0** (18, 6e-05) | 10.0 ± 1.0 (18, 6e-05) |",
    ]
    assert rows[-3:] == [
        "| plus | – | schedule [4,1], refill uncertain |",
        "| waves | schedule [4,1], refill uncertain | – |",
        "| grpo | schedule [4,1], refill uncertain | schedule [4,1], refill uncertain |",
    ]


def test_the_measured_worlds_make_the_map_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(page: Path) -> list[str]:
        return [line for line in page.read_text().splitlines() if line.startswith("| ")]

    shown = method_pages.RESULTS / "map.md"
    for record in shown.parent.glob("map-*.json"):
        shutil.copy(record, tmp_path)
    monkeypatch.setattr(method_pages, "RESULTS", tmp_path)
    write_map()
    assert rows(tmp_path / "map.md") == rows(shown)
