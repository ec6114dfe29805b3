"""What a configuration says reaches the engine that is built from it."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import GraniteConfig, GraniteForCausalLM

from graphpo_agent.build import build_engine, build_policy, build_sft_engine
from graphpo_agent.config import RunConfig, SftConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.engines.local.options import (
    ComputeOptions,
    ImitationOptions,
    OptimizerOptions,
    UpdateOptions,
)
from graphpo_agent.errors import ModelError
from tests.worlds import ROOT, run_arguments

OPTIMIZER = {
    "update.betas": "[0.8, 0.95]",
    "update.weight_decay": "0.3",
    "update.max_grad_norm": "0.7",
    "update.max_tokens_per_batch": "777",
    "update.offload_optimizer": "true",
}
UPDATE = {
    "update.learning_rate": "0.125",
    "update.warmup_steps": "3",
    "update.minibatch_graphs": "5",
    "update.epochs": "6",
    "update.loss_aggregation": "sequence_sum",
    "mode.max_response_tokens": "88",
    "update.old_logprobs": "rollout",
    "sampling.temperature": "0.9",
    "seed": "11",
    "update.clip_low": "0.11",
    "update.clip_high": "0.22",
    "update.dual_clip": "3.5",
    "update.kl_coefficient": "0.01",
    "update.entropy_coefficient": "0.02",
}
COMPUTE = {
    "model.autocast": "true",
    "update.gradient_checkpointing": "true",
    "update.compile_layers": "true",
}


def differing(options: Any, default: Any) -> set[str]:
    """The fields in which two of a kind differ."""
    own, other = asdict(options), asdict(default)
    return {name for name in own if own[name] != other[name]}


def test_every_setting_of_the_update_reaches_the_engine(reach: Path, tmp_path: Path) -> None:
    settings = {**OPTIMIZER, **UPDATE, **COMPUTE, "model.device": "cpu"}
    path, *run = run_arguments(reach, tmp_path)
    overrides = [*run, *(f"{name}={value}" for name, value in settings.items())]
    engine = cast(Any, build_engine(load_config(RunConfig, path, overrides)))

    updating: UpdateOptions = engine._updating
    assert asdict(updating) == {
        "learning_rate": 0.125,
        "warmup_steps": 3,
        "minibatch_graphs": 5,
        "epochs": 6,
        "objective": {
            "clip_low": 0.11,
            "clip_high": 0.22,
            "dual_clip": 3.5,
            "kl": 0.01,
            "entropy": 0.02,
        },
        "loss_aggregation": "sequence_sum",
        "horizon": 88,
        "old_logprobs": "rollout",
        "temperature": 0.9,
        "seed": 11,
    }
    optimizer: OptimizerOptions = engine._options
    assert asdict(optimizer) == {
        "betas": (0.8, 0.95),
        "weight_decay": 0.3,
        "max_grad_norm": 0.7,
        "max_tokens": 777,
        "offload": True,
    }
    assert engine._compute == ComputeOptions(True, True, True)
    for given, default in (
        (updating, UpdateOptions()),
        (optimizer, OptimizerOptions()),
        (engine._compute, ComputeOptions()),
    ):
        assert differing(given, default) == set(asdict(default)), "no setting is at its default"


@pytest.mark.parametrize("gib", [0.25, 0.5])
def test_the_bound_of_what_runs_at_once_reaches_the_sampler(
    reach: Path, tmp_path: Path, gib: float
) -> None:
    run = run_arguments(reach, tmp_path, f"engine={{kind: local, max_batch_gib: {gib}}}")
    engine = cast(Any, build_engine(load_config(RunConfig, run[0], run[1:])))
    policy = engine.policy
    assert policy._max_columns == int(gib * 2**30) // policy._shape.bytes_per_token


def test_a_model_whose_logits_are_more_than_its_head_is_not_sampled_either(
    reach: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(reach / "policy", tmp_path / "granite")
    values = json.loads((directory / "config.json").read_text())
    values |= {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    config = GraniteConfig(**values, logits_scaling=8.0)
    GraniteForCausalLM(config).save_pretrained(directory)
    run = run_arguments(reach, tmp_path, f"model.path={directory}")
    with pytest.raises(ModelError, match="changes its attention or its logits"):
        build_policy(load_config(RunConfig, run[0], run[1:]))


def test_every_setting_of_a_warm_start_reaches_the_engine(reach: Path) -> None:
    overrides = [
        f"model.path={reach}/policy",
        "model.device=cpu",
        "model.autocast=true",
        "learning_rate=0.25",
        "steps=9",
        "warmup_steps=4",
        *(
            f"{name.removeprefix('update.')}={value}"
            for name, value in OPTIMIZER.items()
            if "offload" not in name
        ),
    ]
    config = load_config(SftConfig, ROOT / "configs/toy/reach_sft.yaml", overrides)
    engine = cast(Any, build_sft_engine(config))
    assert engine._imitation == ImitationOptions(0.25, 9, 4)
    assert engine._options == OptimizerOptions((0.8, 0.95), 0.3, 0.7, 777)
    assert engine._compute == ComputeOptions(autocast=True)
