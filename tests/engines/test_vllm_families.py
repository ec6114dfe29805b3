"""Families of models through vLLM: what it takes over of their weights, and what it draws."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    Lfm2MoeConfig,
    MixtralConfig,
    Olmo2Config,
    PretrainedConfig,
)

from graphpo_agent.engines.local.checkpoint_weights import weights_as_saved
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.vllm import (
    VllmEngine,
    VllmPolicy,
    _renew_head,
    _tied_to_head,
)
from graphpo_agent.errors import ConfigError
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.tiny import save_tokenizer
from tests.engines.vllm_models import (
    LESSON,
    LIMIT,
    OPTIONS,
    PROMPT,
    SIZES,
    complete,
    distance,
    saved,
)
from tests.worlds import run_arguments, start_command

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    place = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(place)
    return HfTokenizer.load(str(place))


def test_a_model_of_which_vllm_has_no_class_of_its_own_learns_and_samples(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    config = Olmo2Config(vocab_size=tokenizer.vocab_size, tie_word_embeddings=True, **SIZES)
    learner = saved(tmp_path, config)
    engine = VllmEngine(learner, VllmPolicy(str(tmp_path), tokenizer, OPTIONS))
    for _ in range(20):
        engine.imitate([LESSON])
    prompt = tokenizer.render(LESSON.messages)
    greedy = SamplingParams(temperature=0.0)
    (learned,) = complete(engine.policy, [SampleRequest(engine.policy.open(prompt), 0, 20)], greedy)
    assert tokenizer.decode(learned.token_ids).startswith("2 .")
    assert distance(learner.model, prompt, learned) < 1e-4
    add_adapters(learner.model, LoraOptions(rank=2, alpha=4.0))
    with pytest.raises(ConfigError, match=r"model\.lora needs"):
        VllmEngine(learner, cast(VllmPolicy, engine.policy))


@pytest.mark.parametrize("kind", [MixtralConfig, Lfm2MoeConfig])
@pytest.mark.parametrize("lora", [False, True])
def test_experts_are_handed_over_as_a_checkpoint_has_them(
    lora: bool, kind: type[PretrainedConfig], tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_dense_layers": 0}
    experts |= {"layer_types": ["full_attention"] * 2, "tie_word_embeddings": False}
    model = saved(tmp_path, kind(vocab_size=tokenizer.vocab_size, **experts, **SIZES)).model
    if lora:
        add_adapters(model, LoraOptions(rank=2, alpha=4.0, target_modules=("q_proj",)))
    handed = dict(weights_as_saved(model))
    there = load_file(tmp_path / "model.safetensors")
    assert handed.keys() == there.keys() != model.state_dict().keys()
    assert all(torch.equal(handed[name], there[name]) for name in there)


def test_contexts_go_beyond_sliding_windows(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    sizes = SIZES | {"layer_types": kinds, "sliding_window": 20, "head_dim": 32}
    learner = saved(tmp_path, Gemma3TextConfig(vocab_size=tokenizer.vocab_size, **sizes))
    engine = VllmEngine(learner, VllmPolicy(str(tmp_path), tokenizer, OPTIONS))
    engine.imitate([LESSON])
    prompts = [PROMPT, list(range(3, 90))]
    requests = [SampleRequest(engine.policy.open(prompt), 0, LIMIT) for prompt in prompts]
    for prompt, drawn in zip(prompts, complete(engine.policy, requests), strict=True):
        assert len(drawn.token_ids) > 20
        assert distance(learner.model, prompt, drawn) < 1e-4


def test_scaled_and_bounded_logits_and_keys_of_two_sizes(
    tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    sizes = SIZES | {"vocab_size": tokenizer.vocab_size, "head_dim": 32}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    own = {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0}
    configs = [
        GraniteConfig(**sizes, logits_scaling=4.0),
        Gemma4TextConfig(**sizes, **kinds, **own, attention_k_eq_v=False),
    ]
    for config in configs:
        place = tmp_path / config.model_type
        learner = saved(place, config)
        engine = VllmEngine(learner, VllmPolicy(str(place), tokenizer, OPTIONS))
        engine.imitate([LESSON])
        request = SampleRequest(engine.policy.open(PROMPT), 0, LIMIT)
        (drawn,) = complete(engine.policy, [request])
        assert distance(learner.model, PROMPT, drawn) < 1e-4


def test_a_tied_head_is_found_inside_a_model_that_takes_images() -> None:
    """vLLM's classes of such models need torchvision: this is how their parts are named."""
    text, head = nn.Module(), nn.Linear(2, 3, bias=False)
    text.embed_tokens, text.lm_head = nn.Embedding(3, 2), head
    model = nn.Module()
    model.language_model, model.vision_tower = text, nn.Linear(2, 2)
    assert _tied_to_head(model) is None
    head.weight = text.embed_tokens.weight
    place, source = cast(tuple[str, str], _tied_to_head(model))
    assert (place, source) == ("language_model.lm_head", "language_model.embed_tokens.weight")
    packed: list[nn.Module] = []
    head.quant_method = nn.Module()
    head.quant_method.process_weights_after_loading = packed.append
    head.weight = nn.Parameter(torch.zeros(3, 2))  # as a CPU has packed it
    _renew_head(model, place, source)
    assert packed == [head] and torch.equal(head.weight, text.embed_tokens.weight)


def test_weights_that_vllm_does_not_take_over_are_told(
    reach: Path, tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    """The experts of gpt-oss stay as loaded. In a process of its own, as experts have to be."""
    policy = tmp_path / "policy"
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": LIMIT // 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = SIZES | experts | {"vocab_size": tokenizer.vocab_size, "head_dim": 32}
    saved(policy, GptOssConfig(rope_parameters=rope, **sizes))
    changes = (f"model.path={policy}", "model.autocast=true")
    arguments = run_arguments(reach, tmp_path / "run", *changes)
    process = start_command(["train", *arguments, "--engine", "vllm"])
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2, errors
    assert "or does not take all weights over" in errors.splitlines()[-1]
