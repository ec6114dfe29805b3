from dataclasses import replace

import numpy as np
import pytest
import torch

from graphpo_agent.engines.local.loss import Objective, clipped_objective, reverse_kl
from graphpo_agent.engines.local.token_weights import LossAggregation, token_weights
from tests.engines.graphs import random_sample


def per_token(ratios, advantages, objective=None, **more):
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    result = clipped_objective(
        logprobs,
        torch.zeros(len(ratios), dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        more.get("entropies", torch.zeros(len(ratios), dtype=torch.float64)),
        more.get("reference"),
        objective or Objective(),
    )
    result.loss.sum().backward()
    return result, logprobs.grad


def test_weights_of_the_worked_example():
    sample = random_sample(0, num_nodes=4)
    object.__setattr__(sample, "advantages", np.zeros((1, 3)))
    object.__setattr__(sample, "parent", np.array([-1, 0, 0]))
    object.__setattr__(sample, "offsets", np.array([0, 2, 3, 5]))
    object.__setattr__(sample, "loss_mask", np.array([0, 0, 1, 1, 1], bool))
    expected = {
        "edge_mean": [0, 0, 1 / 2, 1 / 4, 1 / 4],
        "token_mean": [0, 0, 1 / 3, 1 / 3, 1 / 3],
        "sequence_mean": [0, 0, 1 / 2, 1 / 4, 1 / 4],
        "sequence_sum": [0, 0, 1 / 20, 1 / 20, 1 / 20],
    }
    for aggregation, weights in expected.items():
        found = token_weights([sample], aggregation, horizon=10).weights
        np.testing.assert_allclose(found, weights)


@pytest.mark.parametrize("aggregation", ["edge_mean", "token_mean", "sequence_mean"])
def test_weights_sum_to_one_and_leave_observations_out(aggregation):
    samples = [random_sample(seed) for seed in range(3)]
    weights = token_weights(samples, aggregation).weights
    assert weights.sum() == pytest.approx(1.0)
    mask = np.concatenate([sample.loss_mask for sample in samples])
    assert ((weights > 0) == mask).all()


def test_every_edge_with_a_trained_token_weighs_the_same():
    sample = random_sample(1)
    weights = token_weights([sample], "edge_mean").weights
    per_edge = np.add.reduceat(weights, sample.offsets[:-1])
    trained = np.add.reduceat(sample.loss_mask, sample.offsets[:-1]) > 0
    assert 0 < trained.sum() < len(sample.parent) - 1
    np.testing.assert_allclose(per_edge[trained], 1 / trained.sum())
    assert not per_edge[~trained].any()


def test_an_edges_advantage_belongs_to_each_of_its_tokens():
    sample = random_sample(2, terms=2)
    spread = token_weights([sample], "edge_mean").advantages
    for node in range(1, len(sample.parent)):
        span = slice(sample.offsets[node], sample.offsets[node + 1])
        expected = np.broadcast_to(sample.advantages[:, node, None], spread[:, span].shape)
        np.testing.assert_array_equal(spread[:, span], expected)


def test_the_clip_cuts_gains_only_on_the_side_that_would_grow():
    result, gradient = per_token(
        [1.5, 1.5, 0.5, 0.5, 1.1], [[1.0, -1.0, 1.0, -1.0, 2.0]], Objective(0.2, 0.3)
    )
    np.testing.assert_allclose(result.loss.detach(), [-1.3, 1.5, -0.5, 0.8, -2.2])
    assert result.clipped[0].tolist() == [True, False, False, True, False]
    np.testing.assert_allclose(gradient, [0, 1.5, -0.5, 0, -2.2], atol=1e-15)


@pytest.mark.parametrize("advantage, dual_clip", [(1.0, None), (-1.0, 3.0)])
def test_a_clipped_token_has_no_gradient_however_large_its_ratio(advantage, dual_clip):
    logprobs = torch.tensor([-1.0, -1.0]).requires_grad_()
    old, advantages = torch.tensor([-101.0, -1.0]), torch.tensor([[advantage, advantage]])
    objective = Objective(dual_clip=dual_clip)
    result = clipped_objective(logprobs, old, advantages, torch.zeros(2), None, objective)
    result.loss.sum().backward()
    assert result.clipped.tolist() == [[True, False]]
    assert torch.isfinite(result.loss).all()
    assert logprobs.grad.tolist() == [0.0, -advantage]


def test_a_ratio_beyond_all_numbers_that_is_not_clipped_keeps_its_gradient():
    logprobs = torch.tensor([-1.0]).requires_grad_()
    old, advantages = torch.tensor([-101.0]), torch.tensor([[-1.0]])
    result = clipped_objective(logprobs, old, advantages, torch.zeros(1), None, Objective())
    result.loss.sum().backward()
    assert logprobs.grad.item() > 1e37


def test_separate_terms_are_clipped_apart():
    joint, _ = per_token([1.5], [[0.5 - 0.4]])
    separate, _ = per_token([1.5], [[0.5], [-0.4]])
    assert joint.loss.item() == pytest.approx(-1.2 * 0.1)
    assert separate.loss.item() == pytest.approx(-1.2 * 0.5 + 1.5 * 0.4)


def test_kl_and_entropy_enter_with_their_weights():
    reference = torch.tensor([-0.5], dtype=torch.float64)
    entropies = torch.tensor([1.7], dtype=torch.float64)
    result, _ = per_token(
        [1.0], [[0.0]], Objective(kl=0.1, entropy=0.01), reference=reference, entropies=entropies
    )
    expected = 0.1 * (np.exp(-0.5) - 1 + 0.5) - 0.01 * 1.7
    assert result.loss.item() == pytest.approx(expected)


def test_reverse_kl_is_unbiased_and_never_negative():
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    estimates = reverse_kl(policy, reference)
    assert (estimates >= 0).all()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimates).sum(), exact)


def test_the_dual_clip_bounds_a_loss_and_counts_as_clipped():
    """Where an advantage is positive, it changes nothing."""
    result, gradient = per_token([4.0, 2.0, 1.1], [[-1.0, -1.0, 1.0]], Objective(dual_clip=3.0))
    np.testing.assert_allclose(result.loss.detach(), [3.0, 2.0, -1.1])
    assert result.clipped[0].tolist() == [True, False, False]
    np.testing.assert_allclose(gradient, [0.0, 2.0, -1.1])


@pytest.mark.parametrize("aggregation", ["edge_mean", "token_mean", "sequence_mean"])
@pytest.mark.parametrize("in_rows", [False, True])
def test_a_graph_without_a_trained_token_does_not_count(
    aggregation: LossAggregation, in_rows: bool
) -> None:
    sample = random_sample(0)
    if in_rows:
        sample = replace(sample, rows=np.array([11]), row_advantages=np.array([1.0]))
    silent = replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    weights = token_weights([sample, silent], aggregation).weights
    assert weights.sum() == pytest.approx(1.0)
