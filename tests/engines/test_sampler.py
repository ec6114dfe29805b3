"""The sampler against a teacher-forced forward pass without any cache."""

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from graphpo_agent.engines.local.cache import PAGE
from graphpo_agent.engines.local.cached_pass import kv_shape
from graphpo_agent.engines.local.drawing import StopFinder, UniformNumbers, draw
from graphpo_agent.engines.local.recorded_passes import RecordedPasses, _Recording
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.errors import ModelError
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.rollout.scripted import ByteTokenizer, bytes_of

SAMPLING = SamplingParams()

SAMPLER = "graphpo_agent.engines.local.sampler"
SHELVES = "graphpo_agent.engines.local.shelves"
CONTEXTS = "graphpo_agent.engines.local.contexts"


@pytest.fixture(params=["where they fit", "shelves"])
def rows(request):
    """Both ways to keep the running continuations; on a GPU there is one."""
    if request.param == "shelves":
        request.getfixturevalue("on_shelves")
    return request.param


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


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
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


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_drawn_tokens_invert_the_cumulative_distribution_at_the_seeds_numbers(
    make_model, tokenizer, temperature
):
    """More of them than are drawn ahead at a time."""
    model = make_model(limit=200)
    policy = LocalPolicy(model, tokenizer)
    request = SampleRequest(policy.open([5, 9, 30]), 77, 150)
    (completion,) = complete(policy, [request], SamplingParams(temperature=temperature))
    assert len(completion.token_ids) > 64
    check_completion(model, [5, 9, 30], completion, temperature)
    numbers = np.random.Generator(np.random.Philox(key=77)).random(150)
    rows = naive_logprobs(model, [5, 9, 30], completion.token_ids, temperature).exp().numpy()
    for token, number, probs in zip(completion.token_ids, numbers, rows, strict=False):
        below = probs[:token].sum()
        assert below - 1e-9 <= number < below + probs[token] + 1e-9


