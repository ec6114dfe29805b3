from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from graphpo_agent.engines.local import beginnings, forward, shared_tokens
from graphpo_agent.engines.local.flat_attention import FlatLayouts
from graphpo_agent.engines.local.forward import check_flat_layout, flat_passes, score_tokens
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.pieces import Stretches, cut_into_buckets
from graphpo_agent.engines.local.stretch_attention import stretch_layout
from graphpo_agent.errors import ModelError
from graphpo_agent.graph.samples import TrainingSample
from tests.engines.graphs import (
    edge_logprobs,
    places_on_stretches,
    random_sample,
    visible_places,
    with_instructions,
)


@pytest.fixture(autouse=True)
def _short_beginnings(monkeypatch):
    monkeypatch.setattr(beginnings, "SHORTEST", 1)


def visible_tokens(batch):
    """For each place of the row the token ids that it sees, in path order, read off the buckets."""
    buckets, order = cut_into_buckets(batch)
    padded = [place for bucket in buckets for place in bucket.queries.ravel().tolist()]
    assert [padded[i] for i in order] == list(range(len(batch.token_ids)))
    seen = visible_places(batch)
    assert places_on_stretches(batch) == seen
    for i in range(len(batch.token_ids)):
        assert seen[i] == [j for j in range(i + 1) if i < batch.exits[j]]
    for window in (1, 3, 70):
        assert visible_places(batch, window) == {i: path[-window:] for i, path in seen.items()}
    return {place: batch.token_ids[places].tolist() for place, places in seen.items()}


def all_paths(samples):
    """Source index → the path up to and including that token as (source, id), by walking."""
    paths, start = {}, 0
    for sample in samples:
        for node in range(len(sample.parent)):
            chain = [node]
            while sample.parent[chain[0]] >= 0:
                chain.insert(0, int(sample.parent[chain[0]]))
            above = [
                (start + i, int(sample.token_ids[i]))
                for v in chain
                for i in range(sample.offsets[v], sample.offsets[v + 1])
            ]
            own = int(sample.offsets[node + 1] - sample.offsets[node])
            for i in range(own):
                paths[start + int(sample.offsets[node]) + i] = above[: len(above) - own + i + 1]
        start += len(sample.token_ids)
    return paths


def check_packed(samples, batches):
    """Every trained token once, behind its own path; returns how many tokens must be computed:
    those that differ in their text or in what precedes it, and of prompts once in each row."""
    paths = all_paths(samples)
    graph = np.repeat(np.arange(len(samples)), [len(sample.token_ids) for sample in samples])
    mask = np.concatenate([sample.loss_mask for sample in samples])
    sources = np.concatenate([batch.source for batch in batches])
    assert sorted(sources) == np.flatnonzero(mask).tolist()
    needed, texts = set(), {}
    for row, batch in enumerate(batches):
        seen = visible_tokens(batch)
        assert sorted(set(batch.target_of.tolist())) == list(range(len(batch.target_ids)))
        for target, source in zip(batch.target_of, batch.source, strict=True):
            *path, (_, own) = paths[int(source)]
            assert own == batch.target_ids[target]
            predictor = int(batch.predictors[target])
            assert seen[predictor] == [token for _, token in path]
            assert batch.position_ids[predictor] == len(path) - 1
            own_graph, text = graph[int(source)], 0
            prompt = samples[own_graph].offsets[1]
            for k, (_, token) in enumerate(path, start=1):
                text = texts.setdefault((text, token), len(texts) + 1)  # that of k tokens
                needed.add(("row", row, text) if k <= prompt else ("graph", own_graph, text))
    return len(needed)


def longest_path(samples):
    """The most tokens that one trained token follows."""
    paths = all_paths(samples)
    mask = np.concatenate([sample.loss_mask for sample in samples])
    return max(len(paths[source]) - 1 for source in np.flatnonzero(mask))


SHAPES = st.lists(st.tuples(st.integers(0, 999), st.integers(4, 30)), min_size=1, max_size=5)


FEW_TOKENS = st.sampled_from([6, 300])
"""Sizes of a vocabulary; with a small one many edges begin alike."""


