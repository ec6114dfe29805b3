"""What verl is told of a run, what is refused, and a run's logs."""

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
from graphpo_agent.config_file import dump_config, load_config, read_yaml
from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.engines.local.model import dropouts
from graphpo_agent.engines.verl.log import RunLog, renamed, step_metrics
from graphpo_agent.engines.verl.nodes import named_paths
from graphpo_agent.engines.verl.settings import check_settings, verl_settings
from graphpo_agent.engines.verl.worker import task_from_line
from graphpo_agent.errors import ConfigError, RunError
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.train_verl import _composed, keep_tasks, prepare_verl, rewind_logs
from tests.worlds import ROOT, files_of_at_most, run_arguments

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
    dropped = dropouts(GPT2Config())
    assert {"attn_pdrop", "embd_pdrop", "resid_pdrop"} <= set(dropped) and not dropouts(
        Qwen2Config()
    )
    override = "+actor_rollout_ref.model.override_config"
    assert verl_settings(
        run, tmp_path, "cuda", "a:b", "text", dropouts=dropped
    ) == settings | dict.fromkeys((f"{override}.{name}" for name in dropped), 0.0)
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


def test_metrics_have_our_names_where_they_mean_the_same() -> None:
    data = {
        "actor/grad_norm": 0.5,
        "reward/mean": 0.25,
        "eval/accuracy": 0.75,
        "perf/throughput": 3,
        "actor/kl": float("nan"),
        "table": ["no number"],
    }
    assert renamed(data) == {
        "update/grad_norm": 0.5,
        "reward/mean": 0.25,
        "eval/accuracy": 0.75,
        "verl/perf/throughput": 3.0,
    }


def test_a_steps_metrics_are_sums_of_counts_and_means_of_the_rest() -> None:
    notes = [
        {"total": 1.0, "metrics": {"tokens/generated": 10, "reward/mean": 0.5, "rollout/x": 1.0}},
        {"total": 1.0},
        {"total": 0.0, "metrics": {"tokens/generated": 20, "reward/mean": float("nan")}},
    ]
    notes[0]["counts"], notes[2]["counts"] = {"judge/failed": 0, "own": 3}, {"judge/failed": 2}
    row = renamed(step_metrics(notes))
    assert row == {
        "tokens/generated": 30,
        "reward/mean": 0.5,
        "rollout/x": 0.5,
        "judge/failed": 2,
        "own": 3,
    }


def logged_run(path: Path) -> RunDirectory:
    run = RunDirectory.create(path, "seed: 0\n", 0, ["graphpo"])
    log = RunLog(path, steps=4)
    for step in range(4):
        log.log({"tokens/generated": 10.0 * (step > 0), "reward/mean": 0.1 * step}, step)
        log.log_graph([{"line": None}, {"line": json.dumps({"id": f"step-{step}/task/1"})}])
    return run


def test_a_log_of_a_full_disk_is_named_and_keeps_its_rows(tmp_path: Path) -> None:
    log = RunLog(tmp_path, steps=4)
    log.log({"reward/mean": 0.5}, 1)
    path = tmp_path / "metrics.jsonl"
    before = path.read_text()
    with (
        files_of_at_most(path.stat().st_size + 10),
        pytest.raises(OSError, match="too large") as caught,
    ):
        log.log({"reward/mean": 0.5}, 2)
    assert caught.value.filename == str(path)
    assert path.read_text() == before


def checkpoint(run: RunDirectory, step: int) -> None:
    (run.checkpoints_path / f"global_step_{step}" / "actor").mkdir(parents=True)


def logged_steps(run: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()]


def test_a_resumed_runs_logs_go_on_where_the_checkpoint_was_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = logged_run(tmp_path / "run")
    checkpoint(run, 2)  # cut off: verl had not said that it is complete
    with pytest.raises(RunError, match="ended before its first checkpoint"):
        rewind_logs(run)
    run.check_new()
    newest = run.verl_newest_path
    newest.write_text("2")
    with pytest.raises(RunError, match="already holds a run"):
        run.check_new()
    assert rewind_logs(run) == 2
    rows = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["progress"] for row in rows] == [0, 0.25, 0.5]
    assert len(run.graphs_path.read_text().splitlines()) == 3
    RunLog(run.path, steps=4).log({"tokens/generated": 5.0}, 3)
    last = json.loads(run.metrics_path.read_text().splitlines()[-1])
    assert last["tokens/total"] == 25.0


