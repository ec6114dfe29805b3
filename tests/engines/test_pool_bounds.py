"""What the local sampler holds at once is bounded."""

import os
from pathlib import Path

import torch

from graphpo_agent.engines.local.cache import PAGE, KVPool, KVShape
from graphpo_agent.engines.local.kv_layers import KVLayer
from graphpo_agent.engines.local.probe import kv_shape
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest, SamplingParams


def held_by_shelves(policy):
    return sum(slab.nbytes for shelf in policy._rows._shelves.values() for slab in shelf._slabs)


def test_what_runs_at_once_is_bounded_however_long_the_contexts_get(
    make_model, tokenizer, on_shelves
):
    model = make_model(limit=1024)
    limit = 64 * 64 * kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, limit)
    held = []
    for length in (20, 100, 200, 400):
        context = policy.open([5] * length)
        requests = [SampleRequest(context, seed, 12) for seed in range(80)]
        assert len(complete(policy, requests, SamplingParams())) == 80
        held.append(held_by_shelves(policy))
    assert max(held) <= limit
    assert held[0] == limit, "and it is used"


def test_continuations_of_many_lengths_hold_no_more_together_than_the_bound(
    make_model, tokenizer, on_shelves
):
    model = make_model(limit=1024)
    limit = 40 * 64 * kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, limit)
    context = policy.open([5, 6, 7])
    held, seed = [], 0
    for lengths in ([2] * 29 + [60] * 11, [2] * 9 + [110] * 5, [200] * 5, [20] * 30):
        for length in lengths:
            request = SampleRequest(context, seed, length, min_new_tokens=length)
            policy.submit(request, SamplingParams())
            seed += 1
        for _ in range(3):
            policy.advance()
            held.append(held_by_shelves(policy))
    assert len(policy._rows._shelves) == 3
    assert max(held) <= limit
    assert policy._columns > 0.8 * policy._max_columns, "and it is used"


def test_one_continuation_runs_whatever_it_takes(make_model, tokenizer, on_shelves):
    model = make_model(limit=1024)
    token = kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, 64 * token)
    held = []
    for length in (20, 400, 100):
        requests = [SampleRequest(policy.open([5] * length), seed, 3) for seed in range(2)]
        assert len(complete(policy, requests, SamplingParams())) == 2
        held.append(held_by_shelves(policy))
    assert held == [64 * token, 512 * token, 128 * token]


def test_rows_in_the_pool_take_what_they_draw_beside_the_one_context_before_them(
    make_model, tokenizer
):
    model = make_model(limit=1024).cpu()
    token = kv_shape(model).bytes_per_token
    policy = LocalPolicy(model, tokenizer, 10 * PAGE * token)
    context = policy.open([5] * 400)
    for seed in range(25):
        request = SampleRequest(context, seed, 12, min_new_tokens=12)
        policy.submit(request, SamplingParams())
    running = []
    while len(running) < 40:
        policy.advance()
        running.append(len(policy._rows.members))
    assert max(running) == 10, "a row takes a page at a time"
    assert policy._pool._used == 400 + 25 * 12


def test_a_pool_takes_memory_where_tokens_are_written():
    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    layers = (KVLayer(4, 64, 64), KVLayer(2, 64, 128), KVLayer(4, 64, 64), KVLayer(1, 128, 128))
    shape = KVShape(layers, (0, 1, 2, 3, 1), torch.float32, torch.device("cpu"))
    pool = KVPool(shape, by_layer=True)
    before = resident()
    pool.allocate(10_000)
    pool.allocate(90_000)  # all fresh
    slots = torch.from_numpy(pool.allocate(10_000))
    for layer in range(4):
        for tokens in pool.layer(layer):
            assert tokens.data_ptr() % 64 == 0 and not tokens[100_000:].any()
            tokens[slots] = 1.0
    held = (resident() - before) / shape.bytes_per_token
    assert 9_000 < held < 130_000, "the room of 200,000 is not written to"
