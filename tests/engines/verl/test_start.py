"""How a run through verl begins and is watched, as far as it needs neither verl nor Ray."""

import io
import json
import os
import socket
from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen3_5Config

from graphpo_agent.engines.local.model import dropouts, model_config, stored_config
from graphpo_agent.engines.verl.launch import _reason, check_answers, environment
from graphpo_agent.engines.verl.nodes import named_paths
from graphpo_agent.engines.verl.settings import verl_settings
from graphpo_agent.engines.vllm_start import model_arguments
from graphpo_agent.errors import ConfigError, ModelError, RunError
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.train_verl import _check_context, _check_positions, _check_weights, _Watch
from tests.engines.tiny import long_rope
from tests.engines.verl.test_settings import config


def test_every_process_of_a_run_has_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/mine", "", os.getcwd(), "/mine"]))
    on_gpus = environment("cuda", 4.0, shares_prefixes=True)
    assert on_gpus["PYTHONPATH"].split(os.pathsep) == [os.getcwd(), "/mine"]
    assert on_gpus["VERL_ENGINE_VENDOR"] == "graphpo"
    assert not {"VERL_PLATFORM", "VLLM_CPU_KVCACHE_SPACE"} & set(on_gpus)
    here = environment("cpu", 0.4, shares_prefixes=False)
    first, *rest = here["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "sitecustomize.py").is_file() and rest == [os.getcwd(), "/mine"]
    assert "VERL_ENGINE_VENDOR" not in here and here["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment("cpu", 3.6, False)["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_a_cluster_that_nobody_listens_for_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_answers(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", "127.0.0.1:99999999"):
        with pytest.raises(RunError, match=rf"ray_address {address}: no Ray cluster") as caught:
            check_answers(address)
        assert "\n" not in str(caught.value)
    for ray_s_own in ("auto", f"ray://127.0.0.1:{port}", "local"):
        check_answers(ray_s_own)


def test_the_paths_that_a_configuration_names_are_those_that_are_there(tmp_path: Path) -> None:
    here = str(tmp_path)
    settings = {
        "model": {"path": here, "lora": None},
        "tasks": [f"{here}/away", "http://host/path", "tests.worlds:CountingReward", 3, here],
        "mode": "tests",
    }
    assert named_paths(settings) == [here, here]


def test_what_ended_a_process_is_its_own_line_or_the_last_one() -> None:
    outer, inner = RuntimeError("outer"), RuntimeError("inner")
    outer.cause, inner.cause = inner, ConfigError("no such model")  # type: ignore[attr-defined]
    assert str(_reason(outer)) == "no such model" and isinstance(_reason(outer), ConfigError)
    traced = RuntimeError("Traceback:\n  File x\nKeyError: 'a'\nfull_key: a.b\nobject_type=dict\n")
    assert "a process of verl ended: KeyError: 'a' (set GRAPHPO_RAY_LOG=1" in str(_reason(traced))
    lines = ["1 validation error for VllmConfig", "  Value error, 2 heads [type=value_error]"]
    lines.append("    For further information visit https://errors.pydantic.dev/2/v/value_error")
    refused = RuntimeError("\n".join(lines))
    assert "verl ended: Value error, 2 heads [type=value_error] (set" in str(_reason(refused))
    assert "a process of verl ended: ValueError (set" in str(_reason(ValueError()))


def row(step: int) -> str:
    return json.dumps({"step": step, "progress": step / 9, "reward/mean": 0.5}) + "\n"


def test_complete_rows_are_shown_once_and_each_gives_patience_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    run = RunDirectory.create(tmp_path / "run", "seed: 0\n", 0, ["graphpo"])
    run.metrics_path.write_text(row(0))  # shown by the run that ended
    now, begun, shown = [100.0], [], io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = _Watch(run, RunConsole(shown), 60.0, lambda: begun.append(now[0]))

    def steps() -> list[str]:
        return [line.split()[0] for line in shown.getvalue().splitlines() if "0.500" in line]

    watch()
    assert not begun
    for number, written in enumerate([row(1), row(2)[:9], row(2)[9:] + row(3), row(4)]):
        with run.metrics_path.open("a") as metrics:
            metrics.write(written)
        now[0] += 50.0 if number != 2 else 5.0
        watch()
    assert steps() == ["1", "2", "3", "4"] and begun == [150.0]
    now[0] += 59.0
    watch()
    now[0] += 2.0
    with pytest.raises(RunError, match=r"no step ended for 1 minutes \(engine.patience_minutes\)"):
        watch()


def test_contexts_reach_as_far_as_vllm_and_our_attention_do(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    sizes = {
        "max_position_embeddings": 64,
        "rope_parameters": rope | {"original_max_position_embeddings": 64},
    }
    Qwen2Config(**sizes).save_pretrained(tmp_path / "long")
    model = f"model.path={tmp_path / 'long'}"
    _check_context(config(model, "engine.max_context_tokens=256"))
    with pytest.raises(ConfigError, match="max_context_tokens is 257"):
        _check_context(config(model, "engine.max_context_tokens=257"))
    turned = Qwen2Config(hidden_size=32, num_attention_heads=4, rope_parameters=long_rope(48))
    turned.save_pretrained(tmp_path / "turned")
    model = f"model.path={tmp_path / 'turned'}"
    _check_positions(config(model, "engine.max_context_tokens=48"))
    _check_positions(config(model, "engine.max_context_tokens=49", "engine.share_prefixes=false"))
    with pytest.raises(ConfigError, match="original context of 48 tokens"):
        _check_positions(config(model, "engine.max_context_tokens=49"))


def test_weights_that_are_quantized_are_refused(tmp_path: Path) -> None:
    Qwen2Config().save_pretrained(tmp_path)
    _check_weights(str(tmp_path))
    Qwen2Config(quantization_config={"quant_method": "mxfp4"}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"weights are quantized \(mxfp4\); through verl"):
        _check_weights(str(tmp_path))


def test_of_a_model_that_takes_images_the_language_model_is_meant(tmp_path: Path) -> None:
    Qwen3_5Config(text_config={"attention_dropout": 0.1}).save_pretrained(tmp_path)
    name = str(tmp_path)
    _check_positions(config(f"model.path={name}"))
    assert dropouts(stored_config(name)) == ["text_config.attention_dropout"]
    assert dropouts(model_config(name)) == ["attention_dropout"]
    told = model_arguments(name, on_cpu=False)
    assert told == {"language_model_only": True, "mamba_ssm_cache_dtype": "float32"}
    settings = verl_settings(config(), tmp_path, "cuda", "a:b", "text")
    vllm = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    assert verl_settings(config(), tmp_path, "cuda", "a:b", "text", serving=told) == settings | {
        f"{vllm}.{option}": value for option, value in told.items()
    }
