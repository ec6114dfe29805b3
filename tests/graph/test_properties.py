"""What must hold for every graph."""

import random

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.graph.advantages import z_scores
from graphpo_agent.graph.credit import CreditOptions, graph_credit, graph_credits
from graphpo_agent.graph.equivalence import MergeOptions, find_classes
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph

from . import oracle
from .strategies import credit_options, graph_of, merge_options, merge_settings, records

many_examples = settings(max_examples=200, deadline=None)
few_examples = settings(max_examples=80, deadline=None)


def class_graph(graph, classes):
    edges = [(int(classes[graph.parent[v]]), int(classes[v])) for v in range(1, graph.num_nodes)]
    out = nx.DiGraph(edges)
    out.add_nodes_from(classes.tolist())
    return out


@many_examples
@given(records(max_nodes=60), merge_options)
def test_class_graph_has_no_cycle(record, options):
    graph = graph_of(record)
    assert nx.is_directed_acyclic_graph(class_graph(graph, find_classes(graph, options)))


@many_examples
@given(records(max_nodes=60), merge_options)
def test_classes_keep_every_rule(record, options):
    graph = graph_of(record)
    classes = find_classes(graph, options)
    for q in set(classes.tolist()):
        members = np.flatnonzero(classes == q)
        assert graph.node_ids[q] == graph.node_ids[members].min()
        if len(members) == 1:
            continue
        assert 0 not in members
        assert len({graph.keys[v] for v in members} - {None}) <= 1
        assert len({(graph.terminal[v], str(graph.reward[v])) for v in members}) == 1
        if options.merge_terminals == "never":
            assert not graph.terminal[members].any()
        if options.max_layer_gap is not None:
            assert np.ptp(graph.depth[members]) <= options.max_layer_gap


@many_examples
@given(
    records(max_nodes=40),
    merge_options,
    st.sampled_from(["std", "none", "rms"]),
    st.sampled_from(["leaf", "mean", "class"]),
)
def test_each_correctness_group_sums_to_zero(record, options, normalize, backup):
    graph = graph_of(record)
    classes = find_classes(graph, options)
    credit = graph_credit(graph, classes, CreditOptions(normalize=normalize, backup=backup))
    for q in set(classes.tolist()):
        edges = [v for v in range(1, graph.num_nodes) if classes[graph.parent[v]] == q]
        assert credit.correctness_advantage[edges].sum() == pytest.approx(0, abs=1e-6)


@many_examples
@given(records(max_nodes=40, keys=False), credit_options)
def test_a_threshold_above_every_similarity_is_a_tree(record, options):
    graph = graph_of(record)
    spread = np.random.default_rng(7).standard_normal((graph.num_nodes, 64)).astype(np.float32)
    for node, row in zip(record["nodes"], spread, strict=True):
        node["embedding"] = row.tolist()
    graph = graph_of(record)
    strict = find_classes(graph, MergeOptions(threshold=0.99))
    never = find_classes(graph, MergeOptions(merge="none"))
    assert strict.tolist() == never.tolist() == list(range(graph.num_nodes))
    merged, tree = (graph_credit(graph, c, options) for c in (strict, never))
    np.testing.assert_array_equal(merged.advantage, tree.advantage)
    np.testing.assert_array_equal(tree.efficiency_advantage[1:], 0)


def chains(rewards, length):
    """Independent chains {G, 1, 1, …} without keys or embeddings."""
    graph = RolloutGraph.root("chains", token_ids=[1])
    last = [0] * len(rewards)
    for h in range(1, length + 1):
        done = h == length
        nodes = [
            NewNode(p, (5,), (1,), (-0.5,), done, r if done else None)
            for p, r in zip(last, rewards, strict=True)
        ]
        last = [graph.num_nodes + i for i in range(len(nodes))]
        graph = graph.append(nodes)
    return graph


@given(st.lists(st.sampled_from([0.0, 1.0, 0.3]), min_size=2, max_size=9), st.integers(1, 5))
def test_chains_with_inherited_advantages_are_grpo(rewards, length):
    graph = chains(rewards, length)
    classes = find_classes(graph, MergeOptions())
    credit = graph_credit(graph, classes, CreditOptions(singleton="inherit"))
    grpo = z_scores(np.array(rewards))
    for leaf, advantage in zip(graph.terminals.tolist(), grpo.tolist(), strict=True):
        assert credit.advantage[graph.path(leaf)] == pytest.approx(advantage, abs=1e-9)