@settings(max_examples=60, deadline=None)
@given(SHAPES, FEW_TOKENS)
def test_every_needed_token_is_packed_once_and_sees_its_own_path(shapes, vocabulary):
    samples = [random_sample(seed, num_nodes, vocabulary) for seed, num_nodes in shapes]
    batches = pack(samples, max_tokens=max(len(sample.token_ids) for sample in samples))
    assert sum(len(batch.token_ids) for batch in batches) == check_packed(samples, batches)


@settings(max_examples=60, deadline=None)
@given(SHAPES, FEW_TOKENS, st.integers(0, 60))
def test_a_large_graph_spans_several_rows_within_the_limit(shapes, vocabulary, room):
    samples = [random_sample(seed, num_nodes, vocabulary) for seed, num_nodes in shapes]
    longest = longest_path(samples)
    batches = pack(samples, longest + room)
    needed = check_packed(samples, batches)
    assert max(len(batch.token_ids) for batch in batches) <= longest + max(room, longest / 8)
    assert needed <= sum(len(batch.token_ids) for batch in batches)


def test_only_a_path_that_is_too_long_makes_a_row_too_long():
    samples = [random_sample(seed, 20, longest=9) for seed in range(4)]
    longest = [longest_path([sample]) for sample in samples]
    limit = sorted(longest)[1]
    batches = pack(samples, limit)
    check_packed(samples, batches)
    assert limit < max(len(batch.token_ids) for batch in batches) <= max(longest) * 9 / 8


@pytest.mark.parametrize(("max_tokens", "lengths"), [(1, [116, 104]), (120, [120])])
def test_a_long_prompt_is_not_computed_again_for_every_short_answer(max_tokens, lengths):
    """Five answers, four tokens each without the last, behind a prompt of 100: nine eighths of a
    path are 117 tokens."""
    parent, offsets = np.array([-1, 0, 0, 0, 0, 0]), np.array([0, 100, 105, 110, 115, 120, 125])
    ids = np.arange(125)
    sample = TrainingSample(
        "long", parent, offsets, ids, ids >= 100, np.ones(125, np.float32), np.zeros((1, 6))
    )
    batches = pack([sample], max_tokens)
    assert [len(batch.token_ids) for batch in batches] == lengths
    check_packed([sample], batches)


