"""What overrides make of verl's configuration, and which are refused."""

import json
from pathlib import Path

import pytest

from graphpo_agent.cli import main
from graphpo_agent.engines.verl import settings as verl_words
from graphpo_agent.engines.verl.settings import check_settings, verl_settings
from graphpo_agent.errors import ConfigError
from tests.engines.verl.test_settings import SEARCH, config


@pytest.mark.verl
@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.actor=null",
        "actor_rollout_ref.actor.fsdp_config=null",
        "+=3",
        "+actor_rollout_ref.actor.optim.momentum=0.9",
        "actor_rollout_ref.actor.loss_agg_mode=sum",
    ],
)
def test_an_override_that_verl_cannot_use_is_one_line(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = f"engine.overrides={json.dumps([override])}"
    assert main(["train", str(SEARCH), overrides, "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.verl
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.no_such_thing=3", "no_such_thing"),
        ("nccl_timeout", "'nccl_timeout' is not name=value"),
        ("trainer.critic_warmup=[", "critic_warmup"),
    ],
)
def test_a_setting_that_verl_does_not_know_is_one_line(
    override: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = f"engine.overrides={json.dumps([override])}"
    assert main(["train", str(SEARCH), overrides, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "set update.entropy_coefficient"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "leave it out"),
        ("actor_rollout_ref.actor.shuffle=true", "leave it out"),
        ("actor_rollout_ref.rollout.n=2", "set method"),
        ("actor_rollout_ref.rollout.temperature=0.5", "set sampling.temperature"),
        ("+algorithm.filter_groups.enable=true", "set method and update"),
        ("data.train_batch_size=3", "set train.prompts_per_step"),
        ("trainer.total_training_steps=7", "set train.steps"),
        ("graphpo=null", "leave it out"),
        ("graphpo.terms=2", "leave it out"),
    ],
)
def test_what_the_runs_own_settings_decide_is_not_overridden(override: str, instead: str) -> None:
    name = override.lstrip("+").partition("=")[0]
    with pytest.raises(ConfigError) as refusal:
        check_settings(config(f"engine.overrides={json.dumps([override])}"))
    assert str(refusal.value) == (
        f"engine.overrides: {name} is not verl's to decide here: {instead}"
    )


@pytest.mark.verl
def test_overrides_are_verls_last_word(tmp_path: Path) -> None:
    from graphpo_agent.engines.verl.launch import compose

    settings = verl_settings(config(), tmp_path, "cuda", "a:b", "text")
    made = compose(
        settings, ["actor_rollout_ref.rollout.max_num_seqs=7", "+ray_kwargs.ray_init.x={y: 1}"]
    )
    assert made.actor_rollout_ref.rollout.max_num_seqs == 7
    assert made.ray_kwargs.ray_init.x.y == 1
    assert made.graphpo.config == "text"
    assert made.actor_rollout_ref.rollout.engine_kwargs.vllm.block_size == 16


@pytest.mark.verl
@pytest.mark.parametrize("value", ["x", "-1", "0", ".inf", "null"])
def test_seconds_that_are_none_are_refused_before_anything_starts(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = f"engine.overrides=[graphpo.sync_seconds={value}]"
    assert main(["train", str(SEARCH), overrides, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "graphpo.sync_seconds=" in error and error.count("\n") == 1


@pytest.mark.verl
@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.model.use_fused_kernels=true",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
    ],
)
def test_what_our_engine_cannot_do_is_refused_unless_verls_is_asked_for(
    override: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verl_words, "_has_flash_attention", lambda: True)
    overrides = f"engine.overrides={json.dumps([override])}"
    assert main(["train", str(SEARCH), overrides, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert override in error.replace("True", "true") and error.count("\n") == 1
    assert main(["train", str(SEARCH), overrides, "engine.share_prefixes=false", "--dry-run"]) == 0


@pytest.mark.verl
@pytest.mark.parametrize("place", ["actor", "actor.fsdp_config"])
def test_rows_in_parts_need_an_attention_that_goes_across_them(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = True
    monkeypatch.setattr(verl_words, "_has_flash_attention", lambda: there)
    parts = f"actor_rollout_ref.{place}.ulysses_sequence_parallel_size=2"
    made = [parts, "actor_rollout_ref.model.use_remove_padding=true"]
    asked = ["train", str(SEARCH), f"engine.overrides={json.dumps(made)}", "--dry-run"]
    assert main([*asked, "engine.share_prefixes=false"]) == 0
    there = False
    for more, told in (
        ([], "rows cannot share their prefixes"),
        (["engine.share_prefixes=false"], "attention is sdpa here"),
    ):
        capsys.readouterr()
        assert main([*asked, *more]) == 2
        error = capsys.readouterr().err
        assert parts in error and told in error and error.count("\n") == 1
