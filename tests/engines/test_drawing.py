"""Tokens drawn from logits, and stop strings that end the text."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.engines.local.drawing import StopFinder, UniformNumbers, draw
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.errors import ModelError
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams
from tests.engines.sampling import SAMPLER, SAMPLING, check_completion, naive_logprobs, requests_for
from tests.rollout.scripted import ByteTokenizer, bytes_of


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
