"""The vLLM engine against the Hugging Face model and against the local sampler, for real."""

import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.lora import LoraOptions, add_adapters
from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.options import ImitationOptions, OptimizerOptions
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.ports import PORTS
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.vllm import VllmEngine, VllmPolicy
from graphpo_agent.engines.vllm_start import VllmOptions
from graphpo_agent.errors import ConfigError, ModelError
from graphpo_agent.protocols import Policy
from graphpo_agent.types import Completion, SampleRequest, SamplingParams
from tests.engines.tiny import save_tokenizer
from tests.engines.turns import check_turns, draw_turns, learner_of_call, teach_call
from tests.engines.vllm_models import (
    LESSON,
    LIMIT,
    OPTIONS,
    PROMPT,
    SAMPLING,
    SIZES,
    complete,
    distance,
)

pytestmark = pytest.mark.vllm
BLOCK = 16
EXTRA_IDS = 30  # embeddings beyond the tokenizer's vocabulary, as many models have
TOKEN_BYTES = 2 * 2 * 32 * 4  # keys and values of two layers, one head of 32 numbers in 32 bits


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vllm") / "policy"
    save_tokenizer(place)
    save_model(place, seed=0)
    return place


def save_model(place: Path, seed: int, extra_ids: int = EXTRA_IDS) -> None:
    """A random float32 Qwen2 with tied embeddings; spread far from uniform."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=HfTokenizer.load(str(place)).vocab_size + extra_ids,
        tie_word_embeddings=True,
        **SIZES,
    )
    Qwen2ForCausalLM(config).save_pretrained(place)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> HfTokenizer:
    """With bytes of no ASCII text among the ends of sequence, so that a random model ends."""
    return HfTokenizer(HfTokenizer.load(str(directory)).hf, extra_eos_ids=range(150, 165))


@pytest.fixture
def model(directory: Path) -> PreTrainedModel:
    return load_model(str(directory))


@pytest.fixture(scope="module")
def started(directory: Path, tokenizer: HfTokenizer) -> VllmPolicy:
    return VllmPolicy(str(directory), tokenizer, OPTIONS)


@pytest.fixture
def policy(started: VllmPolicy, directory: Path) -> Iterator[VllmPolicy]:
    yield started
    started.load_weights(load_model(str(directory)).state_dict().items())
    started.take_prefilled_tokens()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_p=0.6),
        SamplingParams(top_p=0.5),
        SamplingParams(temperature=0.0),
    ],
)
def test_it_draws_what_the_local_sampler_draws_with_the_models_logprobs(
    sampling: SamplingParams,
    policy: VllmPolicy,
    model: PreTrainedModel,
    tokenizer: HfTokenizer,
) -> None:
    prompts = [PROMPT, [7] * 20, list(range(3, 50))]
    local = LocalPolicy(model, tokenizer)
    seeds = [2**63 + 5, 0, 2**64 - 1, 17]

    def requests(of: Policy) -> list[SampleRequest]:
        return [SampleRequest(of.open(p), seed, 70) for p in prompts for seed in seeds]

    ours = complete(policy, requests(policy), sampling)
    theirs = complete(local, requests(local), sampling)
    # Rounding may tip the draw of a token, so a stray difference is none of the engine's.
    same = [a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) >= len(same) - 1
    for i, completion in enumerate(ours):
        prompt = prompts[i // len(seeds)]
        assert completion.context.num_tokens == len(prompt) + len(completion.token_ids)
        assert distance(model, prompt, completion, sampling.temperature or 1.0) < 1e-4


def test_it_meets_where_no_connection_is_made(policy: VllmPolicy) -> None:
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    assert store.port in PORTS


def test_a_completion_does_not_depend_on_its_batch(policy: VllmPolicy) -> None:
    prompts = [PROMPT, [7] * 40, list(range(3, 20))]

    def sampled(order: Sequence[int]) -> dict[int, Completion]:
        contexts = [policy.open(p) for p in prompts]
        requests = [SampleRequest(contexts[i % 3], seed=i, max_new_tokens=12) for i in order]
        completions = dict(zip(order, complete(policy, requests), strict=True))
        policy.release()
        return completions

    together = sampled(range(24))  # more than run at once
    for order in (range(23, -1, -1), [3, 20]):
        for i, completion in sampled(order).items():
            assert completion.token_ids == together[i].token_ids
            np.testing.assert_allclose(completion.logprobs, together[i].logprobs, atol=1e-5)


def test_greedy_and_sampled_continuations_share_a_batch(
    policy: VllmPolicy, model: PreTrainedModel
) -> None:
    request = SampleRequest(policy.open(PROMPT), 4, 10)
    hot, cold = SamplingParams(temperature=1.5), SamplingParams(temperature=0.0)
    alone = [complete(policy, [request], sampling)[0] for sampling in (hot, cold)]
    tickets = [policy.submit(request, sampling) for sampling in (hot, cold, hot)]
    ended: dict[int, Completion] = {}
    while len(ended) < 3:
        ended |= dict(policy.advance())
    mixed = [ended[ticket].token_ids for ticket in tickets]
    assert mixed == [alone[0].token_ids, alone[1].token_ids, alone[0].token_ids]
    assert distance(model, PROMPT, ended[tickets[0]], 1.5) < 1e-4


def test_a_stop_string_ends_with_the_token_that_completes_it(
    policy: VllmPolicy, tokenizer: HfTokenizer
) -> None:
    requests = [SampleRequest(policy.open(PROMPT), seed, 40) for seed in range(8)]
    free = complete(policy, requests)
    text = tokenizer.decode(free[0].token_ids)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = complete(
        policy, [SampleRequest(each.context, each.seed, 40, stop=(stop,)) for each in requests]
    )
    assert any(each.finish_reason == "stop" for each in stopped)
    for whole, cut in zip(free, stopped, strict=True):
        sizes = range(1, len(whole.token_ids) + 1)
        ends = [n for n in sizes if stop in tokenizer.decode(whole.token_ids[:n])]
        length = min(ends, default=len(whole.token_ids))
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)


def test_min_new_tokens_delays_stop_strings_only(
    policy: VllmPolicy, tokenizer: HfTokenizer
) -> None:
    requests = [SampleRequest(policy.open(PROMPT), seed, 60) for seed in range(64)]
    free = complete(policy, requests)
    stop = tuple("abcdefghijklmnopqrstuvwxyz ")
    delayed = complete(
        policy,
        [SampleRequest(each.context, each.seed, 60, stop, min_new_tokens=20) for each in requests],
    )
    for whole, cut in zip(free, delayed, strict=True):
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert cut.finish_reason == "eos" or len(cut.token_ids) >= 20
    assert any(each.finish_reason == "stop" for each in delayed)
    assert any(len(each.token_ids) < 20 for each in delayed), "no early end of sequence to see"


def test_the_end_of_sequence_is_the_last_token(policy: VllmPolicy, tokenizer: HfTokenizer) -> None:
    requests = [SampleRequest(policy.open(PROMPT), seed, 100) for seed in range(16)]
    completions = complete(policy, requests)
    assert {each.finish_reason for each in completions} >= {"eos"}
    for each in completions:
        has_eos = [token_id in tokenizer.eos_ids for token_id in each.token_ids]
        assert has_eos[-1] == (each.finish_reason == "eos") and not any(has_eos[:-1])


def test_no_context_grows_beyond_the_limit(policy: VllmPolicy) -> None:
    assert policy.max_context_tokens == LIMIT
    almost, full = [7] * (LIMIT - 3), [7] * LIMIT
    contexts = [policy.open(prompt) for prompt in (almost, full, [*full, 8])]
    requests = [SampleRequest(context, 1, 10) for context in contexts]
    cut, none, over = complete(policy, [*requests, SampleRequest(contexts[0], 1, 0)])[:3]
    assert len(cut.token_ids) <= 3 and cut.context.num_tokens <= LIMIT
    for completion, context in ((none, contexts[1]), (over, contexts[2])):
        assert completion == Completion((), (), "length", context)


def test_observations_follow_and_shared_prefixes_are_computed_once(
    policy: VllmPolicy, model: PreTrainedModel
) -> None:
    prompt = list(range(3, 3 + 5 * BLOCK))
    first = complete(policy, [SampleRequest(policy.open(prompt), s, 9) for s in range(6)])
    # One prompt, and for each sibling the last block, from whose end the first token is drawn.
    assert policy.take_prefilled_tokens() <= len(prompt) + 5 * BLOCK
    observation = [40, 41, 42, 43]
    second = complete(
        policy,
        [SampleRequest(policy.extend(each.context, observation), 9, 5) for each in first],
    )
    total = sum(each.context.num_tokens - len(each.token_ids) for each in second)
    assert 0 < policy.take_prefilled_tokens() <= 6 * 2 * BLOCK < total / 2
    for before, after in zip(first, second, strict=True):
        prefix = [*prompt, *before.token_ids, *observation]
        assert after.context.num_tokens == len(prefix) + len(after.token_ids)
        assert distance(model, prefix, after) < 1e-4


def test_a_cut_context_is_the_context_of_its_tokens(policy: VllmPolicy) -> None:
    prompt = list(range(5, 25))
    (first,) = complete(policy, [SampleRequest(policy.open(prompt), 1, 8)])
    kept = first.token_ids[:3]
    cut = policy.cut(first.context, len(prompt) + 3, kept[-1])
    same = policy.open([*prompt, *kept])
    requests = [SampleRequest(context, 2, 6) for context in (cut, same)]
    once, again = complete(policy, requests)
    assert cut.num_tokens == same.num_tokens and once.token_ids == again.token_ids


def test_released_and_foreign_contexts_are_refused(
    policy: VllmPolicy, model: PreTrainedModel, tokenizer: HfTokenizer
) -> None:
    old = policy.open(PROMPT)
    unfinished = [policy.submit(SampleRequest(old, s, 50), SAMPLING) for s in range(3)]
    policy.advance()
    policy.release()
    assert policy.advance() == []
    foreign = LocalPolicy(model, tokenizer).open(PROMPT)
    for context in (old, foreign):
        with pytest.raises(ValueError, match="released"):
            policy.submit(SampleRequest(context, 0, 5), SAMPLING)
        with pytest.raises(ValueError, match="released"):
            policy.extend(context, [1])
    again = complete(policy, [SampleRequest(policy.open(PROMPT), 0, 5)])
    assert again[0].token_ids and len(unfinished) == 3


@pytest.mark.parametrize(
    "place",
    ["vllm.v1.core.sched.scheduler.Scheduler.get_grammar_bitmask", "vllm.LLMEngine.add_request"],
)
def test_after_an_interrupt_a_release_makes_the_policy_good_again(
    place: str, policy: VllmPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the model's pass and the draw; with the request taken and its ticket not given."""

    def sampled() -> list[tuple[int, ...]]:
        requests = [SampleRequest(policy.open(PROMPT), seed, 20) for seed in range(4)]
        return [completion.token_ids for completion in complete(policy, requests)]

    before = sampled()
    owner, name = place.rsplit(".", 1)
    whole = getattr(pkgutil.resolve_name(owner), name)

    def interrupted(*given: Any) -> None:
        whole(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            sampled()
    policy.release()
    assert sampled() == before


def test_logprobs_follow_the_weights_every_time_they_change(
    policy: VllmPolicy, model: PreTrainedModel
) -> None:
    generator = torch.Generator().manual_seed(3)
    before = complete(policy, [SampleRequest(policy.open(PROMPT), 1, 20)])[0]
    for _ in range(3):
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=generator)
        policy.load_weights(model.state_dict().items())
        after = complete(policy, [SampleRequest(policy.open(PROMPT), 1, 20)])[0]
        assert distance(model, PROMPT, after) < 1e-4
        assert after.logprobs != before.logprobs
        before = after


