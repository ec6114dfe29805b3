"""Scores of tokens and their gradients, both ways, against log-softmax and autograd."""

import subprocess
import sys

import pytest
import torch
from torch._inductor.exc import TritonMissing

from graphpo_agent.engines.local import token_scores as scores
from graphpo_agent.engines.local.head import OutputHead

PEAK = """
import torch
from graphpo_agent.engines.local.head import OutputHead
from graphpo_agent.engines.local.token_scores import token_scores

def resident(field):
    (line,) = (each for each in open("/proc/self/status") if each.startswith(field))
    return int(line.split()[1]) * 1024

def step(rows):
    hidden = torch.randn(rows, 8, requires_grad=True)
    logprobs, entropies = token_scores(head, hidden, torch.arange(rows), 0.7, ENTROPY)
    (logprobs.sum() + entropies.sum() if ENTROPY else logprobs.sum()).backward()

torch.set_num_threads(1)
head = OutputHead(torch.nn.Linear(8, 32768, bias=False), cap=CAP)
step(16)
before = resident("VmRSS")
step(2048)
print((resident("VmHWM") - before) / (4 * 32768 * 2048))
"""

BOUNDED = [(True, (0.3, None)), (False, (1.0, 3.0)), (True, (0.3, 2.0))]
"""Bias, scale and cap."""


def expected(head, hidden, targets, temperature, entropy_gradient):
    logits = head.layer(hidden) * head.scale
    logits = logits if head.cap is None else head.cap * (logits / head.cap).tanh()
    distribution = (logits / temperature).log_softmax(-1)
    picked = distribution.gather(1, targets[:, None])[:, 0]
    return picked, -(distribution.exp() * distribution).sum(-1)


def drawn(bias=True, dtype=torch.float64, scale=1.0, cap=None):
    """Hidden states with one logit that leaves nothing to the others, and the targets."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 33, bias=bias, dtype=torch.float64)
    hidden = 6 * torch.randn(7, 5, dtype=torch.float64)
    hidden[2] = 300 * layer.weight[5].detach()
    return (
        OutputHead(layer.to(dtype), scale, cap),
        hidden.to(dtype).requires_grad_(),
        torch.arange(7) * 4 + 1,
    )


@pytest.fixture(params=["cpu", "in parts", "gpu", "logits"])
def way(request, monkeypatch):
    """The functions of a GPU are plain ones before they are fused, and run anywhere."""
    if request.param == "in parts":
        monkeypatch.setattr(scores, "_AT_ONCE", 70)
    if request.param in ("cpu", "in parts"):
        return scores.token_scores
    if request.param == "logits":
        return lambda head, hidden, targets, *rest: scores.logit_scores(
            head.logits(head.layer(hidden)), targets, *rest
        )
    monkeypatch.setattr(scores, "_scores", scores._scores._plain)
    monkeypatch.setattr(scores, "_gradients", scores._gradients._plain)

    def fused(head, hidden, targets, temperature, entropy_gradient):
        form = head.scale, head.cap, temperature
        return scores._FusedScores.apply(head.layer(hidden), targets, form, entropy_gradient)

    return fused


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("bias", "form"), [(False, (1.0, None)), (True, (1.0, None)), *BOUNDED])
def test_scores_and_gradients(way, temperature, entropy_gradient, bias, form):
    results = []
    for score in (way, expected):
        head, hidden, targets = drawn(bias, torch.float64, *form)
        logprobs, entropies = score(head, hidden, targets, temperature, entropy_gradient)
        loss = (logprobs * torch.linspace(-1, 2, 7)).sum()
        if entropy_gradient:
            loss = loss + (entropies * torch.linspace(1, -2, 7)).sum()
        loss.backward()
        gradients = [hidden.grad, *(value.grad for value in head.layer.parameters())]
        results.append([logprobs.detach(), entropies.detach(), *gradients])
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("entropy_gradient", "cap", "buffers"), [(False, None, 1), (True, None, 2), (True, 30.0, 2)]
)
def test_no_more_memory_is_held_than_the_logits_take(entropy_gradient, cap, buffers):
    program = PEAK.replace("ENTROPY", str(entropy_gradient)).replace("CAP", str(cap))
    measured = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert buffers - 0.1 < float(measured.stdout) < buffers + 0.4


def test_a_frozen_head_gets_no_gradient_and_its_input_the_same(way):
    results = []
    for frozen in (False, True):
        head, hidden, targets = drawn()
        head.layer.requires_grad_(not frozen)
        way(head, hidden, targets, 1.0, False)[0].sum().backward()
        results.append((hidden.grad, head.weight.grad is None))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert [is_none for _, is_none in results] == [False, True]


def test_low_precision_logits_are_scored_in_float32(way):
    head, hidden, targets = drawn(dtype=torch.bfloat16)
    logprobs, entropies = way(head, hidden, targets, 0.9, False)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert not entropies.requires_grad
    logits = head.layer(hidden).detach().double()
    picked, entropy = expected(OutputHead(lambda _: logits), hidden, targets, 0.9, False)
    torch.testing.assert_close(logprobs.double(), picked, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), entropy, rtol=1e-4, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16


def test_autocast_rounds_the_products_and_nothing_after_them():
    head, hidden, targets = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropies = scores.token_scores(head, hidden, targets)
        logits = head.layer(hidden).detach().float()
    picked, entropy = expected(OutputHead(lambda _: logits), hidden, targets, 1.0, False)
    torch.testing.assert_close(logprobs, picked)
    torch.testing.assert_close(entropies, entropy, rtol=1e-4, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.float32


def test_a_second_backward_pass_is_refused():
    loss = scores.token_scores(*drawn(), 1.0, False)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


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