@many_examples
@given(records(), merge_options, credit_options, st.integers(0, 99))
def test_order_of_siblings_does_not_matter(record, merging, options, seed):
    """The same ids in another creation order: the same credit for each id."""
    nodes = record["nodes"][1:]
    random.Random(seed).shuffle(nodes)
    depth = oracle.Graph(record["nodes"]).depth
    nodes.sort(key=lambda node: depth[node["id"]])
    shuffled = {**record, "nodes": [record["nodes"][0], *nodes]}
    told = []
    for one in (record, shuffled):
        graph = graph_of(one)
        classes = find_classes(graph, merging)
        credit = graph_credit(graph, classes, options)
        rows = zip(graph.node_ids[classes], credit.score, credit.advantage, strict=True)
        told.append(dict(zip(graph.node_ids.tolist(), rows, strict=True)))
    for v, row in told[0].items():
        assert row == pytest.approx(told[1][v], abs=1e-9, nan_ok=True)


@many_examples
@given(records(max_nodes=40), merge_options, credit_options)
def test_undefined_is_undefined(record, merging, options):
    graph = graph_of(record)
    classes = find_classes(graph, merging)
    credit = graph_credit(graph, classes, options)
    if options.backup != "class":
        for v in range(graph.num_nodes):
            evidence = credit.total[v] + options.pool_weight * (
                credit.total[classes == classes[v]].sum() - credit.total[v]
            )
            assert np.isnan(credit.score[v]) == (evidence == 0)
    undefined = np.isnan(credit.score[1:]) | np.isnan(credit.score[graph.parent[1:]])
    assert (np.isnan(credit.step_reward[1:]) == undefined).all()
    assert (credit.unscored[1:] == undefined).all() and not credit.unscored[0]
    assert (credit.correctness_advantage[1:][undefined] == 0).all()
    assert np.isnan(credit.advantage[0]) and not np.isnan(credit.advantage[1:]).any()


@few_examples
@given(records(), merge_settings)
def test_a_growing_graph_is_the_whole_graph_up_to_its_layer(record, options):
    """Classes of the graph so far are those of the whole graph's procedure at that layer."""
    whole, merging = oracle.Graph(record["nodes"]), MergeOptions(**options)
    final = oracle.classes(whole, **options)
    for h in range(1, max(whole.depth.values()) + 1):
        nodes = [x for x in record["nodes"] if whole.depth[x["id"]] <= h]
        graph = graph_of({**record, "nodes": nodes})
        found = graph.node_ids[find_classes(graph, merging)].tolist()
        name = dict(zip(graph.node_ids.tolist(), found, strict=True))
        so_far = oracle.classes(whole, last_layer=h, **options)
        assert name == {v: so_far[v] for v in name}
        assert all(final[v] == final[q] for v, q in name.items()), "a class was split"


@given(st.lists(records(), min_size=1, max_size=5), merge_options, credit_options)
@settings(max_examples=60, deadline=None)
def test_credit_of_many_is_the_credit_of_each(many, merging, options):
    graphs = [graph_of(record) for record in many]
    classes = [find_classes(graph, merging) for graph in graphs]
    together = graph_credits(graphs, classes, options)
    for graph, own, credit in zip(graphs, classes, together, strict=True):
        alone = graph_credit(graph, own, options)
        np.testing.assert_allclose(credit.advantage, alone.advantage, atol=1e-9)
        np.testing.assert_allclose(credit.score, alone.score, atol=1e-12)


def test_two_long_chains_of_one_key_merge_step_by_step():
    """Two chains of 300 equal keys: the i-th states of both merge, nothing else can."""
    graph = RolloutGraph.root("chains", token_ids=[1])
    last = [0, 0]
    for _ in range(300):
        nodes = [NewNode(p, (5,), (1,), (-0.5,), False, None, key="same") for p in last]
        last = [graph.num_nodes, graph.num_nodes + 1]
        graph = graph.append(nodes)
    classes = find_classes(graph, MergeOptions())
    firsts = range(1, graph.num_nodes, 2)
    assert classes.tolist() == [0, *(v for v in firsts for _ in range(2))]
