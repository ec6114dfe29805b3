"""Models with linear attention layers through vLLM, which on a CPU knows some in bfloat16 only."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GraniteMoeHybridConfig,
    Lfm2Config,
    OlmoHybridConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.vllm import VllmEngine, VllmPolicy
from graphpo_agent.engines.vllm_start import VllmOptions
from graphpo_agent.errors import ConfigError
from graphpo_agent.types import SampleRequest
from tests.engines.tiny import save_tokenizer
from tests.engines.vllm_models import LESSON, OPTIONS, PROMPT, SIZES, complete, distance, saved
from tests.runs import rows
from tests.worlds import run_arguments, start_command

pytestmark = pytest.mark.vllm


@pytest.fixture
def policy(reach: Path, tmp_path: Path) -> Path:
    """A random Qwen3-Next whose predictions are far from uniform; vLLM wants experts."""
    place = tmp_path / "policy"
    shutil.copytree(reach / "policy", place)
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=HfTokenizer.load(str(place)).vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=True,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    Qwen3NextForCausalLM(config).save_pretrained(place)
    return place


def test_a_run_trains_on_what_vllm_draws(reach: Path, policy: Path, tmp_path: Path) -> None:
    """In a process of its own: vLLM makes experts' groups for the first model of a process only."""
    run = tmp_path / "run"
    changes = (f"model.path={policy}", "model.autocast=true", "update.learning_rate=0.01")
    process = start_command(["train", *run_arguments(reach, run, *changes), "--engine", "vllm"])
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    found = [row["update/mismatch"] for row in rows(run) if "update/mismatch" in row]
    assert len(found) == 4, "after updates, too"
    assert max(found) < 0.05


def test_what_it_computes_on_a_gpu_only_is_one_line(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = HfTokenizer.load(str(tmp_path))
    OlmoHybridConfig(vocab_size=tokenizer.vocab_size, **SIZES).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"on a GPU only; use engine\.kind=local"):
        VllmPolicy(str(tmp_path), tokenizer, VllmOptions(dtype="bfloat16"))


def test_a_precision_that_it_does_not_know_is_one_line(policy: Path) -> None:
    tokenizer = HfTokenizer.load(str(policy))
    with pytest.raises(ConfigError, match=r"in bfloat16 only; set model\.autocast=true"):
        VllmPolicy(str(policy), tokenizer, VllmOptions())


GRANITE: dict[str, Any] = {
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
}
LFM_2: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "block_dim": 64,
    "conv_dim": 64,
}


@pytest.mark.parametrize(("kind", "own"), [(GraniteMoeHybridConfig, GRANITE), (Lfm2Config, LFM_2)])
def test_mamba_and_convolutions_learn_and_sample(
    tmp_path: Path, kind: type[PretrainedConfig], own: dict[str, Any]
) -> None:
    """In float32, behind a prompt that is computed and behind one that is known."""
    save_tokenizer(tmp_path)
    tokenizer = HfTokenizer.load(str(tmp_path))
    learner = saved(tmp_path, kind(vocab_size=tokenizer.vocab_size, **SIZES, **own))
    engine = VllmEngine(learner, VllmPolicy(str(tmp_path), tokenizer, OPTIONS))
    engine.imitate([LESSON])
    for prompt in (PROMPT, list(range(3, 110)), list(range(3, 110))):
        requests = [SampleRequest(engine.policy.open(prompt), seed, 12) for seed in range(2)]
        for drawn in complete(engine.policy, requests):
            assert distance(learner.model, prompt, drawn) < 1e-4