def test_a_cut_graph_computes_little_again():
    """A binary tree of depth 7 in rows of a quarter: each cut costs at most one path."""
    num_nodes, segment = 2**8 - 1, 10
    parent = (np.arange(num_nodes) - 1) // 2
    parent[0] = -1
    num_tokens = num_nodes * segment
    sample = TrainingSample(
        "tree",
        parent,
        np.arange(num_nodes + 1) * segment,
        np.arange(num_tokens),
        np.arange(num_tokens) >= segment,
        np.zeros(num_tokens, np.float32),
        np.zeros((1, num_nodes)),
    )
    batches = pack([sample], num_tokens // 4)
    needed = check_packed([sample], batches)
    assert len(batches) <= 5
    assert sum(len(batch.token_ids) for batch in batches) - needed <= 3 * 7 * segment


def test_what_no_trained_token_follows_is_left_out():
    sample = TrainingSample(
        "search",
        parent=np.array([-1, 0, 0]),
        offsets=np.array([0, 2, 6, 9]),
        token_ids=np.arange(9),
        loss_mask=np.array([0, 0, 1, 1, 0, 0, 1, 0, 0], bool),
        logprobs=np.zeros(9, np.float32),
        advantages=np.zeros((1, 3)),
    )
    (batch,) = pack([sample], 100)
    assert batch.token_ids.tolist() == [0, 1, 2]
    assert batch.target_ids.tolist() == [2, 3, 6]
    assert batch.predictors.tolist() == [1, 2, 1]


def long_sample(lengths, parent):
    """Edges of these lengths behind a prompt, which is the first."""
    num_tokens = sum(lengths)
    return TrainingSample(
        "long",
        np.array(parent),
        np.cumsum([0, *lengths]),
        np.random.default_rng(0).integers(3, 300, num_tokens),
        np.arange(num_tokens) >= lengths[0],
        np.zeros(num_tokens, np.float32),
        np.zeros((1, len(parent))),
    )


def test_what_is_longer_than_its_path_is_a_run_and_the_rest_is_blocks():
    lengths = [100, 300, 5, 140, 30, 700]
    sample = long_sample(lengths, [-1, 0, 1, 1, 1, 0])
    (batch,) = pack([sample], 10_000)
    check_packed([sample], [batch])
    buckets, _ = cut_into_buckets(batch)
    runs = {
        (int(path), int(own))
        for bucket in buckets
        if bucket.causal
        for path, own in zip(bucket.path_lengths, bucket.own_lengths, strict=True)
    }
    # A run goes on through the first child; a leaf's last token is not computed.
    assert runs == {(0, 100 + 300 + 4), (100, 699)}
    blocks = [bucket for bucket in buckets if not bucket.causal]
    assert sum(bucket.own_lengths.sum() for bucket in blocks) == 139 + 29


def test_a_window_gathers_what_it_reaches():
    sample = long_sample([100, 900, 700], [-1, 0, 1])
    (batch,) = pack([sample], 10_000)
    check_packed([sample], [batch])
    buckets, _ = cut_into_buckets(batch, 40)
    longest = max(bucket.own_lengths.max() for bucket in buckets)
    assert not any(bucket.causal for bucket in buckets)
    assert max(bucket.keys.shape[1] for bucket in buckets) == longest + 40 - 1


def test_a_window_is_none_where_it_holds_every_path(make_model):
    (batch,) = pack([random_sample(0)], 10_000)
    longest = int(batch.position_ids.max()) + 1
    config = make_model("gemma3").config
    for window in (longest - 1, longest):
        config.sliding_window = window
        layouts = FlatLayouts(config, batch, torch.float64, torch.device("cpu"))
        assert (layouts.of(window) is layouts.of(None)) == (window == longest)
        with pytest.raises(ModelError, match="do not tell their attention"):
            layouts.of(longest - 2)


def test_what_edges_begin_with_alike_is_one_token():
    sample = TrainingSample(
        "calls",
        parent=np.array([-1, 0, 0, 1, 2, 0]),
        offsets=np.array([0, 2, 5, 8, 10, 12, 13]),
        token_ids=np.array([1, 2, 7, 8, 50, 7, 8, 50, 9, 3, 9, 4, 7]),
        loss_mask=np.array([0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1], bool),
        logprobs=np.zeros(13, np.float32),
        advantages=np.zeros((1, 6)),
    )
    (batch,) = pack([sample], 100)
    check_packed([sample], [batch])
    assert batch.token_ids.tolist() == [1, 2, 7, 8, 50, 9]
    assert batch.target_ids.tolist() == [7, 8, 9, 3, 4]
    assert batch.predictors.tolist() == [1, 2, 4, 5, 5]
    assert batch.source.tolist() == [2, 3, 5, 6, 8, 9, 10, 11, 12]
    assert batch.target_of.tolist() == [0, 1, 0, 1, 2, 3, 2, 4, 0]


def test_what_prompts_begin_with_alike_is_one_token():
    """Four prompts in three steps, one of them the beginning of another, one alone."""
    prompts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [6, 2, 3], [1, 2, 3, 5]]
    samples = [
        TrainingSample(
            f"p{number}",
            parent=np.array([-1, 0]),
            offsets=np.array([0, len(prompt), len(prompt) + 2]),
            token_ids=np.array([*prompt, 3, 8]),
            loss_mask=np.arange(len(prompt) + 2) >= len(prompt),
            logprobs=np.zeros(len(prompt) + 2, np.float32),
            advantages=np.zeros((1, 2)),
        )
        for number, prompt in enumerate(prompts)
    ]
    (batch,) = pack(samples, 100)
    check_packed(samples, [batch])
    assert sorted(batch.token_ids.tolist()) == sorted([1, 2, 3, 4, 3, 5, 3, 3, 3, 6, 2, 3, 3])
    assert len(batch.target_ids) == len(batch.source) == 10
    alone = pack(samples[:1], 100)[0]
    assert alone.token_ids.tolist() == [1, 2, 3, 4, 3]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 80),
    st.sampled_from([1, 4, 16]),
)
def test_graphs_with_instructions_before_their_prompts(kinds, vocabulary, room, shortest):
    instructions = [list(range(1, 40)), [*range(1, 30), 7, 7], [9] * 5, []]
    samples = [
        with_instructions(random_sample(seed, 6, 3 + vocabulary), instructions[kind])
        for seed, kind in enumerate(kinds)
    ]
    (batch,) = pack(samples, 10_000)
    assert len(batch.token_ids) == check_packed(samples, [batch])
    longest = longest_path(samples)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings, "SHORTEST", shortest)
        batches = pack(samples, longest + room)
    check_packed(samples, batches)
    assert max(len(batch.token_ids) for batch in batches) <= longest + max(room, longest / 8)


