"""Gated delta nets and Mamba-2 over flat rows and behind cached states.

Their gradients, and what the sampler does with them, are tested where those of other families are:
``test_gradient.py``, ``test_sampler.py``, ``test_contexts.py``.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from graphpo_agent.cli import main
from graphpo_agent.engines.local.checkpoint import write_model
from graphpo_agent.engines.local.delta_rule import gated_delta_rule
from graphpo_agent.engines.local.forward import check_flat_layout, flat_passes, score_tokens
from graphpo_agent.engines.local.linear_attention import state_bytes
from graphpo_agent.engines.local.model import load_model, model_config, model_without_weights
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.probe import state_shape
from graphpo_agent.engines.local.reach import context_limit
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.local.state_pool import StatePool
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.rollout.scheduler import complete
from tests.engines.delta_nets import slow_delta_rule
from tests.engines.graphs import edge_logprobs, random_sample
from tests.engines.sampling import (
    CONTEXTS,
    SAMPLING,
    check_completion,
    forward_passes,
    requests_for,
)
from tests.engines.tiny import LINEAR, tiny_model, with_vision
from tests.runs import rows, weights
from tests.worlds import run_arguments


def random_rule(length: int) -> list[torch.Tensor]:
    """Queries, keys of length 1, values, decays, betas and a state: two rows, three heads."""
    torch.manual_seed(length)
    query, key, value = (torch.randn(2, 3, length, n).double() for n in (8, 8, 5))
    key = torch.nn.functional.normalize(key, dim=-1)
    decay, beta = -torch.rand(2, 3, length).double(), torch.rand(2, 3, length).double()
    parts = [query, key, value, decay, beta, torch.randn(2, 3, 8, 5).double()]
    return [part.requires_grad_() for part in parts]


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize("with_beta", [True, False])
def test_the_delta_rule_in_chunks_is_that_of_token_after_token(length, with_beta):
    found = []
    for rule in (gated_delta_rule, slow_delta_rule):
        parts = random_rule(length)
        if not with_beta:
            del parts[4]
        read, state = rule(*parts[:4], parts[4] if with_beta else None, parts[-1])
        weights = torch.arange(read.numel()).view_as(read).sin()
        ((read * weights).sum() + state.cos().sum()).backward()
        found.append([read.detach(), state.detach(), *(part.grad for part in parts)])
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-11)


def test_tokens_without_beta_and_decay_change_no_state():
    query, key, value, decay, beta, state = random_rule(70)
    own = torch.arange(70) < 5
    _, behind = gated_delta_rule(query, key, value, decay * own, beta * own, state)
    first = [part[:, :, :5] for part in (query, key, value, decay, beta)]
    torch.testing.assert_close(behind, gated_delta_rule(*first, state)[1], rtol=0, atol=1e-14)
    _, behind = gated_delta_rule(query, key, value * own[:, None], decay * own, None, state)
    expected = gated_delta_rule(*first[:4], None, state)[1]
    torch.testing.assert_close(behind, expected, rtol=0, atol=1e-14)
    for given, one in ((None, None), (beta, first[4])):
        key_of_own = key * own[:, None]
        _, behind = gated_delta_rule(query, key_of_own, value, decay * own, given, state)
        expected = gated_delta_rule(*first[:4], one, state)[1]
        torch.testing.assert_close(behind, expected, rtol=0, atol=1e-14)


@pytest.fixture(params=LINEAR)
def stock(request: pytest.FixtureRequest, tokenizer, device):
    """A model whose layers are transformers' own, which cast to float32."""
    return tiny_model(request.param, tokenizer.vocab_size).float().to(device)


def test_flat_rows_give_what_transformers_layers_give(stock):
    check_flat_layout(stock, ComputeOptions())
    sample = random_sample(3, 9, longest=90)
    (batch,) = pack([sample], 10_000)
    with torch.no_grad(), flat_passes(stock, ComputeOptions()):
        scores = score_tokens(stock, batch, 1.0, ComputeOptions())
    found = dict(zip(batch.source.tolist(), scores.logprobs.tolist(), strict=True))
    assert len(found) == sample.loss_mask.sum()
    for node in range(1, len(sample.parent)):
        span = range(sample.offsets[node], sample.offsets[node + 1])
        own = [place for place in span if sample.loss_mask[place]]
        if own:
            expected, _ = edge_logprobs(stock, sample, node)
            assert [found[place] for place in own] == pytest.approx(expected.tolist(), abs=1e-3)


