"""Models that take images as well: their language model samples and learns, the rest stays."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    MambaConfig,
    MambaForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from graphpo_agent.engines.local.checkpoint import write_model
from graphpo_agent.engines.local.forward import check_flat_layout
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.memory import model_sizes
from graphpo_agent.engines.local.model import load_model, model_config, model_without_weights
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.reach import context_limit
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.errors import ModelError
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.learners import SAMPLES, make_engine, weights_of
from tests.engines.tiny import SIZES, WINDOW, save_tokenizer

LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
PER_LAYER = {"global_head_dim": 16, "hidden_size_per_layer_input": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8}
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
PATCHES = {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GRID = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}


def gemma3(text):
    config = Gemma3Config(text_config=text | LAYERS, vision_config=TINY | PATCHES)
    return Gemma3ForConditionalGeneration(config)


def gemma4(text):
    own = PER_LAYER | {"vocab_size_per_layer_input": text["vocab_size"]}
    ids = {"image_token_id": 350, "audio_token_id": 351, "boi_token_id": 352, "eoi_token_id": 353}
    config = Gemma4Config(text_config=text | LAYERS | own, vision_config=TINY | HEADS, **ids)
    return Gemma4ForConditionalGeneration(config)


def qwen3_vl(text):
    """Of which transformers has no model of text alone that loads it."""
    vision = TINY | GRID | {"deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(text_config=text | {"rope_parameters": ROPE}, vision_config=vision)
    return Qwen3VLForConditionalGeneration(config)


@pytest.fixture(params=[gemma3, gemma4, qwen3_vl], ids=lambda make: make.__name__)
def whole(request, tokenizer, tmp_path):
    """A model, saved at ``tmp_path / "model"``."""
    text = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 128}
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = request.param(SIZES | text | ends | {"initializer_range": 0.2}).float().eval()
    model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    return model


def test_it_samples_as_the_whole_model_computes(whole, tokenizer, tmp_path):
    name = str(tmp_path / "model")
    assert context_limit(model_config(name)) == 128
    policy = LocalPolicy(load_model(name), tokenizer)
    prompts = [[5, 9, 30], [7] * 20]
    requests = [SampleRequest(policy.open(p), i, 9, ()) for i, p in enumerate(prompts)]
    for prompt, completion in zip(
        prompts, complete(policy, requests, SamplingParams()), strict=True
    ):
        drawn = torch.tensor(completion.token_ids)
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = whole(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(completion.logprobs, dtype=torch.float32), expected, rtol=0, atol=1e-4
        )


def test_the_language_model_alone_learns_and_the_whole_is_saved(whole, tokenizer, tmp_path):
    model = load_model(str(tmp_path / "model"))
    before, reached = weights_of(model), set()
    engine = make_engine(model, tokenizer)
    engine.update(SAMPLES, step=0)
    for name, weight in model.named_parameters():
        of_text = "language_model" in name or "lm_head" in name
        assert weight.requires_grad == of_text, name
        if not torch.equal(weight, before[name]):
            reached.add(name)
            assert of_text, name
    assert any("layers.1" in name for name in reached)
    assert any("layers" not in name for name in reached)
    write_model(tmp_path / "saved", model, tokenizer)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    again = type(whole).from_pretrained(tmp_path / "saved")
    ids = torch.arange(7, 20)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_adapters_are_put_on_the_language_model(whole, tokenizer, tmp_path):
    name = str(tmp_path / "model")
    for targets in (None, ("o_proj", "q_proj")):
        model = add_adapters(load_model(name), LoraOptions(2, 4.0, targets))
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        assert trained and all("language_model" in name for name in trained)
        empty = add_adapters(
            model_without_weights(name, torch.float32), LoraOptions(2, 4.0, targets)
        )
        assert model_sizes(empty) == model_sizes(model)
    make_engine(model, tokenizer).update(SAMPLES, step=0)
    write_model(tmp_path / "saved", model, tokenizer)
    merged = load_model(str(tmp_path / "saved"))
    ids = torch.arange(7, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, model(input_ids=ids).logits)


def test_what_is_not_trained_takes_no_gradients_in_the_estimate(whole, tmp_path):
    sizes = model_sizes(model_without_weights(str(tmp_path / "model"), torch.float32))
    text = [p.numel() for n, p in whole.named_parameters() if "language_model" in n]
    head = [] if whole.config.tie_word_embeddings else [whole.lm_head.weight.numel()]
    assert sizes.trained_bytes == 4 * sum([*text, *head]) < sizes.weight_bytes


def test_a_model_without_attention_is_one_line(tokenizer):
    sizes = {"vocab_size": tokenizer.vocab_size, "hidden_size": 32, "num_hidden_layers": 1}
    model = MambaForCausalLM(MambaConfig(**sizes, state_size=4)).eval()
    with pytest.raises(ModelError, match="has no attention layers") as caught:
        check_flat_layout(model, ComputeOptions())
    assert "\n" not in str(caught.value)