def test_what_prompts_begin_with_alike_counts_once_in_the_size_of_a_row():
    instructions = list(range(100, 140))
    samples = [with_instructions(chain(n), instructions) for n in (2, 3, 4, 5)]
    (batch,) = pack(samples, 40 + 2 + 3 + 4 + 5)
    assert len(batch.token_ids) == 40 + 2 + 3 + 4 + 5
    assert len(pack(samples, 40 + 2 + 3 + 4 + 4)) == 2


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([[*range(16), 50], [*range(16), 60]], 16),
        ([[*range(15), 50], [*range(15), 60]], 0),
        ([[*range(16), *[7] * 15, 50], [*range(16), *[7] * 15, 60], [*range(16), 70]], 2 * 16),
        ([[*range(16), *[7] * 16, 50], [*range(16), *[7] * 16, 60], [*range(16), 70]], 2 * 16 + 16),
        ([[8, *[7] * 15, 50], [8, *[7] * 15, 60], [8, *[9] * 15, 50], [8, *[9] * 15, 60]], 2 * 16),
    ],
)
def test_a_few_tokens_that_are_alike_are_computed_again(monkeypatch, prompts, shared):
    monkeypatch.setattr(beginnings, "SHORTEST", 16)
    samples = [long_sample([1, 2], [-1, 0]) for _ in prompts]
    samples = [with_instructions(*each) for each in zip(samples, prompts, strict=True)]
    (batch,) = pack(samples, 1000)
    assert len(batch.token_ids) == sum(len(prompt) + 2 for prompt in prompts) - shared


def test_paths_whose_hashes_are_equal_are_told_apart(monkeypatch):
    monkeypatch.setattr(shared_tokens, "_mixed", lambda values: np.zeros(len(values), np.uint64))
    sample = long_sample([3, 4, 5], [-1, 0, 0])
    check_packed([sample], pack([sample], 100))


def test_a_stretch_goes_on_through_first_children():
    (batch,) = pack([long_sample([3, 2, 4, 2, 6], [-1, 0, 1, 1, 0])], 100)
    # A leaf's last token is not computed: 3, 2 and 3 tokens of the first path, then 1 and 5.
    stretches = Stretches.of(batch)
    assert stretches.starts.tolist() == [0, 8, 9]
    assert stretches.lengths.tolist() == [8, 1, 5]
    assert stretches.parent.tolist() == [-1, 0, 0]
    assert stretches.before.tolist() == [0, 5, 3]
    layout = stretch_layout(batch, torch.device("cpu"))
    assert layout.keys.tolist() == [*range(8), *range(5), 8, *range(3), *range(9, 14)]
    assert layout.query_ends.tolist() == [0, 8, 9, 14]
    assert layout.key_ends.tolist() == [0, 8, 14, 22]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.integers(100, 400))
def test_runs_and_blocks_of_any_graph_see_their_own_paths(seed, longest):
    samples = [random_sample(seed + i, 8, prompt=50, longest=longest) for i in range(2)]
    check_packed(samples, pack(samples, 2000))


def test_chains_are_not_cut_in_the_middle():
    sample = long_sample([64] + [512] * 8, [-1, 0, 1, 2, 3, 0, 5, 6, 7])
    batches = pack([sample], 4096)
    check_packed([sample], batches)
    assert sorted(len(batch.token_ids) for batch in batches) == [64 + 2047] * 2


def test_an_edge_without_tokens_passes_its_context_on():
    sample = TrainingSample(
        "hole",
        parent=np.array([-1, 0, 1, 1, 0]),
        offsets=np.array([0, 3, 3, 5, 6, 8]),
        token_ids=np.array([5, 6, 7, 8, 9, 10, 11, 12]),
        loss_mask=np.array([0, 0, 0, 1, 1, 1, 1, 1], bool),
        logprobs=np.zeros(8, np.float32),
        advantages=np.zeros((1, 5)),
    )
    check_packed([sample], pack([sample], 100))
    # What stands before it in the sample need not be on its path.
    parent, offsets = np.array([-1, 0, 0, 2, 0]), np.array([0, 3, 5, 5, 6, 8])
    sample = replace(sample, parent=parent, offsets=offsets)
    check_packed([sample], pack([sample], 100))