def test_weights_after_those_whose_handover_was_interrupted_are_taken_whole(
    policy: VllmPolicy, model: PreTrainedModel
) -> None:
    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from islice(model.state_dict().items(), 5)  # ends amid a layer's
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policy.load_weights(interrupted())
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1.1
    policy.load_weights(model.state_dict().items())
    after = complete(policy, [SampleRequest(policy.open(PROMPT), 1, 20)])[0]
    assert distance(model, PROMPT, after) < 1e-4


def test_what_the_learner_learns_reaches_the_policy(
    policy: VllmPolicy, model: PreTrainedModel, tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    learner = LocalEngine(
        model, tokenizer, OptimizerOptions(), imitation=ImitationOptions(1e-2, 20, 0)
    )
    engine = VllmEngine(learner, policy)
    prompt = tokenizer.render(LESSON.messages)
    engine.save_checkpoint(tmp_path / "before")
    for _ in range(20):
        engine.imitate([LESSON])
    greedy = SamplingParams(temperature=0.0)
    (learned,) = complete(policy, [SampleRequest(policy.open(prompt), 0, 20)], greedy)
    assert tokenizer.decode(learned.token_ids) == "2 ." and learned.finish_reason == "eos"
    assert distance(model, prompt, learned) < 1e-4
    engine.load_checkpoint(tmp_path / "before")
    (forgotten,) = complete(policy, [SampleRequest(policy.open(prompt), 0, 20)], greedy)
    assert forgotten.token_ids != learned.token_ids
    assert distance(load_model(str(tmp_path / "before")), prompt, forgotten) < 1e-4


def test_a_turn_that_goes_on_behind_a_stop_string_is_as_if_drawn_at_once(
    policy: VllmPolicy, model: PreTrainedModel, tokenizer: HfTokenizer
) -> None:
    teach_call(VllmEngine(learner_of_call(model, tokenizer), policy))
    drawn = draw_turns(policy)
    check_turns(drawn, model, tokenizer)
    wanted = draw_turns(LocalPolicy(model, tokenizer))
    same = [a.token_ids == b.token_ids for a, b in zip(drawn, wanted, strict=True)]
    assert sum(same) >= len(same) - 1


def test_adapters_reach_the_policy_added_to_the_weights(
    policy: VllmPolicy, model: PreTrainedModel, tokenizer: HfTokenizer
) -> None:
    add_adapters(model, LoraOptions(rank=4, alpha=8.0))
    learner = LocalEngine(
        model, tokenizer, OptimizerOptions(), imitation=ImitationOptions(1e-2, 10, 0)
    )
    engine = VllmEngine(learner, policy)
    before = complete(policy, [SampleRequest(policy.open(PROMPT), 2, 20)])[0]
    for _ in range(5):
        engine.imitate([LESSON])
    after = complete(policy, [SampleRequest(policy.open(PROMPT), 2, 20)])[0]
    assert after.logprobs != before.logprobs
    assert distance(model, PROMPT, after) < 1e-4


def test_a_checkpoint_of_adapters_samples_with_them(
    directory: Path, model: PreTrainedModel, tokenizer: HfTokenizer, tmp_path: Path
) -> None:
    add_adapters(model, LoraOptions(rank=4, alpha=8.0))
    imitation = ImitationOptions(1e-2, 10, 0)
    learner = LocalEngine(model, tokenizer, OptimizerOptions(), imitation=imitation)
    for _ in range(5):
        learner.imitate([LESSON])
    learner.save_checkpoint(tmp_path / "step")
    policy = VllmPolicy(str(tmp_path / "step"), tokenizer, OPTIONS)
    (drawn,) = complete(policy, [SampleRequest(policy.open(PROMPT), 2, 20)])
    assert (
        distance(model, PROMPT, drawn) < 1e-4 < distance(load_model(str(directory)), PROMPT, drawn)
    )


@pytest.mark.parametrize("unheard", ["", "layers.1.mlp.down_proj", "layers.0.self_attn.k_proj"])
def test_a_policy_that_does_not_take_all_weights_over_is_refused(
    unheard: str,
    policy: VllmPolicy,
    directory: Path,
    model: PreTrainedModel,
    tokenizer: HfTokenizer,
) -> None:
    class Deaf(VllmPolicy):
        """It keeps some of the weights that it has, or all."""

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            kept = load_model(str(directory)).state_dict()
            heard = {name: weight for name, weight in weights if unheard not in name}
            super().load_weights((kept | heard).items())

    policy.__class__ = Deaf
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    try:
        learner = LocalEngine(model, tokenizer, OptimizerOptions())
        with pytest.raises(ConfigError, match="or does not take all weights over") as caught:
            VllmEngine(learner, policy)
        assert "\n" not in str(caught.value)
    finally:
        policy.__class__ = VllmPolicy
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_a_policy_that_has_diverged_is_told_at_once(
    policy: VllmPolicy, model: PreTrainedModel
) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    policy.load_weights(model.state_dict().items())
    with pytest.raises(ModelError, match="its logits are not finite"):
        complete(policy, [SampleRequest(policy.open(PROMPT), 0, 20)])


def test_more_sequences_than_tokens_of_a_pass(directory: Path, tokenizer: HfTokenizer) -> None:
    hook = sys.excepthook
    policy = VllmPolicy(str(directory), tokenizer, replace(OPTIONS, max_sequences=3000))
    assert len(complete(policy, [SampleRequest(policy.open(PROMPT), 0, 4)])) == 1
    assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (VllmOptions(max_context_tokens=LIMIT + 1), "engine.max_context_tokens is 129"),
        (VllmOptions(dtype="float64"), "model.dtype float64"),
        (VllmOptions(kv_cache_gib=1e6), "vllm cannot run"),
        (VllmOptions(kv_cache_gib=LIMIT * TOKEN_BYTES / 2**30), "less than one context of 128"),
    ],
)
def test_what_vllm_cannot_do_is_one_line(
    options: VllmOptions, says: str, directory: Path, tokenizer: HfTokenizer
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        VllmPolicy(str(directory), tokenizer, options)
    assert "\n" not in str(caught.value)
