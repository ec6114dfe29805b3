import math
import random
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError, GraphError
from graphpo_agent.graph.samples import to_path_rows
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import training_sample
from graphpo_agent.methods.prm import Prm
from tests.graph.strategies import graph_of, random_record
from tests.methods.growing import World, ends_at, grow
from tests.methods.shapes import credit_of, graph_from, trajectory_advantages

#  0 ── 1 ── 2 R=1     s(1)=0.9 s(2)=0.8
#  └─ 3 ── 4 R=0       s(3)=0.5 s(4)=0.2
PARENTS = [None, 0, 1, 0, 3]
REWARDS = [None, None, 1.0, None, 0.0]
SCORES = [None, 0.9, 0.8, 0.5, 0.2]


def test_the_whole_response_as_one_step_by_hand():
    # Only the terminals' scores count: 0.75·0.8 + 0.25 = 0.85 and 0.75·0.2 = 0.15.
    graph = graph_from(PARENTS, REWARDS, step_score=SCORES)
    credit = credit_of(Prm(), graph)
    assert credit.trajectory_advantages == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)
    assert credit.rows is not None and credit.rows.tolist() == [2, 4]
    assert credit.columns == {}
    mixed = Prm(prm_weight=0.5)
    graph = graph_from([None, 0, 0, 0], [None, 1.0, 0.0, 0.0], step_score=[None, 0.2, 0.6, 0.0])
    # 0.6, 0.3 and 0: mean 0.3, std 0.3.
    assert trajectory_advantages(mixed, graph) == pytest.approx([1, 0, -1], abs=1e-5)


def test_edges_as_steps_by_hand():
    # Rewards 0.9, 0.75·0.8 + 0.25 = 0.85, 0.5 and 0.15: mean 0.6.
    graph = graph_from(PARENTS, REWARDS, step_score=SCORES)
    credit = credit_of(Prm(steps="edges"), graph)
    std = math.sqrt((0.3**2 + 0.25**2 + 0.1**2 + 0.45**2) / 3)
    expected = np.array([0.55, 0.25, -0.55, -0.45]) / (std + 1e-6)
    assert credit.advantages.shape == (1, 5) and math.isnan(credit.advantages[0, 0])
    assert credit.advantages[0, 1:] == pytest.approx(expected)
    np.testing.assert_array_equal(credit.columns["advantage"], credit.advantages[0])
    assert credit.trajectory_advantages is None
    assert credit.rows is not None and credit.rows.tolist() == [2, 4]


def test_a_trajectory_without_its_scores_is_in_no_group():
    graph = graph_from(
        [None, 0, 0, 0, 0, 4],
        [None, 1.0, 0.0, 1.0, None, 0.0],
        step_score=[None, 0.6, 0.2, None, None, 0.9],
    )
    of_trajectory = trajectory_advantages(Prm(), graph)
    # 0.7, 0.15 and 0.675; the third terminal has no score, the fourth's own edge has one.
    m, s = mean([0.7, 0.15, 0.675]), stdev([0.7, 0.15, 0.675])
    expected = [(x - m) / s for x in (0.7, 0.15, 0.675)]
    assert of_trajectory[[0, 1, 3]] == pytest.approx(expected, abs=1e-5)
    assert math.isnan(of_trajectory[2])
    rows = credit_of(Prm(), graph).rows
    assert rows is not None and rows.tolist() == [1, 2, 5]
    by_edges = credit_of(Prm(steps="edges"), graph)
    assert by_edges.rows is not None and by_edges.rows.tolist() == [1, 2]
    h = 0.5**0.5
    assert by_edges.advantages[0, 1:] == pytest.approx([h, -h, 0, 0, 0], abs=1e-5)


def test_a_trajectory_without_its_score_is_no_row_and_the_others_keep_their_advantages():
    graph = graph_from(
        [None, 0, 0, 0],
        [None, 1.0, 1.0, 0.0],
        step_score=[None, None, 0.9, 0.3],
        tokens=[[1], [5], [6], [7]],
        logprobs=[[0.0], *[[-0.5]] * 3],
    )
    rows = to_path_rows(training_sample(graph, credit_of(Prm(), graph)))
    assert [row.token_ids.tolist() for row in rows] == [[1, 6], [1, 7]]
    h = 0.5**0.5
    assert [row.advantages[0].tolist() for row in rows] == [
        pytest.approx([0, h], abs=1e-5),
        pytest.approx([0, -h], abs=1e-5),
    ]


def test_a_prompt_that_is_an_answer_has_no_edge_to_score():
    graph = graph_from([None], [1.0], step_score=[None])
    for steps in ("edges", "response"):
        credit = credit_of(Prm(steps=steps), graph)
        assert credit.rows is not None and not len(credit.rows) and not credit.has_signal


def test_early_stopped_paths_count_nowhere():
    graph = graph_from([None, 0, 0, 0], [None, 1.0, 0.0, None], step_score=[None, 1.0, 0.0, 0.123])
    h = 0.5**0.5
    for steps in ("response", "edges"):
        got = credit_of(Prm(steps=steps), graph).advantages[0, 1:]
        assert got == pytest.approx([h, -h, 0.0], abs=1e-5)


@pytest.mark.parametrize("steps", ["response", "edges"])
def test_equal_rewards_have_no_signal_and_one_keeps_its_own(steps):
    graph = graph_from([None, 0, 0, 0], [None, 1.0, 1.0, 1.0], step_score=[None, 0.1, 0.1, 0.1])
    assert not credit_of(Prm(steps=steps), graph).has_signal
    alone = graph_from([None, 0], [None, 1.0], step_score=[None, 0.4])
    assert credit_of(Prm(steps=steps), alone).advantages[0, 1] == pytest.approx(0.55, abs=1e-5)


