"""Attention of stretches to their paths: the kernel's calls, what is kept, and precise sums."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.engines.local.stretch_attention import over_stretches, stretch_layout
from graphpo_agent.errors import ModelError
from graphpo_agent.graph.samples import TrainingSample
from tests.engines.graphs import random_sample, use_slow_flash_attention

SCORING = Scoring(0.25)


def star(num_answers, prompt=5, answer=2):
    """A prompt and short answers to it."""
    parent = np.array([-1] + [0] * num_answers)
    offsets = np.concatenate([[0], prompt + answer * np.arange(num_answers + 1)])
    num_tokens = int(offsets[-1])
    return TrainingSample(
        "star",
        parent,
        offsets,
        np.arange(num_tokens),
        np.arange(num_tokens) >= prompt,
        np.zeros(num_tokens, np.float32),
        np.ones((1, len(parent))),
    )


def row(sample, dtype, device="cpu"):
    (batch,) = pack([sample], 100_000)
    layout = stretch_layout(batch, torch.device(device))
    torch.manual_seed(0)
    shapes = [(len(batch.token_ids), heads, 16) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return layout, *(x.to(device, dtype).requires_grad_() for x in inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_kernels_take_and_give_what_they_are_handed(dtype, window, with_sinks):
    """torch's own kernels without numbers: their arguments are checked, and shapes and types."""
    layout, *inputs = row(random_sample(0, 30), dtype, "meta")
    sinks = torch.randn(4, device="meta", requires_grad=True) if with_sinks else None
    out = over_stretches(*inputs, layout, Scoring(0.25, window, sinks))
    inputs += [sinks] if with_sinks else []
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert (out.shape, out.dtype) == (inputs[0].shape, dtype)
    for gradient, given in zip(gradients, inputs, strict=True):
        assert (gradient.shape, gradient.dtype) == (given.shape, given.dtype)


def test_what_is_kept_between_the_passes_does_not_grow_with_the_paths(monkeypatch):
    use_slow_flash_attention(monkeypatch)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layout, queries, keys, values = row(star(50, prompt=40), torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = over_stretches(queries, keys, values, layout, SCORING)
    assert len(layout.keys) > 10 * len(out)
    sums = out[:, :, 0].nbytes
    assert sum(kept.values()) == 2 * out.nbytes + keys.nbytes + values.nbytes + sums


def test_gradients_of_a_prompt_are_sums_of_many_precise_parts(monkeypatch, device):
    """On a GPU it is the kernel itself; 16-bit atomic sums lose what is below half a unit."""

    def of_values(dtype, device):
        layout, queries, keys, values = row(star(600), dtype, device)
        out = over_stretches(queries, keys, values, layout, SCORING)
        return torch.autograd.grad(out, values, torch.ones_like(out))[0][:5].double().cpu()

    with monkeypatch.context() as patched:
        use_slow_flash_attention(patched)
        exact = of_values(torch.float64, "cpu")
    if device.type == "cpu":
        use_slow_flash_attention(monkeypatch)
    assert (of_values(torch.bfloat16, device) - exact).norm() / exact.norm() < 2**-8


def test_bounded_scores_are_refused():
    layout, queries, keys, values = row(star(3), torch.float64)
    with pytest.raises(ModelError, match="bounds its scores"):
        over_stretches(queries, keys, values, layout, replace(SCORING, cap=2.0))
