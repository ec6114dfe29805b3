"""The fast core against the slow oracle, on random graphs and all options."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.graph import equivalence
from graphpo_agent.graph.budget import allocate
from graphpo_agent.graph.credit import CreditOptions, graph_credit
from graphpo_agent.graph.equivalence import (
    MergeOptions,
    edge_similarity,
    find_classes,
    find_classes_many,
    novelty,
)

from . import oracle
from .strategies import credit_settings, graph_of, merge_settings, random_record, records

slow_examples = settings(max_examples=250, deadline=None)


def by_id(graph, values):
    """{id: value}, NaN as None."""
    return {
        v: None if isinstance(x, float) and np.isnan(x) else x
        for v, x in zip(graph.node_ids.tolist(), np.asarray(values).tolist(), strict=True)
    }


def assert_same(ours, theirs):
    for v, value in theirs.items():
        if value is None:
            assert ours[v] is None, v
        else:
            assert ours[v] == pytest.approx(value, abs=1e-9, rel=1e-7), v


@slow_examples
@given(records(), merge_settings)
def test_classes(record, options):
    graph = graph_of(record)
    found = find_classes(graph, MergeOptions(**options))
    expected = oracle.classes(oracle.Graph(record["nodes"]), **options)
    assert by_id(graph, graph.node_ids[found]) == expected


@slow_examples
@given(records(max_nodes=24, embeddings=False), merge_settings)
def test_classes_by_keys_alone(record, options):
    graph = graph_of(record)
    found = find_classes(graph, MergeOptions(**options))
    expected = oracle.classes(oracle.Graph(record["nodes"]), **options)
    assert by_id(graph, graph.node_ids[found]) == expected


@slow_examples
@given(records(max_nodes=24, keys=False))
def test_classes_by_embeddings_alone(record):
    graph = graph_of(record)
    found = find_classes(graph, MergeOptions())
    assert by_id(graph, graph.node_ids[found]) == oracle.classes(oracle.Graph(record["nodes"]))


@settings(max_examples=30, deadline=None)
@given(st.lists(records(), min_size=1, max_size=4), merge_settings)
def test_many_graphs_at_once_are_the_graphs_one_by_one(many, options):
    graphs = [graph_of(record) for record in many]
    together = find_classes_many(graphs, MergeOptions(**options))
    for graph, classes in zip(graphs, together, strict=True):
        assert classes.tolist() == find_classes(graph, MergeOptions(**options)).tolist()


@slow_examples
@given(records(), merge_settings)
def test_novelty_and_edge_similarity(record, options):
    graph, slow = graph_of(record), oracle.Graph(record["nodes"])
    rules = {k: v for k, v in options.items() if k != "threshold"}
    found = novelty(graph, np.arange(graph.num_nodes), MergeOptions(**options))
    assert_same(by_id(graph, found), {v: oracle.novelty(slow, v, **rules) for v in slow.ids})
    eta = by_id(graph, edge_similarity(graph))
    for v in slow.edges():
        expected = oracle.similarity(slow, slow.parent[v], v)
        assert eta[v] == pytest.approx(max(0.0, expected or 0.0), abs=1e-12)


@slow_examples
@given(records(), merge_settings, credit_settings)
def test_credit(record, merging, options):
    graph, slow = graph_of(record), oracle.Graph(record["nodes"])
    classes = find_classes(graph, MergeOptions(**merging))
    credit = graph_credit(graph, classes, CreditOptions(**options))
    name = by_id(graph, graph.node_ids[classes])
    expected = oracle.credit(slow, name, **options)
    if credit.trajectory_advantage is None:
        assert options["trajectory_weight"] == 0
        del expected["trajectory_advantage"]
    for field, values in expected.items():
        assert_same(by_id(graph, getattr(credit, field)), values)
    for field in ("step_reward", "correctness_advantage", "efficiency_advantage", "advantage"):
        assert np.isnan(getattr(credit, field)[0])


@slow_examples
@given(
    records(),
    merge_settings,
    st.integers(1, 5),
    st.integers(0, 9),
    st.sampled_from(["novel", "uncertain", "none"]),
    st.data(),
)
def test_allocation(record, options, branching, carried, reallocate, data):
    graph, slow = graph_of(record), oracle.Graph(record["nodes"])
    classes = find_classes(graph, MergeOptions(**options))
    name = by_id(graph, graph.node_ids[classes])
    places = [v for v in graph.leaves.tolist() if not graph.terminal[v]]
    every = np.array([v for v in places if data.draw(st.integers(0, 3)) > 0], np.int64)
    active = np.array([v for v in every.tolist() if data.draw(st.integers(0, 3)) > 0], np.int64)
    credit = graph_credit(graph, classes, CreditOptions())
    found = allocate(
        graph,
        classes,
        active,
        branching,
        carried,
        options=MergeOptions(**options),
        reallocate=reallocate,
        scores=credit.score,
        all_active=every,
    )
    rules = {k: v for k, v in options.items() if k != "threshold"}
    given_to, pool = oracle.allocate(
        slow,
        name,
        graph.node_ids[active].tolist(),
        branching,
        carried,
        elsewhere=graph.node_ids[every].tolist(),
        reallocate=reallocate,
        scores=oracle.scores(slow, name),
        **rules,
    )
    assert found.continuations.tolist() == [given_to[v] for v in graph.node_ids[active].tolist()]
    assert found.saved_pool == pool
    given_beyond = np.maximum(found.continuations - branching, 0).sum()
    assert carried + found.saved == pool + given_beyond
    assert found.continuations.sum() == branching * len(active) - found.saved + given_beyond
    assert sorted(found.order) == list(range(len(active)))
    in_order = found.continuations[found.order]  # what was saved goes to the first ones
    assert (np.diff(in_order) <= 0).all() or reallocate == "none"


def test_many_pairs_are_taken_in_the_same_order_as_few(monkeypatch):
    options = MergeOptions(threshold=0.3)
    graphs = [graph_of(random_record(18, seed, keys=False)) for seed in range(200)]
    expected = [find_classes(graph, options).tolist() for graph in graphs]
    monkeypatch.setattr(equivalence, "_CHUNK", 4)
    assert [find_classes(graph, options).tolist() for graph in graphs] == expected
