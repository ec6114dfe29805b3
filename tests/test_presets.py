"""Presets of the methods: each is a configuration, and says what the method's own code says."""

import re
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest

from graphpo_agent.build import check_named
from graphpo_agent.build_method import build_method
from graphpo_agent.cli import main
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config, read_yaml
from graphpo_agent.config_methods import MethodConfig
from graphpo_agent.errors import ConfigError
from graphpo_agent.methods import METHODS
from graphpo_agent.methods.classes import CLASSES
from tests.worlds import ROOT

PRESETS = sorted((ROOT / "configs/methods").glob("*/*.yaml"))
INSIDE_EDGES = {
    "treerl/as_released",
    "spo_chain/as_released",
    "pros/as_released",
}
"""They cut or begin inside an edge, and a turn of agent mode is whole."""
KB, REACH = ROOT / "configs/toy/kb.yaml", ROOT / "configs/toy/reach.yaml"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_preset_makes_a_run_of_both_modes(preset: Path) -> None:
    for base in (KB, REACH):
        config = load_config(RunConfig, base, [str(preset)])
        method = build_method(config.method)
        if base == KB and f"{preset.parent.name}/{preset.stem}" in INSIDE_EDGES:
            with pytest.raises(ConfigError, match="whole"):
                check_named(config)
        else:
            check_named(config)
        assert method.name == config.method.name
        wanted = {"dr_grpo": "grpo"}.get(preset.parent.name, preset.parent.name)
        assert method.name == wanted


def test_every_method_has_both_presets() -> None:
    here = {f"{p.parent.name}/{p.stem}" for p in PRESETS}
    assert {"graphpo/paper", "graphpo/plus", "tree/graphpo_adapted"} <= here
    for name in set(METHODS) - {"graphpo", "tree"}:
        assert {f"{name}/as_released", f"{name}/graphpo_adapted"} <= here


def test_the_adapted_presets_share_the_papers_optimisation() -> None:
    for preset in PRESETS:
        if preset.stem == "graphpo_adapted":
            update = load_config(RunConfig, REACH, [str(preset)]).update
            assert (update.clip_low, update.clip_high, update.dual_clip) == (0.2, 0.2, None)
            assert (update.learning_rate, update.weight_decay) == (1e-6, 0.01)
            assert (update.betas, update.max_grad_norm) == ((0.9, 0.999), 1.0)
            assert (update.kl_coefficient, update.entropy_coefficient) == (0.0, 0.0)


@pytest.mark.parametrize("name", CLASSES)
def test_a_methods_configuration_has_its_settings_and_their_defaults(name: str) -> None:
    (config,) = (c for c in METHOD_CONFIGS if c.model_fields["name"].annotation.__args__ == (name,))
    own = {"name", "needs_states", "merging"}
    settings = {f.name: f.default for f in fields(CLASSES[name]) if f.name not in own}
    if "whiten" not in config.model_fields:
        assert settings.pop("whiten") == "none"
    configured = {x: f for x, f in config.model_fields.items() if x not in ("name", "scorer")}
    assert set(settings) == set(configured)
    for setting, default in settings.items():
        field = configured[setting]
        if setting == "whiten":
            assert field.default == "batch"
        elif not field.is_required():
            assert field.default == default, setting


def test_other_prompts_are_drawn_where_the_method_draws_them_whatever_the_run_says() -> None:
    """kb draws none and a run that says nothing two rounds; DAPO and TreePO's script draw nine."""
    for preset in PRESETS:
        name = f"{preset.parent.name}/{preset.stem}"
        if name.startswith("dapo/") or preset.stem == "as_released":
            filters = name.startswith("dapo/") or name == "treepo/as_released"
            drawn = load_config(RunConfig, KB, ["train.max_resample=2", str(preset)]).train
            assert drawn.max_resample == (9 if filters else 0), name


def test_the_readme_says_of_every_preset_where_it_departs_from_its_paper() -> None:
    page = (ROOT / "README.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall("`([^`]*/[^`]*)`", row)]
    for preset in PRESETS:
        label = f"{preset.parent.name}/{preset.stem}"
        assert any(fnmatch(label, name) for name in named), label


METHOD_CONFIGS = MethodConfig.__args__[0].__args__


def test_a_further_file_replaces_a_method_of_another_name_and_merges_the_rest() -> None:
    preset = ROOT / "configs/methods/dapo/as_released.yaml"
    config = load_config(RunConfig, KB, [str(preset), "method.max_length=400"])
    assert config.method.name == "dapo" and config.method.max_length == 400
    assert config.update.minibatch_graphs == load_config(RunConfig, KB).update.minibatch_graphs
    assert config.update.clip_high == 0.28


def test_a_tree_too_wide_for_its_budget_is_told_before_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    preset = ["train", str(REACH), str(ROOT / "configs/methods/graphpo/paper.yaml"), "--dry-run"]
    for budget, told in ((256, True), (2000, False)):
        assert main([*preset, f"budget.tokens={budget}"]) == 0
        # 2 + 10 + 40 + 80 edges of 8 tokens
        line = "budget: graphpo as configured makes up to 80 paths and 1,056 tokens a prompt"
        assert (line in capsys.readouterr().out) == told


def test_a_preset_stands_for_its_method_alone_whatever_the_run_says() -> None:
    """kb sets ``singleton: inherit`` and a search run a KL term; neither belongs to the presets."""
    paper = load_config(RunConfig, KB, [str(ROOT / "configs/methods/graphpo/paper.yaml")])
    assert paper.method.singleton == "zero"
    search = ROOT / "configs/search/qwen2.5-7b.yaml"
    assert load_config(RunConfig, search).update.kl_coefficient > 0
    released = load_config(RunConfig, search, [str(ROOT / "configs/methods/grpo/as_released.yaml")])
    assert (released.update.kl_coefficient, released.update.dual_clip) == (0.0, 3.0)
    for preset in PRESETS:
        update = read_yaml(preset)["update"]
        assert {"clip_low", "clip_high", "dual_clip", "loss_aggregation"} <= set(update), preset
        assert {"kl_coefficient", "entropy_coefficient", "learning_rate"} <= set(update), preset


def test_a_preset_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(KB), "configs/methods/none.yaml", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        "graphpo: cannot read configuration configs/methods/none.yaml: No such file or directory\n"
    )