def test_a_graph_without_scores_is_one_line_that_names_the_field():
    graph = graph_from(PARENTS, REWARDS, step_score=[None, 0.9, None, 0.5, None])
    with pytest.raises(GraphError, match=r"graph 'g': .*field `step_score` of the terminals"):
        Prm().check_scores([graph])
    with pytest.raises(GraphError, match=r"field `step_score` of each edge"):
        Prm(steps="edges").check_scores([graph])
    assert not credit_of(Prm(), graph).has_signal, "an outage trains nothing and ends no run"
    assert not credit_of(Prm(steps="edges"), graph).has_signal
    Prm().check_scores([graph, graph_from([None, 0], [None, 1.0], step_score=[None, 0.4])])
    unfinished = graph_from([None, 0], [None, None])
    Prm().check_scores([unfinished])
    assert not credit_of(Prm(), unfinished).has_signal
    assert not credit_of(Prm(steps="edges"), unfinished).has_signal


def test_the_weight_lies_between_nought_and_one():
    with pytest.raises(ConfigError, match=r"prm_weight 1\.5 is outside"):
        Prm(prm_weight=1.5)


def scored_records(max_nodes=16):
    """Random trees whose edges have step scores, or not."""

    def build(num_nodes, seed):
        record = random_record(num_nodes, seed, keys=False, embeddings=False)
        rng = random.Random(seed)
        known = rng.choice([0.7, 1.0, 1.0])
        for node in record["nodes"][1:]:
            if rng.random() < known:
                node["step_score"] = rng.choice([0.0, 0.5, 1.0, rng.random()])
        return record

    return st.builds(build, st.integers(1, max_nodes), st.integers(0, 2**32))


def paths_of(record):
    """leaf id -> node ids below the root down to the leaf."""
    parent = {x["id"]: x["parent"] for x in record["nodes"]}
    paths = {}
    for node in record["nodes"]:
        if node["terminal"]:
            v, path = node["id"], []
            while parent[v] is not None:
                path.insert(0, v)
                v = parent[v]
            paths[node["id"]] = path
    return paths


def standardised(values):
    if len(values) == 1:
        return [values[0] / (1 + 1e-6)]
    if not values or stdev(values) <= 1e-12:
        return [0.0] * len(values)
    return [(x - mean(values)) / (stdev(values) + 1e-6) for x in values]


@given(scored_records(), st.sampled_from([0.75, 0.0, 1.0]))
def test_process_supervision_is_the_definition_s_on_random_trees(record, weight):
    node = {x["id"]: x for x in record["nodes"]}
    steps = []
    for leaf, path in paths_of(record).items():
        scores = [node[v].get("step_score") for v in path]
        if None not in scores:
            scores[-1] = weight * scores[-1] + (1 - weight) * node[leaf]["reward"]
            steps += [(leaf, v, r) for v, r in zip(path, scores, strict=True)]
    graph, method = graph_of(record), Prm(steps="edges", prm_weight=weight)
    if not steps:
        if paths_of(record):
            with pytest.raises(GraphError):
                method.check_scores([graph])
        return
    values = standardised([r for _, _, r in steps])
    received = {v: [] for v in node}
    for i, (leaf, v, _) in enumerate(steps):
        rest = [values[j] for j in range(i, len(steps)) if steps[j][0] == leaf]
        received[v].append(math.fsum(rest))
    expected = [mean(received[v]) if received[v] else 0.0 for v in list(node)[1:]]
    got = credit_of(method, graph)
    assert got.advantages[0, 1:] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert got.rows is not None
    assert set(graph.node_ids[got.rows].tolist()) == {leaf for leaf, _, _ in steps}


@given(scored_records(), st.sampled_from([0.75, 0.0, 1.0]))
def test_one_step_is_the_definition_s_on_random_trees(record, weight):
    leaves = [x for x in record["nodes"] if x["terminal"]]
    known = [x for x in leaves if "step_score" in x]
    graph, method = graph_of(record), Prm(prm_weight=weight)
    if leaves and not known:
        with pytest.raises(GraphError):
            method.check_scores([graph])
        return
    values = standardised([weight * x["step_score"] + (1 - weight) * x["reward"] for x in known])
    expected = dict(zip([x["id"] for x in known], values, strict=True))
    got = trajectory_advantages(method, graph).tolist()
    for node, advantage in zip(leaves, got, strict=True):
        wanted = expected.get(node["id"], math.nan)
        assert advantage == pytest.approx(wanted, rel=1e-6, abs=1e-9, nan_ok=True)


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), min_size=1, max_size=8))
def test_chains_of_one_edge_are_the_same_either_way_and_grpo_without_the_model(chains):
    rewards, scores = zip(*chains, strict=True)
    graph = graph_from([None] + [0] * len(chains), [None, *rewards], step_score=[None, *scores])
    whole, edges = (credit_of(Prm(steps=s), graph).advantages for s in ("response", "edges"))
    np.testing.assert_allclose(whole, edges, atol=1e-9)
    np.testing.assert_allclose(
        trajectory_advantages(Prm(prm_weight=0.0), graph), trajectory_advantages(Grpo(), graph)
    )


def test_it_grows_chains():
    grown = grow(Prm(), World(ends_at(2)))
    assert grown.counts(1) == [(0, 6)]
    assert len(grown.graph.terminals) == 6 and grown.graph.num_nodes == 13
    assert len(grow(Prm(), World(ends_at(2), trajectories=9)).graph.terminals) == 9
