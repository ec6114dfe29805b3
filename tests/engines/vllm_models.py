"""What tests with vLLM share: tiny models, what they are asked, and the model's own answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.options import ImitationOptions, OptimizerOptions
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.vllm_start import VllmOptions
from graphpo_agent.protocols import Policy
from graphpo_agent.rollout import scheduler
from graphpo_agent.types import Completion, Demonstration, Piece, SampleRequest, SamplingParams
from tests.engines.tiny import save_tokenizer

LIMIT = 128
OPTIONS = VllmOptions(max_sequences=16, kv_cache_gib=0.1)
PROMPT = [5, 9, 30]
SAMPLING = SamplingParams()
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LIMIT,
    "initializer_range": 0.2,
}
LESSON = Demonstration("1", ({"role": "user", "content": "1 + 1"},), (Piece("2 .", trained=True),))


def complete(
    policy: Policy, requests: Sequence[SampleRequest], sampling: SamplingParams = SAMPLING
) -> list[Completion]:
    """One completion per request, in order."""
    completions = scheduler.complete(policy, requests, sampling)
    assert policy.advance() == []
    return completions


def distance(
    model: PreTrainedModel,
    prefix: Sequence[int],
    completion: Completion,
    temperature: float = 1.0,
) -> float:
    """Of the log-probabilities from those of a forward pass over the whole row."""
    start, count = len(prefix) - 1, len(completion.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*prefix, *completion.token_ids]])).logits[0]
    expected = (logits[start : start + count] / temperature).log_softmax(-1)
    picked = expected[torch.arange(count), torch.tensor(completion.token_ids)]
    return float(np.abs(picked.numpy() - completion.logprobs).max())


def saved(place: Path, config: PretrainedConfig) -> LocalEngine:
    """A random model in the Hugging Face layout and a learner that was loaded from it."""
    save_tokenizer(place)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    imitation = ImitationOptions(1e-2, 20, 0)
    tokenizer = HfTokenizer.load(str(place))
    return LocalEngine(load_model(str(place)), tokenizer, OptimizerOptions(), imitation=imitation)
