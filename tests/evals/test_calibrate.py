"""Calibration on graphs whose values are known: by hand, and sampled with a scripted policy."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.evals import calibrate
from graphpo_agent.evals.calibrate import CalibrateOptions, calibrate_choices
from graphpo_agent.evals.calibrate_pairs import (
    candidate_pairs,
    equal_keys,
    merge_at,
    plan_samples,
)
from graphpo_agent.evals.calibrate_values import StateChoice, replay_graphs, sample_rewards
from graphpo_agent.graph.credit import CreditOptions
from graphpo_agent.graph.equivalence import MergeOptions, find_classes
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.tree import tree
from graphpo_agent.rollout.grow import Grower
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.rollout.summarize import KeyDescriber, TextDescriber
from graphpo_agent.types import Outcome, SamplingParams, Task
from tests.graph.strategies import graph_of, merge_options, records
from tests.rollout.scripted import ScriptedPolicy

MERGING = MergeOptions()


def fan(name: str, keys: str) -> RolloutGraph:
    """Four states below the root, and below each a terminal: 0, 1, 0, 1."""
    edge = ((7,), (1,), (-0.5,))
    states = [NewNode(0, *edge, False, None, key=key) for key in keys]
    ends = [NewNode(v, *edge, True, float(v % 2 == 0)) for v in range(1, 5)]
    return RolloutGraph.root(name, token_ids=[1, 2]).append(states).append(ends)


def measured(
    keys: dict[str, str],
    rewards,
    options=CalibrateOptions(reference="right"),  # noqa: B008
    others=None,
    weights=None,
    copies=1,
):
    """The calibration of two equal fans, every pair in the sample; ``others``: of the second.

    ``weights``: of the merged pairs instead of 1; ``copies``: of both fans.
    """
    choices = {name: [fan("a", own), fan("b", own)] * copies for name, own in keys.items()}
    graphs = choices["right"]
    pairs = candidate_pairs(graphs, [~graph.terminal for graph in graphs], MERGING)
    merges = {name: merge_at(each, pairs, MERGING, [0.5, 0.92]) for name, each in choices.items()}
    rng = np.random.default_rng(0)
    random_sample, samples = plan_samples(merges, pairs, 1000, rng)
    if weights is not None:
        samples = {name: replace(each, weights=weights) for name, each in samples.items()}
    rows = np.full((18, 4), np.nan)
    rows[[1, 2, 3, 4, 10, 11, 12, 13]] = [*rewards, *(others or rewards)]
    rows = np.tile(rows, (copies, 1))
    return calibrate_choices(
        graphs,
        merges,
        pairs,
        random_sample,
        samples,
        rows,
        credit=CreditOptions(),
        truth=equal_keys(graphs, pairs),
        options=options,
        rng=rng,
    )


WORTH = [[1.0] * 4, [1.0] * 4, [0.0] * 4, [0.0] * 4]


def test_right_and_wrong_keys_by_hand():
    found = measured({"right": "aabb", "wrong": "abab", "none": "abcd"}, WORTH)
    assert (found.candidate_pairs, found.measured_states, found.num_graphs) == (12, 8, 2)
    assert found.difference == pytest.approx((4 / 6) ** 0.5)
    (right,) = found.choices["right"].rows
    assert (right.threshold, right.merged_pairs, right.merged_states) == (None, 4, 8)
    assert (right.right, right.difference, right.spread, right.spread_upper) == (1, 0, 0, 0)
    assert (right.precision, right.recall) == (1.0, 1.0)
    (wrong,) = found.choices["wrong"].rows
    assert (wrong.measured_pairs, wrong.right, wrong.difference) == (4, 0.0, 1.0)
    assert (wrong.spread, wrong.precision, wrong.recall) == (pytest.approx(1.5), 0.0, 0.0)
    assert found.choices["wrong"].recommended is None
    (alone,) = found.choices["none"].rows
    assert alone.merged_pairs == alone.merged_states == alone.measured_pairs == 0
    assert np.isnan([alone.right, alone.difference, alone.spread, alone.spread_upper]).all()
    assert found.choices["none"].recommended is None


def test_a_threshold_is_recommended_for_what_is_sure_of_its_spread():
    # Merged pairs differ by 0, 0, 0 and 1, all pairs by 7 times 1 in 12; one graph is 0, one 1.
    unsure = [[1.0] * 4, [1.0] * 4, [0.0] * 4, [1.0] * 4]
    options = CalibrateOptions(tolerance=0.5, reference="right")
    found = measured({"right": "aabb"}, WORTH, options, others=unsure).choices["right"]
    assert found.rows[0].spread == pytest.approx(3 / 7) and found.rows[0].spread_upper > 1
    assert found.recommended is None


@pytest.mark.parametrize("copies", [7, 8])
def test_nothing_is_recommended_for_a_few_pairs_that_happen_to_be_equal(copies):
    right = measured({"right": "aabb"}, WORTH, copies=copies).choices["right"]
    (row,) = right.rows
    assert (row.measured_pairs, row.spread_upper) == (4 * copies, 0.0)
    assert right.recommended == (row if copies == 8 else None)


def test_a_choice_is_tested_alike_whichever_others_there_are(monkeypatch):
    shuffles: list[float] = []

    def p_values(rewards, i, j, rng):
        shuffles.append(rng.random())
        return np.ones(len(i))

    monkeypatch.setattr(calibrate, "difference_p_values", p_values)
    measured({"right": "aabb", "wrong": "abab", "same": "aabb"}, WORTH)
    assert len(shuffles) == 3 and len(set(shuffles)) == 1


def test_errors_of_node_scores_by_hand():
    found = measured({"right": "aabb", "wrong": "abab"}, WORTH)
    assert found.score_error == pytest.approx(0.5)  # 0, 1, 0, 1 for 1, 1, 0, 0
    low, high = 0.7 / 1.7, 1.0 / 1.7  # pooled with weight 0.7
    errors = [(low - 1) ** 2, (high - 1) ** 2, low**2, high**2]
    assert found.choices["right"].rows[0].score_error == pytest.approx(np.mean(errors))
    assert found.choices["wrong"].rows[0].score_error == pytest.approx(0.5)


def test_noise_is_taken_out_of_the_errors_and_the_spread():
    halves = [[1.0, 1.0, 0.0, 0.0]] * 4  # all the same, seen through noise 1/12
    found = measured({"right": "aaaa"}, halves)
    assert found.difference == 0.0  # the squares are estimated as -1/6
    assert np.isnan(found.choices["right"].rows[0].spread)
    assert found.choices["right"].recommended is None
    assert found.score_error == pytest.approx(0.25 - 1 / 12)


def test_a_spread_that_noise_takes_below_0_is_bounded_from_0():
    one, other = [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]  # means 3/4 and 1/4, of variance 1/16
    (row,) = measured({"right": "aabb"}, [one, one, other, other]).choices["right"].rows
    # In merged pairs −1/8, in others 1/4 less that.
    assert row.spread == pytest.approx((-1 / 8) / ((4 / 8 - 2 / 8) / 6))
    assert row.spread_upper == 0.0 and row.difference == 0.0


def test_a_pair_counts_as_often_as_it_stands_for_others():
    rewards = [[1.0] * 4, [1.0] * 4, [0.0] * 4, [1.0] * 4]  # merged pairs: 0, 1, 0, 1
    (row,) = (
        measured({"right": "aabb"}, rewards, weights=np.array([3.0, 1, 3, 1])).choices["right"].rows
    )
    assert row.difference == pytest.approx(0.5) and row.spread == pytest.approx(0.25 / (3 / 6))


def test_states_without_a_key_are_not_known_to_be_the_same():
    graphs = [fan("a", ["a", None, None, "a"])]  # type: ignore[arg-type]
    pairs = candidate_pairs(graphs, [~graphs[0].terminal], MERGING)
    same = equal_keys(graphs, pairs)
    assert [(pairs.i[k], pairs.j[k]) for k in np.flatnonzero(same)] == [(1, 4)]


def test_a_graph_without_evidence_is_not_counted():
    rewards = [[1.0] * 4, [1.0, *[np.nan] * 3], [0.0] * 4, [0.0] * 4]
    (row,) = measured({"right": "aabb"}, rewards).choices["right"].rows
    assert (row.merged_pairs, row.measured_pairs) == (4, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(records(max_nodes=10), min_size=1, max_size=3), merge_options, st.integers(0, 99))
def test_candidates_and_merges_are_the_cores(made, options, seed):
    graphs = [replace(graph_of(record), id=f"g{k}") for k, record in enumerate(made)]
    rng = np.random.default_rng(seed)
    is_open = [~graph.terminal & (rng.random(graph.num_nodes) < 0.8) for graph in graphs]
    pairs = candidate_pairs(graphs, is_open, options)
    starts = np.cumsum([0, *(graph.num_nodes for graph in graphs)]).tolist()
    expected = set()
    for graph, own, start in zip(graphs, is_open, starts, strict=False):
        above = [{0, *graph.path(v)} for v in range(graph.num_nodes)]
        for j in range(graph.num_nodes):
            for i in range(1, j):
                related = i in above[j] or j in above[i]
                gap = abs(int(graph.depth[i] - graph.depth[j]))
                near = options.max_layer_gap is None or gap <= options.max_layer_gap
                if own[i] and own[j] and not related and near:
                    expected.add((start + i, start + j))
    assert set(zip(pairs.i.tolist(), pairs.j.tolist(), strict=True)) == expected
    assert len(pairs.i) == len(expected)
    found = merge_at(graphs, pairs, options, [0.3, 0.92])
    for threshold, classes, merged in zip(
        found.thresholds, found.classes, found.merged, strict=True
    ):
        kappa = options.threshold if threshold is None else threshold
        exact = [find_classes(graph, replace(options, threshold=kappa)) for graph in graphs]
        assert all((a == b).all() for a, b in zip(exact, classes, strict=True))
        label = np.concatenate([own + s for own, s in zip(exact, starts, strict=False)])
        assert (merged == (label[pairs.i] == label[pairs.j])).all()


def test_of_one_budget_every_threshold_gets_pairs():
    graphs = [fan(f"g{k}", "aaab") for k in range(30)]
    pairs = candidate_pairs(graphs, [~graph.terminal for graph in graphs], MERGING)
    merges = {"keys": merge_at(graphs, pairs, MERGING, [0.92])}
    random_sample, samples = plan_samples(merges, pairs, 40, np.random.default_rng(0))
    assert len(random_sample.places) == len(samples["keys"].places) == 40
    assert samples["keys"].weights.sum() == pytest.approx(90)  # three of six pairs each
    assert merges["keys"].merged[0, samples["keys"].places].all()


@pytest.mark.parametrize(
    "values",
    [
        {"continuations": 1},
        {"pairs": 0},
        {"thresholds": ()},
        {"thresholds": (0.0, 0.5)},
        {"tolerance": 0.0},
        {"tolerance": float("nan")},
    ],
)
def test_options_out_of_range_are_refused(values):
    with pytest.raises(ConfigError):
        CalibrateOptions(**values)


# ---- sampled: a letter that decides (h or l), one that does not (x or y), and 0 or 1


LETTERS = {0: "hl", 1: "xy"}


def script(context, seed):
    """One of two letters, then 1 with chance 0.9 after h and 0.1 after l."""
    rng = np.random.default_rng(seed)
    said = bytes(context[context.index(257, 1) + 1 :]).decode()
    if len(said) < 2:
        return [ord(LETTERS[len(said)][rng.integers(2)])]
    return [ord("1" if rng.random() < (0.9 if said[0] == "h" else 0.1) else "0")]


def right(task: Task, outcome: Outcome) -> float:
    return float("1" in outcome.response)


@pytest.fixture(scope="module")
def world():
    """A grower, its policy, 12 graphs of 3 letters, and their tasks."""
    grower = Grower(SegmentExpander(segment_length=1, max_response_tokens=3), right)
    policy = ScriptedPolicy(script)
    tasks = [Task(f"t{k}", "?", ()) for k in range(12)]
    rollouts = grower.grow(policy, tasks, tree((6, 2, 1)), SamplingParams(), ("test",))
    return grower, policy, [rollout.graph for rollout in rollouts], tasks


class FirstLetter:
    """Vectors of texts: cosine 1 for one first letter, 0.83 for different ones."""

    def embed(self, texts):
        return np.array([[1.0, 0.3 if text[0] == "h" else -0.3] for text in texts], np.float32)


CHOICES = {
    "first": StateChoice(KeyDescriber(lambda state: state.response[:1]), None),
    "second": StateChoice(KeyDescriber(lambda state: state.response[1:2] or None), None),
    "text": StateChoice(TextDescriber(10), FirstLetter()),
}


def test_a_scripted_world_is_calibrated_end_to_end(world):
    grower, policy, graphs, tasks = world
    finished: list[int] = []
    replays, seen = replay_graphs(
        grower, policy, graphs, tasks, CHOICES, lambda: finished.append(1)
    )
    assert len(finished) == 12
    pairs = candidate_pairs(graphs, [~each.ended for each in replays], MERGING)
    thresholds = [0.5, 0.92]
    merges = {name: merge_at(each, pairs, MERGING, thresholds) for name, each in seen.items()}
    rng = np.random.default_rng(0)
    random_sample, samples = plan_samples(merges, pairs, 5000, rng)
    nodes = [np.flatnonzero(~each.ended)[1:] for each in replays]
    rewards = sample_rewards(grower, policy, replays, nodes, 40, SamplingParams(), 0)
    for each, own, rows in zip(replays, nodes, rewards, strict=True):
        for v in own.tolist():
            value = 0.9 if each.states[v].response[0] == "h" else 0.1
            assert abs(rows[v].mean() - value) < 5 * (0.09 / 40) ** 0.5
    found = calibrate_choices(
        graphs,
        merges,
        pairs,
        random_sample,
        samples,
        np.concatenate(rewards),
        credit=CreditOptions(),
        truth=equal_keys(seen["first"], pairs),
        options=CalibrateOptions(),
        rng=rng,
    )
    first, second, text = (found.choices[name] for name in CHOICES)
    assert first.recommended is not None and first.rows[0].right > 0.95
    assert abs(first.rows[0].spread) < 0.02 and first.rows[0].spread_upper < 0.05
    assert second.recommended is None and second.rows[0].spread > 0.5
    assert second.rows[0].right < 0.8
    assert first.rows[0].score_error < found.score_error
    assert text.recommended is not None and text.recommended.threshold == 0.92
    assert text.rows[0].spread > 0.3 and text.rows[1].precision == 1.0


def test_rewards_depend_on_seed_graph_and_node_only(world):
    grower, policy, graphs, tasks = world
    replays, _ = replay_graphs(grower, policy, graphs[:2], tasks[:2], {})
    every = [np.flatnonzero(~each.ended) for each in replays]
    few = [own[2:4] for own in every]
    finished: list[int] = []

    def sample(nodes, count=3, seed=0):
        policy.requests.clear()
        policy._answered = 0
        return sample_rewards(
            grower,
            policy,
            replays,
            nodes,
            count,
            SamplingParams(),
            seed,
            lambda: finished.append(1),
        )

    whole = sample(every)
    seeds = [request.seed for request in policy.requests]
    assert len(set(seeds)) == len(seeds) > 3 * sum(map(len, every))
    part = sample(few)
    assert len(finished) == 3 * sum(map(len, every)) + 3 * sum(map(len, few))
    for g in range(2):
        np.testing.assert_array_equal(whole[g][few[g]], part[g][few[g]])
        assert np.isnan(np.delete(part[g], few[g], axis=0)).all()
    many = sample(few, count=600)  # more chains than are sampled at once
    for g in range(2):
        np.testing.assert_array_equal(many[g][few[g], :3], part[g][few[g]])
    other = np.concatenate(sample(every, seed=1))
    assert not np.array_equal(other, np.concatenate(whole), equal_nan=True)


def test_ends_that_the_run_leaves_unjudged_have_no_reward(world):
    grower, policy, graphs, tasks = world
    grower = replace(grower, truncated="early_stopped")
    replays, _ = replay_graphs(grower, policy, graphs[:1], tasks[:1], {})
    (rewards,) = sample_rewards(grower, policy, replays, [np.array([1, 2])], 4, SamplingParams(), 0)
    assert np.isnan(rewards).all()
