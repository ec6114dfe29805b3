"""Passes that are recorded on a GPU, replayed here without one, and prefixes beside them."""

import gc
import weakref

import numpy as np
import pytest
import torch

from graphpo_agent.engines.local.recorded_passes import RecordedPasses, _Recording
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.rollout.scheduler import complete
from graphpo_agent.types import SampleRequest
from tests.engines.sampling import SAMPLING


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


def all_drawn(policy, drawn, count):
    """Token ids by ticket, once so many continuations have ended; ``drawn`` have by now."""
    while len(drawn) < count:
        drawn.update(policy.advance())
    return {ticket: one.token_ids for ticket, one in drawn.items()}


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
        return all_drawn(policy, drawn, 34), policy

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
        return all_drawn(policy, drawn, 9), computed

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


def test_a_recording_is_made_on_the_shelf_s_gpu_and_one_that_fails_gives_the_stream_back(
    monkeypatch,
):
    """On a machine without a GPU: which calls torch gets, in their order."""
    calls = []

    class Within:
        def __init__(self, *what, **named):
            self.what = (*what, *named.values())

        def __enter__(self):
            calls.append(self.what)

        def __exit__(self, *_):
            calls.append(("left", self.what[0]))
            if self.what[0] == "graph" and fails:
                raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "device", lambda device: Within(str(device)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: "its own stream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream before")
    monkeypatch.setattr(torch.cuda, "set_stream", calls.append)
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, stream, capture_error_mode: Within("graph", stream)
    )
    passes = RecordedPasses(lambda *_: torch.zeros(1))
    for fails in (False, True):
        calls.clear()
        try:
            passes._captured(None, lambda: torch.ones(2), torch.device("cuda:1"))
        except RuntimeError:
            assert fails
        assert calls == [
            ("cuda:1",),
            ("graph", "its own stream"),
            ("left", "graph"),
            "the stream before",
            ("left", "cuda:1"),
        ]