def test_small_graphs_share_a_row():
    samples = [random_sample(seed, 4 + seed) for seed in range(12)]
    limit = max(len(sample.token_ids) for sample in samples)
    assert len(pack(samples, limit)) < len(samples)
    assert pack([], 100) == []


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_scores_equal_those_of_one_row_per_edge(make_model, family):
    model = make_model(family)
    samples = [random_sample(seed) for seed in range(3)]
    expected = []
    with torch.no_grad():
        for sample in samples:
            for node in range(1, len(sample.parent)):
                expected.append(torch.stack(edge_logprobs(model, sample, node, 0.8)))
        with flat_passes(model, ComputeOptions()):
            (batch,) = pack(samples, 10_000)
            scores = score_tokens(model, batch, 0.8, ComputeOptions())
    order = np.argsort(batch.source)
    logprobs, entropies = torch.cat(expected, 1)
    torch.testing.assert_close(scores.logprobs[order], logprobs, rtol=0, atol=1e-8)
    torch.testing.assert_close(scores.entropies[order], entropies, rtol=0, atol=1e-7)


def test_blocks_of_logits_change_neither_scores_nor_gradients(make_model, monkeypatch):
    (batch,) = pack([random_sample(0), random_sample(1)], 10_000)
    results = []
    for held in (10**9, 7 * 400):
        monkeypatch.setattr(forward, "max_logits", lambda device_type, held=held: held)
        model = make_model()
        with flat_passes(model, ComputeOptions()):
            scores = score_tokens(model, batch, 1.0, ComputeOptions(), True)
            (scores.logprobs.sin() + 0.3 * scores.entropies).sum().backward()
        results.append([scores.logprobs, *(p.grad for p in model.parameters())])
    for whole, blocks in zip(*results, strict=True):
        torch.testing.assert_close(whole, blocks, rtol=0, atol=1e-10)


def test_a_model_that_reshapes_its_logits_is_refused(make_model):
    model = make_model()
    check_flat_layout(model, ComputeOptions())
    forward = model.forward

    def capped(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits.tanh()
        return output

    model.forward = capped
    with pytest.raises(ModelError, match="flat layout"):
        check_flat_layout(model, ComputeOptions())


def test_a_bound_that_hardly_shows_is_seen(make_model):
    """One of the model's code that its configuration does not name, and the other way round."""
    model = make_model(spread=0.02)
    forward, say = model.forward, "changes its logits"

    def bounded(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 30 * (output.logits / 30).tanh()
        return output

    model.forward = bounded
    with pytest.raises(ModelError, match=say):
        check_flat_layout(model, ComputeOptions())
    model.config.final_logit_softcapping = 30.0
    check_flat_layout(model, ComputeOptions())
    model.forward = forward
    with pytest.raises(ModelError, match=say):
        check_flat_layout(model, ComputeOptions())


@pytest.mark.parametrize(
    ("config", "model", "extra", "message"),
    [
        (FalconConfig, FalconForCausalLM, {}, "attention interface"),
        (StableLmConfig, StableLmForCausalLM, {}, "hand arguments on"),
    ],
)
def test_models_whose_attention_is_not_plain_are_refused(config, model, extra, message):
    tiny = config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        **extra,
    )
    with pytest.raises(ModelError, match=message) as caught:
        check_flat_layout(model(tiny).eval(), ComputeOptions())
    assert "\n" not in str(caught.value)


def chain(length):
    """A prompt token and one edge; the last token is no part of a row."""
    return TrainingSample(
        "c",
        np.array([-1, 0]),
        np.array([0, 1, length + 1]),
        np.arange(length + 1) + 100 * length,
        np.arange(length + 1) > 0,
        np.zeros(length + 1, np.float32),
        np.zeros((1, 2)),
    )


def test_rows_are_filled_to_the_last_token_largest_first():
    batches = pack([chain(n) for n in (2, 3, 8, 7)], 10)
    assert sorted(len(batch.token_ids) for batch in batches) == [10, 10]
