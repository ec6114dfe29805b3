"""What tests of the sampler share: requests, and a forward pass without any cache."""

import numpy as np
import torch

from graphpo_agent.types import SampleRequest, SamplingParams

SAMPLING = SamplingParams()
SAMPLER = "graphpo_agent.engines.local.sampler"
SHELVES = "graphpo_agent.engines.local.shelves"
CONTEXTS = "graphpo_agent.engines.local.contexts"


def naive_logprobs(model, prefix, continuation, temperature=1.0):
    """[n, V] log-probabilities at each token of ``continuation``: one row, no cache."""
    ids = torch.tensor([[*prefix, *continuation]], device=model.device)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
    start = len(prefix) - 1
    return (logits[start : start + len(continuation)] / temperature).log_softmax(-1).cpu()


def check_completion(model, prefix, completion, temperature=1.0, tolerance=1e-10):
    expected = naive_logprobs(model, prefix, completion.token_ids, temperature)
    picked = expected[torch.arange(len(expected)), torch.tensor(completion.token_ids)]
    np.testing.assert_allclose(completion.logprobs, picked.numpy(), rtol=0, atol=tolerance)


def requests_for(contexts, count, max_new_tokens=12, **options):
    return [
        SampleRequest(context, 1000 * c + s, max_new_tokens, **options)
        for c, context in enumerate(contexts)
        for s in range(count)
    ]


def forward_passes(model):
    """Counts the tokens of every forward pass of the model."""
    passes = []
    model.base_model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: passes.append(inputs[0].numel())
    )
    return passes
