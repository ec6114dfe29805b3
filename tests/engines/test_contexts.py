"""What contexts begin with alike is computed once, whoever asks for it and when."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest
from tests.engines.sampling import (
    CONTEXTS,
    SAMPLER,
    SAMPLING,
    SHELVES,
    check_completion,
    forward_passes,
    requests_for,
)

FAMILIES = pytest.mark.parametrize("family", ["qwen2", "qwen3_5"])


def test_siblings_continue_from_a_shared_node_and_observations_are_context(
    make_model, tokenizer, rows
):
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    prompt = [5, 9, 30]
    first = complete(policy, requests_for([policy.open(prompt)], 3, 5), SAMPLING)
    for observation in ([], [40, 41]):
        contexts = [policy.extend(c.context, observation) for c in first]
        completions = complete(policy, requests_for(contexts, 2, 4), SAMPLING)
        for i, completion in enumerate(completions):
            prefix = [*prompt, *first[i // 2].token_ids, *observation]
            assert completion.context.num_tokens == len(prefix) + len(completion.token_ids)
            check_completion(model, prefix, completion)


@FAMILIES
def test_a_context_can_be_cut_wherever_its_last_token_was_sampled(
    make_model, tokenizer, rows, family
):
    model = make_model(family)
    policy = LocalPolicy(model, tokenizer)
    prompt = list(range(3, 20))
    (first,) = complete(policy, requests_for([policy.open(prompt)], 1, 9), SAMPLING)
    observed = policy.extend(first.context, [7, 8, 9])
    (second,) = complete(policy, [SampleRequest(observed, 5, 6)], SAMPLING)
    tokens = [*prompt, *first.token_ids, 7, 8, 9, *second.token_ids]
    policy.take_prefilled_tokens()
    ends = [*range(18, 26), len(tokens) - 3, len(tokens) - 1, len(tokens)]
    contexts = [policy.cut(second.context, end, tokens[end - 1]) for end in ends]
    assert [context.num_tokens for context in contexts] == ends
    requests = requests_for(contexts, 2, 5)
    for request, completion in zip(requests, complete(policy, requests, SAMPLING), strict=True):
        check_completion(model, tokens[: ends[request.seed // 1000]], completion)
    assert policy.take_prefilled_tokens() == 0
    # What is cut can be cut again.
    deeper = policy.cut(contexts[6], 20, tokens[19])
    (completion,) = complete(policy, [SampleRequest(deeper, 1, 5)], SAMPLING)
    check_completion(model, tokens[:20], completion)


@FAMILIES
def test_cuts_of_one_text_are_computed_one_behind_the_other(make_model, tokenizer, rows, family):
    """What linear layers know cannot be had from inside a text; attention has the keys there."""
    model = make_model(family)
    policy = LocalPolicy(model, tokenizer)
    prompt = [5, 9, 30]
    (first,) = complete(policy, [SampleRequest(policy.open(prompt), 3, 24)], SAMPLING)
    tokens = [*prompt, *first.token_ids]
    assert len(tokens) == 27
    passes = forward_passes(model)
    for ends, again in (([7, 11, 19, 7], 16), ([15, 23, 11], 4 + 4)):
        contexts = [policy.cut(first.context, end, tokens[end - 1]) for end in ends]
        before = sum(passes)
        requests = [SampleRequest(context, i, 1) for i, context in enumerate(contexts)]
        completions = complete(policy, requests, SAMPLING)
        if family == "qwen2":
            again = len(ends)  # the last token of each
        assert sum(passes) - before == again
        for end, completion in zip(ends, completions, strict=True):
            check_completion(model, tokens[:end], completion)


def test_every_prefix_token_is_computed_once(make_model, tokenizer, rows):
    policy = LocalPolicy(make_model(), tokenizer)
    prompt = policy.open(range(3, 40))
    assert policy.open(range(3, 40)) == prompt
    complete(policy, requests_for([prompt, prompt], 4, 5), SAMPLING)
    assert policy.take_prefilled_tokens() == 37
    assert policy.take_prefilled_tokens() == 0
    completions = complete(policy, requests_for([prompt], 2, 5), SAMPLING)
    assert policy.take_prefilled_tokens() == 0
    observed = [policy.extend(c.context, [9] * 6) for c in completions]
    complete(policy, requests_for(observed, 3, 5), SAMPLING)
    assert policy.take_prefilled_tokens() == 12


def test_the_same_text_behind_the_same_text_is_computed_once(make_model, tokenizer, rows):
    """Two siblings make the same call and read the same page; a third reads another."""
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    prompt = [5, 9, 30]
    root = policy.open(prompt)
    requests = [SampleRequest(root, seed, 4) for seed in (7, 7, 8)]
    called = complete(policy, requests, SAMPLING)
    assert called[0].token_ids == called[1].token_ids != called[2].token_ids
    policy.take_prefilled_tokens()
    page = [40, 41, 42]
    seen = [policy.extend(completion.context, page) for completion in called]
    passes = forward_passes(model)
    second = complete(policy, requests_for(seen, 1, 5), SAMPLING)
    assert policy.take_prefilled_tokens() == 2 * len(page)
    # The tokens of the two runs: their last sampled ones and the page's.
    assert passes[0] == 2 * (1 + len(page))
    for before, completion in zip(called, second, strict=True):
        check_completion(model, [*prompt, *before.token_ids, *page], completion)


@FAMILIES
def test_uncomputed_contexts_that_share_a_stem_compute_it_once(make_model, tokenizer, rows, family):
    model = make_model(family)
    policy = LocalPolicy(model, tokenizer)
    stem = policy.open([5, 6, 7])
    branches = [policy.extend(stem, [10, 11]), policy.extend(stem, [12])]
    twig = policy.extend(branches[0], [13, 14])
    completions = complete(policy, requests_for([*branches, stem, twig], 1, 4), SAMPLING)
    assert policy.take_prefilled_tokens() == 3 + 2 + 1 + 2
    paths = [[5, 6, 7, 10, 11], [5, 6, 7, 12], [5, 6, 7], [5, 6, 7, 10, 11, 13, 14]]
    for path, completion in zip(paths, completions, strict=True):
        check_completion(model, path, completion)


@FAMILIES
def test_a_stem_that_ends_where_a_pass_does_is_right(
    make_model, tokenizer, rows, family, monkeypatch
):
    """The branch behind it is asked for first and computed with it, eight tokens a pass."""
    monkeypatch.setattr(f"{SAMPLER}._PREFILL_TOKENS", 8)
    model = make_model(family)
    policy = LocalPolicy(model, tokenizer)
    stem = policy.open(range(20, 28))
    branch = policy.extend(stem, [5, 6, 7])
    for context, path in ((branch, [*range(20, 28), 5, 6, 7]), (stem, list(range(20, 28)))):
        (completion,) = complete(policy, requests_for([context], 1, 4), SAMPLING)
        check_completion(model, path, completion)


@pytest.mark.parametrize("at_once", [True, False], ids=["opened at once", "one after another"])
def test_what_prompts_begin_with_alike_is_computed_once(
    make_model, tokenizer, rows, at_once, monkeypatch
):
    """Instructions before every question, a prompt that ends inside them, one of another kind."""
    monkeypatch.setattr(f"{CONTEXTS}.SHORTEST", 1)
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    rules = list(range(20, 40))
    prompts = [[*rules, 5, 6], [*rules, 5, 7, 8], rules[:12], [9, *rules], [*rules, 5, 6], [9]]
    if at_once:
        contexts = [policy.open(prompt) for prompt in prompts]
        completions = complete(policy, requests_for(contexts, 2, 5), SAMPLING)
    else:
        contexts, completions = [], []
        for c, prompt in enumerate(prompts):
            contexts.append(policy.open(prompt))
            requests = [replace(r, seed=r.seed + 1000 * c) for r in requests_for(contexts[-1:], 2)]
            completions += complete(policy, requests, SAMPLING)
    assert policy.take_prefilled_tokens() == 20 + 1 + 1 + 2 + 21
    assert contexts[0] == contexts[4]
    assert [context.num_tokens for context in contexts] == list(map(len, prompts))
    for c, completion in enumerate(completions):
        check_completion(model, prompts[c // 2], completion)


@FAMILIES
def test_prompts_opened_together_are_right_in_whatever_order_they_are_asked_for(
    make_model, tokenizer, rows, family, monkeypatch
):
    """What they begin with alike is computed with the last one, before the others."""
    monkeypatch.setattr(f"{CONTEXTS}.SHORTEST", 1)
    model = make_model(family)
    policy = LocalPolicy(model, tokenizer)
    prompts = [[*range(20, 40), 5, 6], [*range(20, 40), 7], [*range(20, 30), 8]]
    contexts = [policy.open(prompt) for prompt in prompts]
    for context, prompt in reversed(list(zip(contexts, prompts, strict=True))):
        (completion,) = complete(policy, requests_for([context], 1, 4), SAMPLING)
        check_completion(model, prompt, completion)
    assert policy.take_prefilled_tokens() == 20 + 2 + 1 + 1


@FAMILIES
def test_prompts_that_begin_like_one_under_way_are_right(
    make_model, tokenizer, rows, family, monkeypatch
):
    """The first is computed eight tokens a pass; the second comes in between."""
    monkeypatch.setattr(f"{SAMPLER}._PREFILL_TOKENS", 8)
    model = make_model(family)
    policy = LocalPolicy(model, tokenizer)
    passes = forward_passes(model)
    monkeypatch.setattr(f"{CONTEXTS}.SHORTEST", 1)
    prompts = [list(range(20, 50)), [*range(20, 45), 5], list(range(20, 40)), [*range(20, 45), 6]]
    ended, tickets = {}, []
    for prompt in prompts:
        tickets.append(policy.submit(SampleRequest(policy.open(prompt), 7, 5), SAMPLING))
        ended |= policy.advance()
        ended |= policy.advance()
    while len(ended) < len(tickets):
        ended |= policy.advance()
    drawn = sum(len(completion.token_ids) - 1 for completion in ended.values())
    assert policy.take_prefilled_tokens() == sum(passes) - drawn
    for ticket, prompt in zip(tickets, prompts, strict=True):
        check_completion(model, prompt, ended[ticket])


@given(
    prompts=st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=8), min_size=1, max_size=8),
    computed=st.integers(0, 4),
    shortest=st.integers(1, 3),
)
@example(prompts=[[3, 3, 3, 3], [3, 3, 3, 4], [3, 5]], computed=1, shortest=1)
@example(prompts=[[3, 3, 3, 3], [3, 3, 3, 4], [3, 3, 5]], computed=1, shortest=1)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_prompts_are_computed_as_if_alone(
    make_model, tokenizer, monkeypatch, prompts, computed, shortest
):
    """Some are computed before the others are opened."""
    monkeypatch.setattr(f"{CONTEXTS}.SHORTEST", shortest)
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    for part in (prompts[:computed], prompts[computed:]):
        contexts = [policy.open(prompt) for prompt in part]
        completions = complete(policy, requests_for(contexts, 1, 4), SAMPLING)
        for prompt, completion in zip(part, completions, strict=True):
            check_completion(model, prompt, completion)
    prefilled = policy.take_prefilled_tokens()
    distinct = len({tuple(prompt[: k + 1]) for prompt in prompts for k in range(len(prompt))})
    if shortest == 1:
        assert prefilled == distinct
    else:
        assert distinct <= prefilled <= sum(map(len, prompts))


@FAMILIES
def test_long_prompts_are_computed_in_blocks_and_the_pool_grows(
    make_model, tokenizer, rows, family, monkeypatch
):
    monkeypatch.setattr(f"{SAMPLER}._PREFILL_TOKENS", 40)
    monkeypatch.setattr("graphpo_agent.engines.local.cached_pass._LONGEST_PIECE", 16)
    monkeypatch.setattr("graphpo_agent.engines.local.cache._FIRST_SLOTS", 32)
    monkeypatch.setattr(f"{SHELVES}._FIRST_ROWS", 1)
    monkeypatch.setattr(f"{SHELVES}._COPIED_AT_ONCE", 50)
    model = make_model(family)
    policy = LocalPolicy(model, tokenizer)
    prompts = [[3 + i] * (40 + 7 * i) for i in range(4)]
    contexts = [policy.open(p) for p in prompts]
    passes = forward_passes(model)
    completions = complete(policy, requests_for(contexts, 1, 9), SAMPLING)
    drawn = sum(len(completion.token_ids) - 1 for completion in completions)
    assert sum(passes) == sum(map(len, prompts)) + drawn
    assert max(passes) <= 40 + len(prompts)
    again = complete(policy, requests_for(contexts, 1, 9), SAMPLING)
    for prompt, *ended in zip(prompts, completions, again, strict=True):
        for completion in ended:
            check_completion(model, prompt, completion)
