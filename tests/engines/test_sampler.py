"""The sampler against a teacher-forced forward pass without any cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from graphpo_agent.engines.local.cache import PAGE
from graphpo_agent.engines.local.probe import kv_shape
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.sampling import (
    SAMPLER,
    SAMPLING,
    SHELVES,
    check_completion,
    forward_passes,
    requests_for,
)
from tests.engines.tiny import BOUNDED, LINEAR, OWN, WINDOWED

UNLIKE = ("gemma2", "gemma3", "gpt_oss", "gemma4", "deepseek_v3", "qwen3_5")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", *WINDOWED, *BOUNDED, *LINEAR, *OWN])
def test_logprobs_equal_those_of_a_forward_pass_without_cache(family, make_model, tokenizer, rows):
    model = make_model(family)
    policy = LocalPolicy(model, tokenizer)
    prompts = [[5, 9, 30], [7] * 20, list(range(3, 50))]
    requests = requests_for([policy.open(p) for p in prompts], 3)
    for request, completion in zip(requests, complete(policy, requests, SAMPLING), strict=True):
        prompt = prompts[request.seed // 1000]
        assert completion.context.num_tokens == len(prompt) + len(completion.token_ids)
        check_completion(model, prompt, completion)


def test_single_precision_agrees_with_the_forward_pass(make_model, tokenizer, rows):
    model = make_model().float()
    policy = LocalPolicy(model, tokenizer)
    requests = requests_for([policy.open([5, 9, 30])], 8)
    for completion in complete(policy, requests, SAMPLING):
        check_completion(model, [5, 9, 30], completion, tolerance=1e-5)


def test_a_completion_does_not_depend_on_its_batch(make_model, tokenizer, rows):
    model = make_model()
    prompts = [[5, 9, 30], [7] * 40, list(range(3, 20))]

    def sampled(order, max_batch_bytes=2**30):
        policy = LocalPolicy(model, tokenizer, max_batch_bytes)
        contexts = [policy.open(p) for p in prompts]
        requests = requests_for(contexts, 4)
        completions = complete(policy, [requests[i] for i in order], SAMPLING)
        return dict(zip(order, completions, strict=True))

    together = sampled(range(12))
    variants = [sampled(range(11, -1, -1)), sampled(range(12), 60_000), sampled([3, 9])]
    for variant in variants:
        for i, completion in variant.items():
            assert completion.token_ids == together[i].token_ids
            np.testing.assert_allclose(
                completion.logprobs, together[i].logprobs, rtol=0, atol=1e-12
            )


def test_a_place_that_becomes_free_is_filled_in_the_next_pass(
    make_model, tokenizer, on_shelves, monkeypatch
):
    model = make_model()
    # 64 columns are the shortest row; this is room for three of them.
    policy = LocalPolicy(model, tokenizer, 3 * 64 * kv_shape(model).bytes_per_token)
    policy._recorded = None  # what is replayed cannot be counted
    passes = forward_passes(model)
    context = policy.open([5, 9, 30])
    lengths = [2, 5, 9, 4, 3, 6]
    requests = [SampleRequest(context, s, n, stop=()) for s, n in enumerate(lengths)]
    ends = torch.tensor(sorted(tokenizer.eos_ids), device=model.device)
    monkeypatch.setattr(
        f"{SAMPLER}.sampling_logits",
        lambda head, hidden: head.layer(hidden).index_fill(-1, ends, -torch.inf),
    )
    completions = complete(policy, requests, SAMPLING)
    assert [len(c.token_ids) for c in completions] == lengths
    # The prompt; then three at a time: a row's first token needs no computation of its own.
    assert passes == [3, 3, 2, 3, 3, 2, 2, 3, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        *(("qwen2", seed) for seed in range(6)),
        *((family, seed) for family in UNLIKE for seed in range(2)),
    ],
)
def test_any_interleaving_gives_every_request_what_it_gets_alone(
    make_model, tokenizer, rows, family, seed, monkeypatch
):
    """Prompts, observations, siblings and summaries arrive while others are being drawn."""
    monkeypatch.setattr(f"{SAMPLER}._DRAWN_AT_ONCE", 3)
    monkeypatch.setattr("graphpo_agent.engines.local.cached_pass._MAX_GROUP", 70)
    monkeypatch.setattr(f"{SHELVES}._COPIED_AT_ONCE", 50)
    model = make_model(family)
    rng = np.random.default_rng(seed)
    columns = 128 if rows == "shelves" else PAGE
    room = int(rng.integers(3, 9)) * columns * kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, room)
    known = [
        (policy.open(prompt), prompt)
        for prompt in (rng.integers(3, 200, int(n)).tolist() for n in rng.integers(1, 40, 5))
    ]
    submitted, ended, unique = {}, {}, sum(len(prompt) for _, prompt in known)
    while len(ended) < 60:
        for _ in range(int(rng.integers(0, 6)) if len(submitted) < 60 else 0):
            context, path = known[int(rng.integers(len(known)))]
            if rng.random() < 0.4 and len(path) < 80:
                observation = rng.integers(3, 200, int(rng.integers(1, 30))).tolist()
                context, path = policy.extend(context, observation), [*path, *observation]
                unique += len(observation)
            sampling = SamplingParams(temperature=float(rng.choice([0.0, 0.8, 1.0])))
            request = SampleRequest(context, len(submitted), int(rng.integers(1, 20)))
            submitted[policy.submit(request, sampling)] = (path, request, sampling)
        for ticket, completion in policy.advance():
            ended[ticket] = completion
            path = [*submitted[ticket][0], *completion.token_ids]
            if len(path) < 100 and rng.random() < 0.5:
                known.append((completion.context, path))
    assert policy.take_prefilled_tokens() <= unique
    policy.release()
    alone = LocalPolicy(model, tokenizer)
    for ticket, completion in ended.items():
        path, request, sampling = submitted[ticket]
        check_completion(model, path, completion, sampling.temperature or 1.0)
        fresh = replace(request, context=alone.open(path))
        (expected,) = complete(alone, [fresh], sampling)
        assert completion.token_ids == expected.token_ids
        assert completion.finish_reason == expected.finish_reason


def test_release_drops_what_is_unfinished(make_model, tokenizer, rows):
    model = make_model()
    before = model.config._attn_implementation
    policy = LocalPolicy(model, tokenizer)
    for request in requests_for([policy.open([5, 9, 30])], 4, 30):
        policy.submit(request, SAMPLING)
    policy.advance()
    policy.release()
    assert model.config._attn_implementation == before
    assert policy.advance() == []
    (completion,) = complete(policy, requests_for([policy.open([4, 8])], 1), SAMPLING)
    check_completion(model, [4, 8], completion)


def test_no_context_grows_beyond_the_models_limit(make_model, tokenizer, rows):
    model = make_model(limit=16)
    policy = LocalPolicy(model, tokenizer)
    assert policy.max_context_tokens == 16
    requests = requests_for([policy.open([5] * 10), policy.open([5] * 16)], 2, 50)
    for completion in complete(policy, requests, SAMPLING):
        assert completion.context.num_tokens <= 16
    full = complete(policy, requests_for([policy.open([5] * n) for n in (16, 17)], 1), SAMPLING)
    assert [c.token_ids for c in full] == [(), ()]
    assert [c.finish_reason for c in full] == ["length", "length"]


def test_rows_of_very_different_length_end_apart(make_model, tokenizer, rows, monkeypatch):
    monkeypatch.setattr(f"{SHELVES}._COPIED_AT_ONCE", 8)
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    context = policy.open([5, 9, 30])
    requests = [SampleRequest(context, s, 1 + 2 * s) for s in range(12)]
    completions = complete(policy, requests, SAMPLING)
    for request, completion in zip(requests, completions, strict=True):
        if completion.finish_reason == "length":
            assert len(completion.token_ids) == request.max_new_tokens
        check_completion(model, [5, 9, 30], completion)
    again = complete(policy, requests_for([c.context for c in completions], 1, 3), SAMPLING)
    for before, completion in zip(completions, again, strict=True):
        check_completion(model, [5, 9, 30, *before.token_ids], completion)


def test_a_row_holds_all_tokens_but_the_last(make_model, tokenizer, on_shelves):
    """A shelf has 64 columns, then 128."""
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    prompt = [7] * 50
    requests = [SampleRequest(policy.open(prompt), seed, n) for n in (15, 16) for seed in range(9)]
    completions = complete(policy, requests, SAMPLING)
    assert {len(completion.token_ids) for completion in completions} >= {15, 16}
    for completion in completions:
        check_completion(model, prompt, completion)


def test_rows_that_end_with_their_first_token_leave_the_others_right(make_model, tokenizer, rows):
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    prompts = [[5, 9, 30], [7] * 20, [3, 4]]
    contexts = [policy.open(prompt) for prompt in prompts]
    short, long, shorter = contexts
    requests = [
        SampleRequest(short, 1, 1),
        SampleRequest(long, 2, 9),
        SampleRequest(shorter, 3, 1),
    ]
    for prompt, completion in zip(prompts, complete(policy, requests, SAMPLING), strict=True):
        check_completion(model, prompt, completion)


def test_released_and_foreign_contexts_are_refused(make_model, tokenizer):
    policy = LocalPolicy(make_model(), tokenizer)
    context = policy.open([5])
    policy.release()
    with pytest.raises(ValueError, match="released"):
        complete(policy, [SampleRequest(context, 0, 1)], SAMPLING)
    with pytest.raises(ValueError, match="at least one token"):
        policy.open([])


def test_sampling_leaves_the_models_own_attention_in_place(make_model, tokenizer):
    model = make_model()
    before = model.config._attn_implementation
    policy = LocalPolicy(model, tokenizer)
    complete(policy, requests_for([policy.open([5])], 1), SAMPLING)
    assert model.config._attn_implementation == before


def test_weights_are_rounded_once_for_a_rollout_and_given_back(make_model, tokenizer):
    model = make_model(spread=0.02).float()
    own = dict(model.named_parameters())
    policy = LocalPolicy(model, tokenizer, autocast=True)
    kinds, drawn = set(), []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_pre_hook(lambda layer, _: kinds.add(layer.weight.dtype))
    before = model.lm_head.weight.detach().clone()
    for weight, rounds in ((before, False), (before, True), (before.flip(0), True), (before, True)):
        with torch.no_grad():
            model.lm_head.weight.copy_(weight)
        policy._rounds = rounds  # without it, autocast rounds in every pass
        kinds.clear()
        request = SampleRequest(policy.open([5, 9, 30]), 3, 12)
        (completion,) = complete(policy, [request], SAMPLING)
        policy.release()
        assert kinds == {torch.bfloat16 if rounds else torch.float32}
        drawn.append((completion.token_ids, completion.logprobs))
    assert drawn[0] == drawn[1] == drawn[3] != drawn[2]
    assert all(model.get_parameter(name) is value for name, value in own.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_weights_are_transposed_in_memory_for_a_rollout_and_given_back(make_model, tokenizer):
    model = make_model()
    own = dict(model.named_parameters())
    policy = LocalPolicy(model, tokenizer)
    layer, strides, drawn = model.model.layers[0].mlp.up_proj, [], []
    layer.register_forward_pre_hook(lambda layer, _: strides.append(layer.weight.stride()))
    for factor in (1.0, -1.0, -1.0):  # a rollout after an update sees the new weights
        with torch.no_grad():
            layer.weight.mul_(factor)
        request = SampleRequest(policy.open([5, 9, 30]), 3, 12)
        (completion,) = complete(policy, [request], SAMPLING)
        policy.release()
        drawn.append(completion.logprobs)
    assert set(strides) == {(1, layer.out_features)}
    assert drawn[0] == drawn[2] != drawn[1]
    assert all(model.get_parameter(name) is value for name, value in own.items())
    assert layer.weight.is_contiguous()
