"""Warm starts through the command line and the function under it."""

import shutil
from pathlib import Path

import pytest

from graphpo_agent.build import build_sft_engine
from graphpo_agent.cli import main
from graphpo_agent.config import SftConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.data.tasks import load_demonstrations
from graphpo_agent.sft import warm_start, with_observations
from tests.worlds import ROOT, sft_overrides


def sft_arguments(place: Path, *overrides: str) -> list[str]:
    return [str(ROOT / f"configs/toy/{place.name}_sft.yaml"), *sft_overrides(place), *overrides]


def test_the_loss_falls_and_the_last_step_has_no_learning_rate_left(reach: Path) -> None:
    path, *overrides = sft_arguments(reach, "steps=40", "warmup_steps=0")
    config = load_config(SftConfig, path, overrides)
    seen: list[dict[str, float]] = []
    warm_start(
        build_sft_engine(config),
        load_demonstrations(Path(config.demonstrations)),
        config.steps,
        config.batch_size,
        config.seed,
        lambda step, metrics: seen.append(metrics),
    )
    assert len(seen) == 40
    assert seen[-1]["imitate/loss"] < 0.7 * seen[0]["imitate/loss"]
    assert seen[-1]["imitate/learning_rate"] < 0.1 * seen[0]["imitate/learning_rate"]


def test_observations_are_learned_only_when_asked_for(kb: Path) -> None:
    demonstration = load_demonstrations(kb / "demonstrations.jsonl")[0]
    assert any(not piece.trained for piece in demonstration.pieces)
    assert all(piece.trained for piece in with_observations(demonstration).pieces)
    texts = [piece.text for piece in demonstration.pieces]
    assert [piece.text for piece in with_observations(demonstration).pieces] == texts


def test_the_same_seed_gives_the_same_model(reach: Path, tmp_path: Path) -> None:
    models = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        output = tmp_path / name
        assert main(["sft", *sft_arguments(reach, f"output={output}", f"seed={seed}")]) == 0
        models.append((output / "model.safetensors").read_bytes())
    assert models[0] == models[1] != models[2]


def test_a_directory_that_is_no_model_is_not_replaced(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["sft", *sft_arguments(reach, f"output={tmp_path}")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_model_is_not_replaced_by_its_own_warm_start(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(reach / "policy", tmp_path / "policy")
    before = (model / "model.safetensors").read_bytes()
    overrides = [f"model.path={model}", f"output={tmp_path}/./policy"]
    assert main(["sft", *sft_arguments(reach, *overrides)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is also an input" in error
    assert (model / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("output", ["thesis.txt", "thesis.txt/policy", "."])
def test_an_impossible_output_is_refused_before_the_work(
    output: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    overrides = [f"output={tmp_path / output}", "model.path=/never/loaded"]
    assert main(["sft", *sft_arguments(reach, *overrides)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(tmp_path) in error and "never" not in error
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.path=/nowhere/model", "/nowhere/model"),
        ("demonstrations=/nowhere/demos.jsonl", "/nowhere/demos.jsonl"),
        ("steps=0", "steps"),
        ("stepz=3", "stepz: unknown key"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    override: str, says: str, reach: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", *sft_arguments(reach, override)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
