"""How far contexts reach, and what of them layers see."""

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2MoeConfig

from graphpo_agent.engines.local.reach import (
    check_context,
    context_limit,
    layer_windows,
    told_reach,
)
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.errors import ConfigError, ModelError
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.tiny import WINDOW, long_rope


def test_layers_have_the_windows_of_their_kind(make_model):
    assert layer_windows(make_model("qwen2").config) == {None}
    assert layer_windows(make_model("mistral").config) == {WINDOW}
    assert layer_windows(make_model("gemma3").config) == {WINDOW, None}
    config = make_model("qwen3_5").config
    config.sliding_window = 64
    assert layer_windows(config) == {None}, "its layers are of other kinds"
    assert layer_windows(Qwen2MoeConfig(sliding_window=16)) == {None}, "switched off, it is 0"


def test_positions_that_change_with_the_longest_context_bound_it(tokenizer):
    config = Phi3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=128,
        original_max_position_embeddings=24,
        rope_parameters=long_rope(24),
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Phi3ForCausalLM(config).eval()
    policy = LocalPolicy(model, tokenizer)
    prompts = [[5, 6, 7], list(range(10, 22))]
    requests = [SampleRequest(policy.open(prompt), 0, 100) for prompt in prompts]
    for prompt, completion in zip(
        prompts, complete(policy, requests, SamplingParams()), strict=True
    ):
        tokens = list(completion.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        expected = logits.log_softmax(-1)[rows, tokens]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    assert context_limit(config) == 24


def test_each_kind_of_layer_may_turn_its_positions_its_own_way(make_model):
    config = make_model(limit=100).config
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config.rope_parameters = {"full_attention": long_rope(40), "sliding_attention": plain}
    assert context_limit(config) == 40


def test_a_reach_is_told_that_neither_model_nor_user_states(make_model):
    config = make_model(limit=100).config
    assert told_reach(config, 100) == []
    config.rope_parameters = long_rope(30)
    (line,) = told_reach(config, 30)
    assert "end at 30 tokens, not at the 100" in line and "LongRoPE" in line
    assert told_reach(config, 20) == []  # as engine.max_context_tokens asks


def test_a_context_beyond_the_limit_is_refused_with_the_reason(make_model):
    config = make_model(limit=100).config
    config.name_or_path = "models/policy"
    check_context(100, context_limit(config), config)
    beyond = "engine.max_context_tokens is 101, but models/policy holds"
    with pytest.raises(ConfigError) as caught:
        check_context(101, context_limit(config), config)
    assert str(caught.value) == f"{beyond} 100 tokens"
    config.rope_parameters = long_rope(64)
    with pytest.raises(ConfigError, match=f"{beyond} 64 tokens of the 100 .* LongRoPE"):
        check_context(101, context_limit(config), config)


def test_layers_that_are_not_attention_are_refused(make_model):
    config = make_model().config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        context_limit(config)


def test_layers_that_pick_earlier_tokens_are_refused(make_model):
    config = make_model().config
    config.index_topk = 16
    with pytest.raises(ModelError, match="indexed_attention"):
        context_limit(config)
