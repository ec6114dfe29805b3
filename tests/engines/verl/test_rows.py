"""A graph's rows against weights that are worked out from the definition, path by path."""

import numpy as np
import pytest

from graphpo_agent.engines.minibatches import minibatches
from graphpo_agent.engines.verl.layout import place_rows
from graphpo_agent.engines.verl.rows import moving_rows, weighted_rows
from tests.engines.graphs import partly_idle, random_sample
from tests.engines.test_rows import path, with_a_silent_row, with_rows

AGGREGATIONS = ["edge_mean", "token_mean", "sequence_mean", "sequence_sum"]
HORIZON = 50


def literal_weights(sample, aggregation):
    """Per trained sequence, (tokens of the sample, weight) as the definitions say; and the total.

    A sequence is a list of edges: of one where edges are trained, of a trajectory's otherwise.
    """
    trained = {}
    for v in range(1, len(sample.parent)):
        span = range(int(sample.offsets[v]), int(sample.offsets[v + 1]))
        tokens = [t for t in span if sample.loss_mask[t]]
        if tokens:
            trained[v] = tokens
    if sample.rows is None:
        sequences = [[v] for v in trained]
    else:
        sequences = [[v for v in path(sample, int(leaf)) if v in trained] for leaf in sample.rows]
    edges = sum(len(sequence) for sequence in sequences)
    weights = []
    for sequence in sequences:
        length = sum(len(trained[v]) for v in sequence)
        for v in sequence:
            for t in trained[v]:
                weight = {
                    "edge_mean": 1 / edges / len(trained[v]),
                    "token_mean": 1.0,
                    "sequence_mean": 1 / length,
                    "sequence_sum": 1 / HORIZON,
                }[aggregation]
                weights.append((t, weight))
    count = sum(1 for sequence in sequences if sequence)
    total = {"edge_mean": 1.0, "token_mean": float(len(weights))}.get(aggregation, count)
    return weights, total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("trajectories", [None, "one_advantage_each", "of_edges", "one_silent"])
@pytest.mark.parametrize("seed", range(4))
def test_every_trained_token_has_its_weight_once_per_sequence(seed, trajectories, aggregation):
    sample = random_sample(seed, num_nodes=14)
    if trajectories:
        sample = with_rows(seed, trajectories != "of_edges")
    if trajectories == "one_silent":
        sample = with_a_silent_row(sample)
    expected, total = literal_weights(sample, aggregation)
    made = weighted_rows(sample, aggregation, HORIZON)
    assert made.total == total
    found = []
    for row in made.rows:
        assert (row.weights[~row.loss_mask] == 0).all()
        assert (row.advantages[:, ~row.loss_mask] == 0).all()
        assert row.loss_mask.any() and not row.loss_mask[: row.prompt_tokens].any()
        found += [(int(row.token_ids[t]), row.weights[t]) for t in np.flatnonzero(row.loss_mask)]
    wanted = sorted((int(sample.token_ids[t]), weight) for t, weight in expected)
    np.testing.assert_allclose(sorted(found), wanted, atol=1e-15)


def test_advantages_are_those_of_edges_or_of_the_row_times_the_weight():
    sample = with_rows(3, one_advantage_each=True)
    made = weighted_rows(sample, "sequence_mean", HORIZON)
    assert len(made.rows) == len(sample.rows)
    for row, advantage in zip(made.rows, sample.row_advantages, strict=True):
        np.testing.assert_allclose(row.advantages[0], advantage * row.weights)
    two = random_sample(5, terms=2)
    for row in weighted_rows(two, "edge_mean", HORIZON).rows:
        owned = row.loss_mask
        ratios = (row.advantages / np.where(owned, row.weights, 1.0))[:, owned]
        assert {tuple(np.round(r, 9)) for r in ratios.T} <= {
            tuple(np.round(a, 9)) for a in two.advantages[:, 1:].T
        }


@pytest.mark.parametrize("trajectories", [None, "one_advantage_each", "of_edges"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_have_loss_where_they_have_an_advantage_and_end_with_the_last(seed, trajectories):
    sample = random_sample(seed, num_nodes=14)
    if trajectories:
        sample = with_rows(seed, trajectories == "one_advantage_each")
    whole = weighted_rows(partly_idle(sample, seed), "edge_mean", HORIZON)
    moving = moving_rows(whole.rows)
    shorter = sum(len(row.token_ids) for row in moving)
    assert shorter < sum(len(row.token_ids) for row in whole.rows)
    rest = iter(whole.rows)
    for row in moving:
        count = len(row.token_ids)
        assert row.loss_mask[-1]
        np.testing.assert_array_equal(row.loss_mask, row.advantages.any(axis=0))
        full = next(r for r in rest if r.token_ids[:count].tolist() == row.token_ids.tolist())
        np.testing.assert_array_equal(full.advantages[:, :count], row.advantages)
        kept = np.where(row.loss_mask, full.weights[:count], 0.0)
        np.testing.assert_array_equal(row.weights, kept)
        assert not full.advantages[:, count:].any()
    kept = sum(np.count_nonzero(row.advantages) for row in moving)
    assert kept == sum(np.count_nonzero(row.advantages) for row in whole.rows)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_each_minibatch_holds_its_graphs_rows_in_equal_shares(seed, ranks):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 9, 7)
    graph = np.repeat(np.arange(7), counts).tolist()
    lengths = rng.integers(10, 300, len(graph)).tolist()
    parts = [part.tolist() for part in minibatches(7, 3, seed, step=2)]
    added = [int(rng.integers(1, length + 1)) for length in lengths]
    for first in np.cumsum([0, *counts[:-1]]):
        added[first] = lengths[first]
    layout = place_rows(lengths, added, graph, parts, ranks)
    assert len(layout.order) == layout.rows_per_minibatch * len(parts)
    assert sorted(r for r in layout.order if r is not None) == list(range(len(graph)))
    # verl: equal contiguous shares of the ranks, each cut into equal pieces.
    share, piece = len(layout.order) // ranks, layout.rows_per_minibatch // ranks
    for number, graphs in enumerate(parts):
        held = []
        for rank in range(ranks):
            start = rank * share + number * piece
            held += [graph[r] for r in layout.order[start : start + piece] if r is not None]
        assert sorted(held) == sorted(g for g in graph if g in graphs)
    fullest = max(sum(counts[g] for g in one) for one in parts)
    assert -(-fullest // ranks) <= piece <= fullest


def test_tokens_are_spread_over_the_ranks():
    layout = place_rows([9, 5, 4], [9, 2, 4], [0, 0, 0], [[0]], 2)
    assert layout.order == [0, None, 1, 2]
    assert layout.rows_per_minibatch == 4