@pytest.mark.parametrize("seed", [0, 2**63 + 5, 2**128 - 1])
def test_random_numbers_are_those_of_a_generator_of_the_seeds_own(seed):
    expected = np.random.Generator(np.random.Philox(key=seed)).random(200)
    numbers = UniformNumbers()
    for start, count in ((64, 64), (0, 7), (128, 72), (4, 60)):  # of another seed in between
        numbers.take(seed // 3, 8, 5)
        assert numbers.take(seed, start, count).tolist() == expected[start : start + count].tolist()


def test_temperature_zero_is_greedy_with_logprobs_of_temperature_one(make_model, tokenizer):
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    (completion,) = complete(
        policy, [SampleRequest(policy.open([4, 8]), 0, 9)], SamplingParams(temperature=0.0)
    )
    expected = naive_logprobs(model, [4, 8], completion.token_ids)
    assert completion.token_ids == tuple(expected.argmax(-1).tolist())
    check_completion(model, [4, 8], completion)


def test_top_p_keeps_the_likeliest_tokens_and_reports_untruncated_logprobs(make_model, tokenizer):
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    requests = requests_for([policy.open([4, 8])], 20, 6)
    for completion in complete(policy, requests, SamplingParams(top_p=0.5)):
        check_completion(model, [4, 8], completion)
        for token, row in zip(
            completion.token_ids, naive_logprobs(model, [4, 8], completion.token_ids), strict=True
        ):
            likelier = row.exp()[row > row[token]].sum()
            assert likelier < 0.5


@pytest.mark.parametrize(
    "sampling", [SAMPLING, SamplingParams(top_p=0.5), SamplingParams(temperature=0.0)]
)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_the_policys_divergence(
    number, sampling, make_model, tokenizer
):
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = number
    policy.submit(SampleRequest(policy.open([4, 8]), 0, 9), sampling)
    with pytest.raises(ModelError, match=r"logits are not finite.*lower update\.learning_rate"):
        policy.advance()


def test_logits_of_minus_infinity_only_forbid_their_tokens():
    logits = torch.full((2, 5), -torch.inf)
    logits[0, 1] = logits[1, 0] = logits[1, 4] = 3.0
    tokens, logprobs = draw(logits, torch.tensor([0.0, 0.75], dtype=torch.float64), SAMPLING)
    assert tokens.tolist() == [1, 4]
    np.testing.assert_allclose(logprobs, [0.0, np.log(0.5)])


@pytest.mark.parametrize("vocabulary", [7, 2500])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_a_token_of_the_vocabulary(vocabulary, number):
    logits = torch.zeros((1, vocabulary))
    logits[0, 3] = number
    (token,), (logprob,) = draw(logits, torch.tensor([0.4], dtype=torch.float64), SAMPLING)
    assert 0 <= token < vocabulary and logprob.isnan()


@given(
    vocabulary=st.sampled_from([1, 37, 1024, 1025, 2500, 5000]),
    top_p=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 99),
)
def test_a_token_is_sought_in_its_block_as_among_all(vocabulary, top_p, seed):
    """Inverting the cumulative distribution in one go, in float64, tokens of no weight included."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(9, vocabulary)) * rng.choice([0.1, 8.0])
    scores[:, 1:][rng.random((9, vocabulary - 1)) < rng.choice([0.0, 0.95])] = -np.inf
    uniform = rng.random(9)
    uniform[:2] = 0.0, 1.0 - 2.0**-53
    sampling = SamplingParams(temperature=1.0, top_p=top_p)
    tokens, logprobs = draw(torch.from_numpy(scores), torch.from_numpy(uniform), sampling)
    chances = np.exp(scores - np.logaddexp.reduce(scores, -1, keepdims=True))
    drawn = np.take_along_axis(chances, tokens[:, None].numpy(), 1)[:, 0]
    np.testing.assert_allclose(logprobs, np.log(drawn), atol=1e-12)
    for row, token, number in zip(chances, tokens.tolist(), uniform, strict=True):
        order = np.argsort(-row, kind="stable")
        outside = np.cumsum(row[order]) - row[order] >= (top_p if top_p < 1.0 else 2.0)
        kept = row.copy()
        kept[order[outside]] = 0.0
        ends = np.cumsum(kept) / kept.sum()
        assert kept[token] > 0.0
        assert ends[token] >= number - 1e-9
        assert ends[token] - kept[token] / kept.sum() <= number + 1e-9


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


def test_a_context_can_be_cut_wherever_its_last_token_was_sampled(make_model, tokenizer, rows):
    model = make_model("qwen2")
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


def test_uncomputed_contexts_that_share_a_stem_compute_it_once(make_model, tokenizer, rows):
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    stem = policy.open([5, 6, 7])
    branches = [policy.extend(stem, [10, 11]), policy.extend(stem, [12])]
    twig = policy.extend(branches[0], [13, 14])
    completions = complete(policy, requests_for([*branches, stem, twig], 1, 4), SAMPLING)
    assert policy.take_prefilled_tokens() == 3 + 2 + 1 + 2
    paths = [[5, 6, 7, 10, 11], [5, 6, 7, 12], [5, 6, 7], [5, 6, 7, 10, 11, 13, 14]]
    for path, completion in zip(paths, completions, strict=True):
        check_completion(model, path, completion)


def test_a_stem_that_ends_where_a_pass_does_is_right(make_model, tokenizer, rows, monkeypatch):
    """The branch behind it is asked for first and computed with it, eight tokens a pass."""
    monkeypatch.setattr(f"{SAMPLER}._PREFILL_TOKENS", 8)
    model = make_model()
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


def test_prompts_opened_together_are_right_in_whatever_order_they_are_asked_for(
    make_model, tokenizer, rows, monkeypatch
):
    """What they begin with alike is computed with the last one, before the others."""
    monkeypatch.setattr(f"{CONTEXTS}.SHORTEST", 1)
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    prompts = [[*range(20, 40), 5, 6], [*range(20, 40), 7], [*range(20, 30), 8]]
    contexts = [policy.open(prompt) for prompt in prompts]
    for context, prompt in reversed(list(zip(contexts, prompts, strict=True))):
        (completion,) = complete(policy, requests_for([context], 1, 4), SAMPLING)
        check_completion(model, prompt, completion)
    assert policy.take_prefilled_tokens() == 20 + 2 + 1 + 1


def test_prompts_that_begin_like_one_under_way_are_right(make_model, tokenizer, rows, monkeypatch):
    """The first is computed eight tokens a pass; the second comes in between."""
    monkeypatch.setattr(f"{SAMPLER}._PREFILL_TOKENS", 8)
    model = make_model()
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


def test_long_prompts_are_computed_in_blocks_and_the_pool_grows(
    make_model, tokenizer, rows, monkeypatch
):
    monkeypatch.setattr(f"{SAMPLER}._PREFILL_TOKENS", 40)
    monkeypatch.setattr("graphpo_agent.engines.local.cached_pass._LONGEST_PIECE", 16)
    monkeypatch.setattr("graphpo_agent.engines.local.cache._FIRST_SLOTS", 32)
    monkeypatch.setattr(f"{SHELVES}._FIRST_ROWS", 1)
    monkeypatch.setattr(f"{SHELVES}._COPIED_AT_ONCE", 50)
    model = make_model()
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


def forward_passes(model):
    """Counts the tokens of every forward pass of the model."""
    passes = []
    model.base_model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: passes.append(inputs[0].numel())
    )
    return passes


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
        lambda head, hidden: head(hidden).index_fill(-1, ends, -torch.inf),
    )
    completions = complete(policy, requests, SAMPLING)
    assert [len(c.token_ids) for c in completions] == lengths
    # The prompt; then three at a time: a row's first token needs no computation of its own.
    assert passes == [3, 3, 2, 3, 3, 2, 2, 3, 2, 1, 1, 1]


@pytest.mark.parametrize("seed", range(6))
def test_any_interleaving_gives_every_request_what_it_gets_alone(
    make_model, tokenizer, rows, seed, monkeypatch
):
    """Prompts, observations, siblings and summaries arrive while others are being drawn."""
    monkeypatch.setattr(f"{SAMPLER}._DRAWN_AT_ONCE", 3)
    monkeypatch.setattr("graphpo_agent.engines.local.cached_pass._MAX_GROUP", 70)
    monkeypatch.setattr(f"{SHELVES}._COPIED_AT_ONCE", 50)
    model = make_model()
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


@contextmanager
def saying(token_ids):
    """The policy says these tokens, whatever the prompt."""
    left = iter(token_ids)

    def logits(head, hidden):
        forced = hidden.new_full((len(hidden), len(head.weight)), -50.0)
        forced[:, next(left)] = 50.0
        return forced

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{SAMPLER}.sampling_logits", logits)
        yield


def say(make_model, tokenizer, text, **options):
    policy = LocalPolicy(make_model(), tokenizer)
    options = {"max_new_tokens": len(tokenizer.encode(text))} | options
    with saying(tokenizer.encode(text)):
        (completion,) = complete(policy, [SampleRequest(policy.open([5]), 0, **options)], SAMPLING)
    return tokenizer.decode(completion.token_ids), completion.finish_reason


def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(make_model, tokenizer):
    text = "<search> karo </search> more"
    said = say(make_model, tokenizer, text, stop=("</answer>", "</search>"))
    assert said == ("<search> karo </search>", "stop")


def test_a_stop_string_is_found_across_token_borders(make_model, tokenizer):
    text = "xx zq!w? and on"
    assert len(tokenizer.encode("zq!w")) > 2
    assert say(make_model, tokenizer, text, stop=("zq!w",)) == ("xx zq!w", "stop")
    assert say(make_model, tokenizer, "漢字 go", stop=("字",)) == ("漢字", "stop")


def test_a_stop_string_inside_a_token_ends_with_that_token(make_model, tokenizer):
    assert len(tokenizer.encode(" mentor")) == 1
    assert say(make_model, tokenizer, "the mentor of", stop=("ent",)) == ("the mentor", "stop")


def test_stop_strings_completed_before_the_least_number_of_tokens_do_not_count(
    make_model, tokenizer
):
    text = ";a;b;c"
    assert len(tokenizer.encode(text)) == 6
    options = {"stop": (";",)}
    assert say(make_model, tokenizer, text, **options) == (";", "stop")
    assert say(make_model, tokenizer, text, min_new_tokens=2, **options) == (";a;", "stop")
    assert say(make_model, tokenizer, text, min_new_tokens=3, **options) == (";a;", "stop")
    assert say(make_model, tokenizer, text, min_new_tokens=6, **options) == (";a;b;c", "length")


def test_a_place_that_is_taken_again_knows_nothing_of_the_one_before(make_model, tokenizer):
    policy = LocalPolicy(make_model(), tokenizer)
    tokens = tokenizer.encode(";a;b;c")
    lengths = []
    for least in (6, 0):
        request = SampleRequest(policy.open([5]), 0, 6, (";",), least)
        with saying(tokens):
            lengths += [len(one.token_ids) for one in complete(policy, [request], SAMPLING)]
    assert lengths == [6, 1]


def test_a_last_token_that_might_have_completed_a_stop_string_is_the_last(make_model, tokenizer):
    assert say(make_model, tokenizer, ";a;b;c", stop=("!c",)) == (";a;b;c", "length")


def test_the_end_of_sequence_token_ends_and_is_kept(make_model, tokenizer):
    policy = LocalPolicy(make_model(), tokenizer)
    request = SampleRequest(policy.open([5]), 0, 10)
    with saying([30, 31, tokenizer.eos_id, 32]):
        (completion,) = complete(policy, [request], SAMPLING)
    assert completion.token_ids == (30, 31, tokenizer.eos_id)
    assert completion.finish_reason == "eos"


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


def test_passes_padded_for_recording_draw_the_same(make_model, tokenizer, on_shelves):

    def draw(padded):
        model = make_model(limit=400)
        policy = LocalPolicy(model, tokenizer)
        # Where nothing can be recorded, as on a CPU, padded passes run as they are.
        policy._recorded = RecordedPasses(policy._decode) if padded else None
        contexts = [policy.open(prompt) for prompt in ([5, 9, 30], [7] * 60, list(range(3, 203)))]
        requests = [
            SampleRequest(context, 10 * c + s, 1 + 13 * s)
            for c, context in enumerate(contexts)
            for s in range(7)
        ]
        completions = complete(policy, requests, SAMPLING)
        return [completion.token_ids for completion in completions], completions

    exact = draw(False)
    if torch.cuda.is_available():
        padded = draw(True)
    else:
        with pytest.warns(UserWarning, match="passes of the sampler are not recorded") as warned:
            padded = draw(True)
        assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert exact[0] == padded[0]
    for one, other in zip(exact[1], padded[1], strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-10)


class Replay:
    """A recorded pass that is computed again instead."""

    def __init__(self, replay):
        self.replay = replay


class Replays(RecordedPasses):
    """Recorded passes without a GPU; remembers where each was recorded, and whether it lives."""

    def __init__(self, compute):
        super().__init__(compute)
        self.made = []

    def _record(self, shelf, inputs, columns):
        own = inputs.to(shelf.device, copy=True)
        hidden = self._compute(shelf, own, columns).clone()
        graph = Replay(lambda: hidden.copy_(self._compute(shelf, own, columns)))
        self.made.append((shelf.capacity, shelf.num_held, weakref.ref(graph)))
        return _Recording(graph, own, hidden)


def test_recordings_of_a_shelf_that_has_moved_are_forgotten(make_model, tokenizer, on_shelves):

    def draw(recorded):
        policy = LocalPolicy(make_model(), tokenizer)
        policy._recorded = Replays(policy._decode) if recorded else None
        context = policy.open([5, 9, 30])
        drawn = {}
        for count in (3, 30, 1):  # the shelf takes more memory every time
            for seed in range(count):
                policy.submit(SampleRequest(context, seed, 20, min_new_tokens=20), SAMPLING)
            for _ in range(6):
                drawn.update(policy.advance())
        while len(drawn) < 34:
            drawn.update(policy.advance())
        return {ticket: one.token_ids for ticket, one in drawn.items()}, policy

    exact, _ = draw(False)
    replayed, policy = draw(True)
    assert replayed == exact
    made = policy._recorded.made
    gc.collect()
    held = {capacity: shelf.num_held for capacity, shelf in policy._rows._shelves.items()}
    assert len({num_held for _, num_held, _ in made}) > 1, "the shelf has moved"
    for capacity, num_held, graph in made:
        assert (graph() is not None) == (num_held == held[capacity])
    policy.release()  # the weights may move now
    gc.collect()
    assert not any(graph() for _, _, graph in made)


def test_prefixes_wait_for_every_fourth_pass_beside_recorded_ones(
    make_model, tokenizer, on_shelves
):
    def draw(recorded):
        policy = LocalPolicy(make_model(), tokenizer)
        policy._recorded = Replays(policy._decode) if recorded else None
        for seed in range(6):
            policy.submit(SampleRequest(policy.open([5, 9, 30]), seed, 40), SAMPLING)
        drawn = dict(policy.advance())
        computed = []
        for prompt in ([7] * 5, [8] * 5, [11] * 5):  # one comes after the other
            policy.submit(SampleRequest(policy.open(prompt), 3, 2), SAMPLING)
            policy.take_prefilled_tokens()
            for _ in range(6):
                drawn.update(policy.advance())
                computed.append(policy.take_prefilled_tokens())
        while len(drawn) < 9:
            drawn.update(policy.advance())
        return {ticket: one.token_ids for ticket, one in drawn.items()}, computed

    exact, at_once = draw(False)
    waited, later = draw(True)
    assert waited == exact
    assert at_once == [5, 0, 0, 0, 0, 0] * 3
    assert later == [0, 0, 0, 5, 0, 0] * 3


def test_prefixes_do_not_wait_where_most_continuations_wait_for_them(
    make_model, tokenizer, on_shelves
):
    policy = LocalPolicy(make_model(), tokenizer)
    policy._recorded = Replays(policy._decode)
    policy.submit(SampleRequest(policy.open([5, 9]), 0, 40, min_new_tokens=40), SAMPLING)
    assert not policy.advance() and policy.take_prefilled_tokens() == 2
    policy.submit(SampleRequest(policy.open([7] * 5), 3, 2), SAMPLING)
    policy.advance()
    assert policy.take_prefilled_tokens() == 5


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


def test_sampled_frequencies_follow_the_models_probabilities(make_model, tokenizer):
    model = make_model()
    policy = LocalPolicy(model, tokenizer)
    requests = [SampleRequest(policy.open([5, 9]), s, 1) for s in range(4000)]
    drawn = [c.token_ids[0] for c in complete(policy, requests, SAMPLING)]
    probs = naive_logprobs(model, [5, 9], [0])[0].exp().numpy()
    counts = np.bincount(drawn, minlength=len(probs))
    common = probs > 0.01
    z = (counts - 4000 * probs)[common] / np.sqrt(4000 * probs * (1 - probs))[common]
    assert np.abs(z).max() < 4.5


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4)])
def test_top_p_is_a_share_of_all_probability(top_p, kept):
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(101, 4)
    uniform = torch.linspace(0.0, 0.9999, 101, dtype=torch.float64)
    tokens, _ = draw(logits, uniform, SamplingParams(top_p=top_p))
    assert set(tokens.tolist()) == set([1, 3, 2, 0][:kept])


def test_the_fewest_tokens_that_hold_the_share_are_kept():
    uniform = torch.linspace(0.0, 0.9999, 101, dtype=torch.float64)
    tokens, _ = draw(torch.zeros(101, 4), uniform, SamplingParams(top_p=0.5))
    assert set(tokens.tolist()) == {0, 1}


def test_a_stop_string_that_stood_there_before_is_not_completed_again():
    finder = StopFinder(ByteTokenizer(), 300)
    stop = ("xyx",)
    assert finder.table(stop)[ord("x")]
    assert finder.completes(bytes_of("a xyx"), stop)
    assert not finder.completes(bytes_of("a xyxx"), stop)
    assert finder.completes(bytes_of("a xyxyx"), stop)