def test_the_sampler_gives_what_transformers_layers_give(stock, tokenizer, rows):
    policy = LocalPolicy(stock, tokenizer)
    prompts = [[5, 9, 30], list(range(3, 100))]
    requests = requests_for([policy.open(prompt) for prompt in prompts], 3)
    for request, completion in zip(requests, complete(policy, requests, SAMPLING), strict=True):
        check_completion(stock, prompts[request.seed // 1000], completion, tolerance=1e-3)


@pytest.mark.parametrize("before_gate", [False, True])
def test_what_a_falcon_h1_reads_may_be_normed(tokenizer, device, before_gate):
    tiny = tiny_model("falcon_h1", tokenizer.vocab_size)
    tiny.config.update({"mamba_rms_norm": True, "mamba_norm_before_gate": before_gate})
    model = type(tiny)(tiny.config).eval().to(device)
    check_flat_layout(model, ComputeOptions())
    policy = LocalPolicy(model, tokenizer)
    (completion,) = complete(policy, requests_for([policy.open([5, 9, 30])], 1), SAMPLING)
    check_completion(model, [5, 9, 30], completion, tolerance=1e-4)


def test_layers_are_transformers_own_outside_of_a_pass(stock, tokenizer):
    ids = torch.arange(3, 30, device=stock.device)[None]
    with torch.no_grad():
        before = stock(ids).logits
        policy = LocalPolicy(stock, tokenizer)
        complete(policy, requests_for([policy.open([5, 9])], 2), SAMPLING)
        assert torch.equal(stock(ids).logits, before)


def test_what_computed_prompts_begin_with_is_computed_once_more_and_then_shared(
    make_model, tokenizer, rows, monkeypatch
):
    """A state cannot be had from inside a computed text: the beginning is one of its own."""
    monkeypatch.setattr(f"{CONTEXTS}.SHORTEST", 1)
    model = make_model("qwen3_5")
    policy = LocalPolicy(model, tokenizer)
    passes = forward_passes(model)
    rules = list(range(20, 40))
    prefilled = []
    for question in ([5, 6], [7], [8, 9]):
        prompt = [*rules, *question]
        for completion in complete(policy, requests_for([policy.open(prompt)], 2, 4), SAMPLING):
            check_completion(model, prompt, completion)
        prefilled.append(policy.take_prefilled_tokens())
    assert prefilled == [22, 20 + 1, 2]
    assert sum(passes) > sum(prefilled)


def test_a_state_takes_as_much_memory_as_is_told(make_model, tokenizer):
    precise = [(family, torch.float32) for family in LINEAR]
    for family, dtype in (*precise, ("qwen3_next", torch.bfloat16)):
        model = make_model(family).to(dtype)
        shape = state_shape(model)
        assert shape is not None and shape.memory_dtype == torch.float32
        pool = StatePool(shape)
        pool.allocate(1)
        layers = range(shape.num_layers)
        held = sum(pool.inputs(i)[0].nbytes + pool.memories(i)[0].nbytes for i in layers)
        assert held == state_bytes(model.config, dtype.itemsize)
    assert state_shape(make_model("qwen2")) is None
    assert state_bytes(make_model("qwen2").config, 4) == 0


def test_of_a_model_of_texts_and_images_the_language_model_is_loaded_and_saved(
    make_model, tokenizer, tmp_path
):
    text = make_model("qwen3_5")
    both = with_vision(text).float()
    both.save_pretrained(tmp_path)
    name = str(tmp_path)
    assert model_config(name).name_or_path == name
    assert context_limit(model_config(name)) == text.config.max_position_embeddings
    model = load_model(name)
    empty = model_without_weights(name, torch.float32)
    assert {n: p.shape for n, p in empty.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, both(ids).logits)
    check_flat_layout(model, ComputeOptions())
    write_model(tmp_path / "saved", model, tokenizer)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() <= dict(model.named_parameters(remove_duplicate=False)).keys()
    with torch.no_grad():
        again = load_model(str(tmp_path / "saved"))
        assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_search_agent_trains_and_its_run_is_continued(kb, tmp_path):
    """One run of four steps, and one of two that are four when it goes on."""
    policy = tmp_path / "policy"
    shutil.copytree(kb / "policy", policy)
    vocabulary = HfTokenizer.load(str(policy)).vocab_size
    tiny_model("qwen3_5", vocabulary, limit=512, spread=0.02).float().save_pretrained(policy)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = (f"model.path={policy}", "train.checkpoint_every=2")
    assert main(["train", *run_arguments(kb, whole, *changes)]) == 0
    assert main(["train", *run_arguments(kb, parts, *changes, "train.steps=2")]) == 0
    assert main(["train", "--resume", str(parts), "train.steps=4"]) == 0
    assert weights(whole) == weights(parts)
    found = [row["update/mismatch"] for row in rows(whole) if "update/mismatch" in row]
    assert found and max(found) < 1e-4