@pytest.mark.parametrize(
    ("written", "tracker", "step"),
    [
        ([3, 4], "4", 3),  # stopped between the checkpoint of step 4 and its row
        ([4], "4", 4),  # the same, of a run that keeps one
        ([1, 2], "3", 2),  # the newest was deleted
        ([2, 3], "2", 2),  # stopped while the checkpoint of step 3 was written
        ([2, 3, 4], "", 3),  # verl's file was torn
    ],
)
def test_a_resumed_run_goes_on_from_the_newest_checkpoint_that_is_in_its_log(
    written: list[int], tracker: str, step: int, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    run = logged_run(tmp_path / "run")
    for each in written:
        checkpoint(run, each)
    newest = run.verl_newest_path
    newest.write_text(tracker)
    with run.metrics_path.open("a") as metrics, run.graphs_path.open("a") as graphs:
        metrics.write('{"step": 4, "prog')
        graphs.write('{"id": "step-4')
    assert rewind_logs(run) == step == int(newest.read_text())
    assert logged_steps(run) == list(range(min(step, 3) + 1))


def test_a_run_without_a_checkpoint_or_with_a_foreign_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = logged_run(tmp_path / "run")
    run.verl_newest_path.write_text("2")
    with pytest.raises(RunError, match="holds no complete checkpoint any more"):
        rewind_logs(run)
    checkpoint(run, 2)
    foreign = ["no graph", "[1]", "{}", '{"id": "kb-7"}', '{"id": 3}', '{"id": "step-x/kb-7"}']
    for line in foreign:
        run.graphs_path.write_text(f"{line}\n")
        with pytest.raises(RunError, match=r"graphs\.jsonl: not a log of a run"):
            rewind_logs(run)
        assert logged_steps(run) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["update.learning_rate=1e-5"], "keeps update.learning_rate, which"),
        (["update.weight_decay=0", "update.betas=[0.9,0.9]"], "update.betas, update.weight_decay,"),
        (["model.lora={rank: 8}"], "keeps model.lora, which"),
        (["model.path=elsewhere"], "keeps model.path, which"),
        (["engine.gpus_per_node=3"], "keeps engine.nodes times engine.gpus_per_node, which"),
    ],
)
def test_what_verl_takes_from_its_checkpoint_is_not_changed_by_a_resume(
    changes: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    begun = config(f"output={run}", "train.max_resample=0", "model.lora={rank: 4}")
    RunDirectory.create(run, dump_config(begun), 0, [])
    assert main(["train", "--resume", str(run), "train.steps=90", *changes]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert load_config(RunConfig, run / "config.yaml") == begun


def test_a_resumed_run_draws_the_tasks_that_it_drew(reach: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "seed: 0\n", 0, [])
    tasks = load_tasks(reach / "train.jsonl")[:4]
    keep_tasks(run, tasks, resume=False)
    keep_tasks(run, tasks, resume=True)
    for others in (tasks[:3], [*tasks[1:], tasks[0]]):
        with pytest.raises(ConfigError, match=r"inside a pass over its training tasks, and \d ot"):
            keep_tasks(run, others, resume=True)


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
@pytest.mark.parametrize("override", ["actor_rollout_ref.actor=null", "+=3"])
def test_an_override_that_takes_a_section_away_is_one_line(
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = f"engine.overrides={json.dumps([override])}"
    assert main(["train", str(SEARCH), overrides, "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.verl
def test_verls_configuration_composes_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(SEARCH), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "# verl: 1 × 8 GPUs, FSDP2 over all of them, 8 vLLM servers, 8 processes" in printed
    two = ["engine.nodes=2", "engine.ray_address=auto", "engine.tensor_parallel=2"]
    assert main(["train", str(SEARCH), *two, "--dry-run"]) == 0
    assert "# verl: 2 × 8 GPUs, FSDP2 over all of them, 8 vLLM servers" in capsys.readouterr().out


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


def with_long_tasks(reach: Path, place: Path) -> Path:
    """Four tasks of reach, and between them two whose prompts do not fit."""
    rows = [json.loads(line) for line in (reach / "train.jsonl").read_text().splitlines()[:4]]
    long = [rows[0] | {"id": f"long {n}", "question": "a " * 80} for n in (1, 2)]
    train = place / "train.jsonl"
    rows = [*rows[:1], long[0], *rows[1:], long[1]]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return train


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
    override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = f"engine.overrides={json.dumps([override])}"
    assert main(["train", str(SEARCH), overrides, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert override in error.replace("True", "true") and error.count("\n") == 1
    assert main(["train", str(SEARCH), overrides, "engine.share_prefixes=false", "--dry-run"]) == 0
