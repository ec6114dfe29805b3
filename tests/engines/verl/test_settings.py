"""What verl is told of a run, and what is refused."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import GPT2Config, Qwen2Config, Qwen3_5TextConfig

from graphpo_agent.cli import main
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config, read_yaml
from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.engines.local.model import stored_config
from graphpo_agent.engines.verl.nodes import named_paths
from graphpo_agent.engines.verl.settings import check_settings, model_fields, verl_settings
from graphpo_agent.engines.verl.worker import task_from_line
from graphpo_agent.errors import ConfigError
from graphpo_agent.train_verl import _composed, prepare_verl
from tests.engines.tiny import save_tokenizer
from tests.worlds import ROOT, run_arguments

REACH = ROOT / "configs/toy/reach.yaml"
SEARCH = ROOT / "configs/search/qwen2.5-7b-verl.yaml"
ENGINE = "engine={kind: verl, max_context_tokens: 64, gpus_per_node: 2}"


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, REACH, [ENGINE, *overrides])


def test_verl_does_not_start_from_adapters(tmp_path: Path) -> None:
    step, policy = tmp_path / "step", tmp_path / "policy"
    step.mkdir()
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    adapters = {"base_model_name_or_path": str(policy)}
    (step / "adapter_config.json").write_text(json.dumps(adapters))
    check_settings(config(f"model.path={policy}"))
    with pytest.raises(ConfigError, match=r"^engine\.kind verl: .*/step holds adapters"):
        check_settings(config(f"model.path={step}"))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["method={name: pros}"], "method pros keeps a pool of prefixes over all prompts"),
        (["method={name: treepo}"], "method treepo whitens over a batch"),
        (["method={name: spo_tree}"], "set method.whiten=none"),
        (
            [
                "method={name: prm, scorer: {class: graphpo_agent.prm_local:LocalStepScorer, "
                "path: prm}}"
            ],
            "would load method.scorer's model",
        ),
        (["train.max_resample=1"], "set train.max_resample=0"),
        (["train.steps=null", "train.token_budget=1000"], "set train.steps"),
        (["train.token_budget=1000"], "no train.token_budget"),
        (["model.lora={rank: 4}", "engine.share_prefixes=false"], "set it to true"),
        (["model.lora={rank: 4, alpha: 6.5}"], "whole numbers alone as model.lora.alpha"),
        (["model.lora={target_modules: [q_proj, embed_tokens]}"], "leave embed_tokens out"),
        (["model.dtype=float64"], "model.autocast"),
        (
            ["update.old_logprobs=rollout", "sampling.top_p=0.9"],
            "set update.old_logprobs=recompute",
        ),
        (["update.mismatch_cap=2", "sampling.top_p=0.9"], "leave one of them out"),
        (["update.compile_layers=true"], "update.compile_layers"),
        (["engine.tensor_parallel=4"], "not divisible by engine.tensor_parallel 4"),
        (["engine.max_context_tokens=32"], "leaves no room for a prompt"),
        (["engine.nodes=2"], "engine.nodes 2 needs a Ray cluster"),
        (["model.device=cuda:1"], "set model.device to cuda or cpu"),
    ],
)
def test_what_has_no_meaning_in_verl_is_refused(overrides: Sequence[str], told: str) -> None:
    with pytest.raises(ConfigError, match=r"^engine\.kind verl: ") as refusal:
        check_settings(config(*overrides))
    assert told in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "method",
    [
        "{name: graphpo, schedule: [2, 2], objective: separate}",
        "{name: tree, schedule: [2, 2]}",
        "{name: grpo, group_size: 4}",
        "{name: dapo}",
        "{name: treerl}",
        "{name: tree_grpo}",
        "{name: treerpo}",
        "{name: spo_tree, whiten: none}",
        "{name: spo_chain, whiten: none}",
        "{name: treepo, whiten: none}",
        "{name: prm, scorer: {class: graphpo_agent.rewards.prm:VllmStepScorer, url: x}}",
    ],
)
def test_every_method_of_one_prompt_is_taken(method: str) -> None:
    check_settings(config(f"method={method}"))


def test_a_dry_run_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(REACH), ENGINE, "train.max_resample=2", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphpo: engine.kind verl: verl draws no other prompts")
    assert error.count("\n") == 1


def test_verl_only_trains(capsys: pytest.CaptureFixture[str], reach: Path) -> None:
    place = [f"model.path={reach / 'policy'}", f"tasks.heldout={reach / 'heldout.jsonl'}"]
    assert main(["eval", str(REACH), *place, ENGINE]) == 2
    assert "engine.kind verl only trains" in capsys.readouterr().err


def test_settings_say_the_same_in_verls_words(tmp_path: Path) -> None:
    run = config(
        "update.clip_low=0.1",
        "update.clip_high=0.28",
        "update.epochs=2",
        "update.warmup_steps=10",
        "update.kl_coefficient=0.01",
        "train.prompts_per_step=12",
        "update.minibatch_graphs=4",
        "train.checkpoint_every=7",
        "train.keep_checkpoints=5",
        "train.eval_every=3",
        "train.eval_samples=6",
        "sampling.temperature=0.8",
    )
    settings = verl_settings(run, tmp_path, "cuda", "a:b", "text")
    actor = "actor_rollout_ref.actor"
    assert settings[f"{actor}.clip_ratio_low"] == 0.1
    assert settings[f"{actor}.clip_ratio_high"] == 0.28
    assert settings[f"{actor}.clip_ratio_c"] > 5e8  # no dual clip: beyond verl's largest ratio
    assert settings[f"{actor}.use_kl_loss"] is True
    assert settings[f"{actor}.optim.lr"] == 3e-4
    # 10 optimiser steps are two training steps of 2 epochs × 3 minibatches
    assert settings[f"{actor}.optim.lr_warmup_steps"] == 2
    assert settings[f"{actor}.ppo_max_token_len_per_gpu"] == 4096
    assert settings["actor_rollout_ref.rollout.temperature"] == 0.8
    assert settings["data.max_prompt_length"] == 32
    assert settings["trainer.save_freq"] == 7
    assert settings["trainer.max_actor_ckpt_to_keep"] == 5
    one = config("train.keep_checkpoints=1")
    kept = verl_settings(one, tmp_path, "cuda", "a:b", "")["trainer.max_actor_ckpt_to_keep"]
    assert kept == 2, "verl deletes the last one before the next is whole"
    assert settings["trainer.test_freq"] == 3
    assert settings["actor_rollout_ref.rollout.val_kwargs.n"] == 6
    assert settings["actor_rollout_ref.rollout.dtype"] == "float32"
    assert settings["data.train_batch_size"] == 12
    assert settings["algorithm.rollout_correction.bypass_mode"] is False
    assert verl_settings(run, tmp_path, "cuda", "a:b", "text", left_out=[3, 5]) == settings | {
        "+data.left_out": [3, 5]
    }
    assert settings["trainer.val_before_train"] is True
    assert verl_settings(run, tmp_path, "cuda", "a:b", "text", resume=True) == settings | {
        "trainer.val_before_train": False
    }
    dropped = model_fields(GPT2Config(pad_token_id=7))
    assert {
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "pad_token_id": 7,
    }.items() <= (dropped.items())
    assert model_fields(Qwen2Config()) == {"pad_token_id": None}
    override = "+actor_rollout_ref.model.override_config"
    assert verl_settings(run, tmp_path, "cuda", "a:b", "text", fields=dropped) == settings | {
        f"{override}.{name}": value for name, value in dropped.items()
    }
    assert settings["trainer.default_local_dir"] == str(tmp_path / "checkpoints")
    own = settings["+graphpo"]
    assert (own["minibatch_graphs"], own["terms"], own["kl"]) == (4, 1, 0.01)
    whole = ["model", "optimizer", "extra", "hf_model"]
    assert settings[f"{actor}.checkpoint.save_contents"] == whole
    lora = config("model.lora={rank: 4, alpha: 8, target_modules: [q_proj]}")
    adapted = verl_settings(lora, tmp_path, "cuda", "a:b", "text")
    part = "actor_rollout_ref.model"
    assert [adapted[f"{part}.lora_{name}"] for name in ("rank", "alpha")] == [4, 8]
    assert adapted[f"{part}.target_modules"] == ["q_proj"] and adapted[f"{part}.lora.merge"]
    assert adapted[f"{actor}.checkpoint.save_contents"] == whole[:3]
    precision = settings[f"+{actor}.fsdp_config.mixed_precision"]
    assert precision["param_dtype"] == "fp32"
    dual = config(
        "update.dual_clip=3.0",
        "method.objective=separate",
        "tasks.heldout=null",
        "model.autocast=true",
        "update.max_tokens_per_batch=48",
        "update.old_logprobs=rollout",
    )
    settings = verl_settings(dual, tmp_path, "cpu", "a:b", "text")
    assert settings[f"+{actor}.fsdp_config.mixed_precision"]["param_dtype"] == "bf16"
    assert settings["actor_rollout_ref.rollout.dtype"] == "bfloat16"
    assert settings[f"{actor}.ppo_max_token_len_per_gpu"] == 64
    assert settings["algorithm.rollout_correction.bypass_mode"] is True
    large = verl_settings(dual, tmp_path, "cpu", "a:b", "", largest_weight=519 * 2**20 + 1)
    bucket = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    assert (settings[bucket], large[bucket]) == (64, 520), "every weight fits"
    capped = verl_settings(config("update.mismatch_cap=2.5"), tmp_path, "cpu", "a:b", "text")
    assert capped["+graphpo"]["mismatch_cap"] == 2.5
    assert settings[f"{actor}.clip_ratio_c"] == 3.0
    assert settings["+graphpo"]["terms"] == 2
    own = config("method={name: own, object: {class: a:B}, terms: 3}")
    assert verl_settings(own, tmp_path, "cpu", "a:b", "text")["+graphpo"]["terms"] == 3
    assert (settings["trainer.val_before_train"], settings["trainer.test_freq"]) == (False, -1)
    assert settings["actor_rollout_ref.rollout.enforce_eager"] is True


def test_the_search_run_through_verl_is_the_one_of_one_machine() -> None:
    """But for the engine, its place, and what verl cannot do."""
    ours, other = read_yaml(SEARCH), read_yaml(ROOT / "configs/search/qwen2.5-7b.yaml")
    for each in (ours, other):
        for name in ("output", "engine"):
            del each[name]
        tools = each["mode"]["tools"]
        for source in (tools["search"]["retriever"], tools["visit"]["reader"]):
            source.pop("blocked_hosts", None)
    assert ours["model"].pop("device") == "cuda"
    assert ours["train"].pop("max_resample") == 0
    assert ours == other


@pytest.mark.verl
def test_the_growers_read_the_configuration_that_the_run_has(tmp_path: Path) -> None:
    for template in ("Solve $${question}$$", "a ${x ", "${trainer.nnodes}", "🔎 𝑥: "):
        text = json.dumps(template + "{question}", ensure_ascii=False)
        run = config(f"mode.prompt_template={text}")
        composed = _composed(run, tmp_path)
        assert RunConfig.model_validate(json.loads(composed.graphpo.config)) == run
    run = config("reward={class: a:B, least: 1.0e-06, most: 1.0e+17, bound: .inf, text: '1e-6'}")
    read = RunConfig.model_validate(json.loads(_composed(run, tmp_path).graphpo.config))
    assert read == run and cast(Any, read.reward)["bound"] == math.inf


def test_texts_with_slashes_are_paths_only_where_something_is(tmp_path: Path) -> None:
    texts = ["x" * 300 + " </answer>", "a/" * 3000, "a/\0b", str(tmp_path), "no/such", "plain"]
    assert named_paths({"mode": {"prompt_template": texts}}) == [str(tmp_path)]


@pytest.mark.verl
def test_verls_configuration_composes_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(SEARCH), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "# verl: 1 × 8 GPUs, FSDP2 over all of them, 8 vLLM servers, 8 processes" in printed
    two = ["engine.nodes=2", "engine.ray_address=auto", "engine.tensor_parallel=2"]
    assert main(["train", str(SEARCH), *two, "--dry-run"]) == 0
    assert "# verl: 2 × 8 GPUs, FSDP2 over all of them, 8 vLLM servers" in capsys.readouterr().out


def with_long_tasks(reach: Path, place: Path) -> Path:
    """Four tasks of reach, and between them two whose prompts do not fit."""
    rows = [json.loads(line) for line in (reach / "train.jsonl").read_text().splitlines()[:4]]
    long = [rows[0] | {"id": f"long {n}", "question": "a " * 80} for n in (1, 2)]
    train = place / "train.jsonl"
    rows = [*rows[:1], long[0], *rows[1:], long[1]]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return train


@pytest.mark.verl
def test_the_padding_tokens_embedding_is_trained_as_the_local_engine_trains_it(
    tmp_path: Path,
) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    model = tmp_path / "model"
    save_tokenizer(model)
    for own in (None, 5):
        Qwen2Config(pad_token_id=own, architectures=["Qwen2ForCausalLM"]).save_pretrained(model)
        run, fields = config(f"model.path={model}"), model_fields(stored_config(str(model)))
        part = _composed(run, tmp_path, fields=fields).actor_rollout_ref.model
        made = omega_conf_to_dataclass(part)
        assert made.hf_config.pad_token_id == own
        assert made.tokenizer.pad_token_id not in (None, own)


@pytest.mark.verl
def test_training_tasks_whose_prompts_do_not_fit_are_left_out(reach: Path, tmp_path: Path) -> None:
    from graphpo_agent.engines.verl.dataset import TaskDataset

    train = with_long_tasks(reach, tmp_path)
    changes = [ENGINE, "train.max_resample=0", f"tasks.train={train}"]
    name, *arguments = run_arguments(reach, tmp_path / "run", *changes)
    run = load_config(RunConfig, name, arguments)
    tasks = prepare_verl(run)
    left_out, (note,) = tasks.left_out, tasks.told
    assert left_out == [1, 5] and len(tasks.train) == 4
    assert re.fullmatch(
        r"2 training tasks are left out, as the first: task 'long 1': its prompt has \d+ .*", note
    )
    data = _composed(run, tmp_path, left_out=left_out).data
    drawn = TaskDataset(str(train), config=data)
    ids = [task_from_line(drawn[i]["task"]).id for i in range(len(drawn))]
    assert ids == [task.id for task in load_tasks(train) if "long" not in task.id]
    # Held-out tasks are others, and those that do not fit have been refused.
    assert len(TaskDataset(str(train), config=data, max_samples=3)) == 3


@pytest.mark.verl
def test_what_context_or_machines_cannot_hold_is_told_before_anything_starts(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, linear = with_long_tasks(reach, tmp_path), tmp_path / "linear"
    Qwen3_5TextConfig().save_pretrained(linear)
    for overrides, told in (
        ([f"tasks.heldout={train}"], r"task 'long 1': its prompt has \d+ .*\(2 such tasks of 6\)"),
        ([f"tasks.train={train}", "train.prompts_per_step=5"], "has 4 tasks that can be used"),
        (
            ["engine.max_context_tokens=1000"],
            r"engine.max_context_tokens is 1000, but .* holds 512",
        ),
        (
            ["model.device=cuda", "engine.gpus_per_node=1000"],
            r"engine.gpus_per_node is 1000, and this machine has \d+ GPUs",
        ),
        ([f"model.path={linear}"], r"bfloat16 only; set model.autocast=true"),
        (["model.lora={target_modules: [none]}"], r"target_modules: .* has no layer none; it has"),
        (["engine.ray_address=127.0.0.1:1"], r"ray_address 127.0.0.1:1: no Ray cluster is there"),
    ):
        run = tmp_path / "run"
        arguments = run_arguments(reach, run, ENGINE, "train.steps=1", "train.max_resample=0")
        assert main(["train", *arguments, *overrides]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(told, line) and not run.exists()


@pytest.mark.verl
def test_a_vllm_for_gpus_is_refused_on_a_cpu(
    reach: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("graphpo_agent.train_verl.vllm_is_for_cpus", lambda: False)
    arguments = run_arguments(reach, tmp_path / "run", ENGINE, "train.max_resample=0")
    assert main(["train", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'pip install "graphpo-agent[verl-cpu]"' in line and not (tmp_path / "run").exists()
