"""Edges cut inside, against a slow walk over records."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from tests.graph.test_samples import small_graph
from tests.methods.shapes import graph_from


def random_graph(num_nodes, seed):
    rng = np.random.default_rng(seed)
    graph = RolloutGraph.root("g", token_ids=[0, 1])
    for v in range(1, num_nodes):
        length = int(rng.integers(1, 6))
        mask = rng.integers(0, 2, length).tolist()
        open_nodes = np.flatnonzero(~graph.terminal)
        graph = graph.append(
            [
                NewNode(
                    parent=int(rng.choice(open_nodes)),
                    token_ids=rng.integers(2, 99, length).tolist(),
                    loss_mask=mask,
                    logprobs=[-0.5 if m else float("nan") for m in mask],
                    terminal=v % 4 == 0,
                    reward=1.0 if v % 4 == 0 else None,
                    key=f"k{v}",
                    embedding=np.full(2, v, np.float32),
                    step_score=0.25,
                )
            ]
        )
    return graph


def walk(graph, v):
    """(tokens, mask) from the root to a node."""
    path = [0, *graph.path(v)]
    spans = [slice(graph.offsets[u], graph.offsets[u + 1]) for u in path]
    return (
        [t for s in spans for t in graph.token_ids[s].tolist()],
        [m for s in spans for m in graph.loss_mask[s].tolist()],
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 14), st.integers(0, 2**32))
def test_cuts_leave_every_path_as_it_was_and_add_its_beginnings(num_nodes, seed):
    graph = random_graph(num_nodes, seed)
    rng = np.random.default_rng(seed)
    possible = [
        (v, offset) for v in range(1, num_nodes) for offset in range(1, graph.num_tokens[v])
    ]
    places = [place for place in possible if rng.random() < 0.4]
    cut = graph.split(places)
    assert cut.num_nodes == num_nodes + len(places)
    assert (cut.parent[1:] < np.arange(1, cut.num_nodes)).all() and cut.parent[0] == -1
    assert len(set(cut.node_ids.tolist())) == cut.num_nodes
    position = {node_id: v for v, node_id in enumerate(cut.node_ids.tolist())}
    for v in range(num_nodes):
        u = position[int(graph.node_ids[v])]
        assert walk(cut, u) == walk(graph, v)
        assert (cut.terminal[u], cut.keys[u]) == (graph.terminal[v], graph.keys[v])
        assert cut.tree[u] == graph.tree[v]
        assert cut.has_embedding[u] == graph.has_embedding[v]
        np.testing.assert_array_equal(cut.embeddings[u], graph.embeddings[v])
        np.testing.assert_array_equal(cut.step_scores[u], graph.step_scores[v])
        np.testing.assert_array_equal(cut.reward[u], graph.reward[v])
    for j, (v, offset) in enumerate(places):
        u = v + j
        tokens, mask = walk(graph, v)
        kept = len(tokens) - int(graph.num_tokens[v]) + offset
        assert walk(cut, u) == (tokens[:kept], mask[:kept])
        assert position[int(graph.node_ids[v])] in descendants(cut, u)
        assert not cut.terminal[u] and np.isnan(cut.reward[u]) and cut.keys[u] is None
        assert cut.tree[u] == graph.tree[v] and np.isnan(cut.step_scores[u])
    for u in range(cut.num_nodes):
        span = slice(cut.offsets[u], cut.offsets[u + 1])
        assert cut.num_tokens[u] == span.stop - span.start
        assert cut.num_trained[u] == cut.loss_mask[span].sum()
        assert cut.depth[u] == len(cut.path(u))
    np.testing.assert_array_equal(cut.token_ids, graph.token_ids)


def descendants(graph, v):
    return {u for u in range(graph.num_nodes) if v in graph.path(u)}


@pytest.mark.parametrize("place", [(0, 1), (1, 0), (1, 3), (1, 9)])
def test_there_must_be_something_to_cut(place):
    graph = RolloutGraph.root("g", token_ids=[0, 1]).append(
        [NewNode(0, (3, 4, 5), (1, 1, 1), (-1.0, -1.0, -1.0), False, None)]
    )
    with pytest.raises(GraphError, match="cannot be cut"):
        graph.split([place])


def mixed():
    """Ids with gaps; node 1 of which only the length is known, node 2 with tokens."""
    graph = graph_from(
        [None, 0, 0],
        [None, None, 1.0],
        num_tokens=[None, 5, None],
        tokens=[[1], None, [7, 8, 9]],
        loss_mask=[None, None, [1, 0, 1]],
    )
    return replace(graph, node_ids=np.array([4, 30, 9]))


def test_a_cut_leaves_the_counts_of_edges_without_tokens_alone():
    cut = mixed().split([(2, 1)])
    assert cut.num_tokens.tolist() == [1, 5, 1, 2]
    assert cut.num_trained.tolist() == [0, 5, 1, 1]


def test_a_cut_has_a_new_id_also_where_ids_have_gaps():
    assert mixed().split([(2, 1)]).node_ids.tolist() == [4, 30, 31, 9]


def test_an_edge_without_tokens_cannot_be_cut():
    graph = graph_from([None, 0], [None, 1.0], loss_mask=[None, [1, 0, 1]])
    assert not graph.has_tokens[1]
    with pytest.raises(GraphError, match="cannot be cut after 1 tokens"):
        graph.split([(1, 1)])


def test_a_cut_has_no_embedding():
    row = np.ones(2, np.float32)
    node = NewNode(2, (4, 5), (1, 1), (-1.0, -1.0), False, None, embedding=row)
    cut = small_graph().append([node]).split([(4, 1)])
    assert cut.has_embedding.tolist() == [False] * 5 + [True]
    assert not cut.embeddings[4].any()
