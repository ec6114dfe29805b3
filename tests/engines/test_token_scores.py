"""Scores of tokens and their gradients, both ways, against log-softmax and autograd."""

import pytest
import torch
from torch._inductor.exc import TritonMissing

from graphpo_agent.engines.local import token_scores as scores


def expected(logits, targets, temperature):
    distribution = (logits / temperature).log_softmax(-1)
    picked = distribution.gather(1, targets[:, None])[:, 0]
    return picked, -(distribution.exp() * distribution).sum(-1)


def drawn(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(7, 33, generator=generator, dtype=torch.float64)
    logits[2, 5] = 300.0
    return logits.to(dtype).requires_grad_(), torch.arange(7) * 4 + 1


@pytest.fixture(params=["cpu", "in parts", "gpu"])
def way(request, monkeypatch):
    """The functions of a GPU are plain ones before they are fused, and run anywhere."""
    if request.param == "in parts":
        monkeypatch.setattr(scores, "_AT_ONCE", 70)
    if request.param != "gpu":
        return scores.token_scores
    monkeypatch.setattr(scores, "_scores", scores._scores._plain)
    monkeypatch.setattr(scores, "_gradients", scores._gradients._plain)
    return scores._FusedScores.apply


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_scores_and_gradients(way, temperature, entropy_gradient):
    results = []
    for score in (way, lambda *args: expected(*args[:3])):
        logits, targets = drawn()
        logprobs, entropies = score(logits, targets, temperature, entropy_gradient)
        loss = (logprobs * torch.linspace(-1, 2, 7)).sum()
        if entropy_gradient:
            loss = loss + (entropies * torch.linspace(1, -2, 7)).sum()
        loss.backward()
        results.append([logprobs.detach(), entropies.detach(), logits.grad])
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_low_precision_logits_are_scored_in_float32(way):
    logits, targets = drawn(torch.bfloat16)
    logprobs, entropies = way(logits, targets, 0.9, False)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert not entropies.requires_grad
    picked, entropy = expected(logits.detach().double(), targets, 0.9)
    torch.testing.assert_close(logprobs.double(), picked, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), entropy, rtol=1e-4, atol=1e-5)
    logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_where_nothing_compiles_plain_operations_do_it(monkeypatch):
    def refused(function, **_):
        def call(*_):
            raise TritonMissing(None)

        return call

    monkeypatch.setattr(torch, "compile", refused)
    double = scores._Fused(lambda x: 2 * x)
    with pytest.warns(UserWarning, match="without fused kernels"):
        assert double(3) == 6
    assert double(4) == 8
