"""Models with linear attention layers through vLLM, which on a CPU knows them in bfloat16 only."""

from pathlib import Path

import pytest
from transformers import Qwen3NextConfig

from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.vllm import VllmEngine, VllmPolicy
from graphpo_agent.engines.vllm_start import VllmOptions
from graphpo_agent.errors import ConfigError
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.test_vllm import LESSON, SIZES, complete, distance, saved

pytestmark = pytest.mark.vllm
CONFIG = Qwen3NextConfig(
    **SIZES | {"initializer_range": 0.05, "head_dim": 64},
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


def test_what_it_learns_reaches_the_policy(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    CONFIG.vocab_size = tokenizer.vocab_size
    learner = saved(tmp_path, CONFIG)
    options = VllmOptions("bfloat16", max_sequences=16, kv_cache_gib=0.2)
    engine = VllmEngine(learner, VllmPolicy(str(tmp_path), tokenizer, options))
    for _ in range(20):
        engine.imitate([LESSON])
    prompt = tokenizer.render(LESSON.messages)
    greedy = SamplingParams(temperature=0.0)
    context = engine.policy.open(prompt)
    (learned,) = complete(engine.policy, [SampleRequest(context, 0, 20)], greedy)
    assert tokenizer.decode(learned.token_ids).startswith("2 .")
    observed = engine.policy.extend(learned.context, list(range(20, 40)))
    requests = [SampleRequest(observed, seed, 10) for seed in range(4)]
    path = [*prompt, *learned.token_ids, *range(20, 40)]
    for completion in complete(engine.policy, requests):
        assert distance(learner.model, path, completion) < 0.1


def test_a_precision_that_it_does_not_know_is_one_line(
    tokenizer: HfTokenizer,
    tmp_path: Path,
) -> None:
    CONFIG.vocab_size = tokenizer.vocab_size
    saved(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match=r"in bfloat16 only; set model\.autocast=true"):
        VllmPolicy(str(tmp_path), tokenizer, VllmOptions(max_sequences=16, kv_cache_gib=0.2))
