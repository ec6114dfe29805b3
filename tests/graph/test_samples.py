"""Training samples: every direct edge once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import GraphError
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.graph.samples import to_path_rows, to_sample

NAN = float("nan")


def random_graph(num_nodes, seed):
    """A grown graph whose tokens are numbered, so that each can be found again."""
    rng = np.random.default_rng(seed)
    graph = RolloutGraph.root("g", token_ids=[0, 1, 2])
    for v in range(1, num_nodes):
        length = int(rng.integers(1, 5))
        start = len(graph.token_ids)
        mask = rng.integers(0, 2, length)
        mask[0] = 1
        graph = graph.append(
            [
                NewNode(
                    parent=int(rng.integers(max(0, v - 4), v)),
                    token_ids=tuple(range(start, start + length)),
                    loss_mask=mask.tolist(),
                    logprobs=np.where(mask, -rng.random(length), NAN).tolist(),
                    terminal=False,
                    reward=None,
                )
            ]
        )
    return graph


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 25), st.integers(0, 2**32))
def test_rows_own_every_direct_edge_exactly_once(num_nodes, seed):
    graph = random_graph(num_nodes, seed)
    advantages = np.random.default_rng(seed).standard_normal((2, num_nodes))
    sample = to_sample(graph, advantages)
    rows = to_path_rows(sample)
    assert len(rows) == len(graph.leaves)
    trained = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
    assert sorted(trained.tolist()) == np.flatnonzero(graph.loss_mask).tolist()
    owner = np.repeat(np.arange(num_nodes), np.diff(graph.offsets))
    for leaf, row in zip(graph.leaves.tolist(), rows, strict=True):
        spans = [range(graph.offsets[v], graph.offsets[v + 1]) for v in [0, *graph.path(leaf)]]
        assert row.token_ids.tolist() == [t for span in spans for t in span]
        expected = np.where(row.loss_mask, advantages[:, owner[row.token_ids]], 0.0)
        np.testing.assert_array_equal(row.advantages, expected)
        np.testing.assert_array_equal(row.logprobs, graph.logprobs[row.token_ids])


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 25), st.integers(0, 2**32))
def test_what_leads_to_no_trained_token_is_left_out_and_all_else_stays(num_nodes, seed):
    graph = random_graph(num_nodes, seed)
    rng = np.random.default_rng(seed)
    untrained = rng.random(len(graph.token_ids)) < 0.8
    rows = graph.leaves[rng.random(len(graph.leaves)) < 0.7]
    advantages = rng.standard_normal((1, num_nodes))
    whole = to_sample(graph, advantages)
    for chosen in (None, rows):
        sample = to_sample(graph, advantages, chosen, untrained=untrained)
        on_rows = set(range(num_nodes))
        if chosen is not None:
            on_rows = {v for leaf in chosen.tolist() for v in graph.path(leaf)}
        trained = {
            token
            for v in on_rows
            for token in range(graph.offsets[v], graph.offsets[v + 1])
            if graph.loss_mask[token] and not untrained[token]
        }
        assert set(sample.token_ids[sample.loss_mask].tolist()) == trained
        owner = np.searchsorted(graph.offsets, sample.token_ids, side="right") - 1
        node = np.repeat(np.arange(len(sample.parent)), np.diff(sample.offsets))
        for token, v in zip(sample.token_ids.tolist(), node.tolist(), strict=True):
            assert sample.advantages[0, v] == whole.advantages[0, owner_of(graph, token)] or v == 0
        kept = {int(owner[node == v][0]): v for v in range(len(sample.parent))}
        wanted = {owner_of(graph, token) for token in trained}
        assert set(kept) == {0}.union(*(graph.path(v) for v in wanted))
        for old, new in kept.items():
            assert sample.parent[new] == (-1 if old == 0 else kept[int(graph.parent[old])])
        if chosen is not None:
            ends = [
                next((kept[v] for v in reversed([0, *graph.path(leaf)]) if v in kept), 0)
                for leaf in chosen.tolist()
            ]
            assert sample.rows is not None and sample.rows.tolist() == ends


def owner_of(graph, token):
    return int(np.searchsorted(graph.offsets, token, side="right")) - 1


def small_graph():
    graph = RolloutGraph.root("g", token_ids=[5, 6])
    graph = graph.append(
        [
            NewNode(0, (7,), (1,), (-0.1,), True, 1.0),
            NewNode(0, (8, 9), (1, 0), (-0.2, NAN), False, None),
        ]
    )
    return graph.append([NewNode(2, (3,), (1,), (-0.3,), True, 0.0)])


def test_an_edge_without_credit_is_trained_with_advantage_0():
    sample = to_sample(small_graph(), np.array([[NAN, 0.7, NAN, -0.7]]))
    assert sample.advantages.tolist()[0][1:] == [0.7, 0.0, -0.7]
    assert np.isnan(sample.advantages[0, 0])
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 9, 3]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]


def test_a_sample_needs_tokens_and_logprobs():
    graph, advantages = small_graph(), np.zeros((1, 4))
    silent = replace(graph, logprobs=np.where(np.arange(6) == 5, np.nan, graph.logprobs))
    with pytest.raises(
        GraphError, match="graph 'g', node 3: cannot be trained on without logprobs"
    ):
        to_sample(silent, advantages)
    blank = replace(graph, has_tokens=np.array([True, True, False, True]))
    with pytest.raises(GraphError, match="graph 'g', node 2: cannot be trained on without tokens"):
        to_sample(blank, advantages)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (NewNode(1, (7,), (1,), (-0.1,), True, 1.0), "node 4: parent 1 is terminal"),
        (NewNode(4, (7,), (1,), (-0.1,), True, 1.0), "node 4: parent 4 does not come before it"),
        (NewNode(-1, (7,), (1,), (-0.1,), True, 1.0), "node 4: parent -1 does not come before it"),
        (NewNode(2, (7,), (1,), (-0.1,), True, 1.5), r"node 4: reward 1.5 is outside \[0, 1\]"),
        (NewNode(2, (7,), (1,), (-0.1,), True, NAN), r"node 4: reward nan is outside \[0, 1\]"),
        (NewNode(2, (7,), (1,), (-0.1,), True, None), "node 4: terminal without a reward"),
        (NewNode(2, (7,), (1,), (-0.1,), False, 0.0), "node 4: reward on a node that is not term"),
        (NewNode(2, (7,), (1,), (NAN,), False, None), "node 4: a trained token without a finite"),
    ],
)
def test_what_cannot_be_appended(node, message):
    with pytest.raises(GraphError, match=message):
        small_graph().append([node])


def test_appending_leaves_the_old_graph_alone():
    graph = small_graph()
    longer = graph.append([NewNode(2, (4, 4), (0, 1), (NAN, -1.0), False, None, key="k")])
    assert (graph.num_nodes, longer.num_nodes, longer.num_edges) == (4, 5, 4)
    assert longer.path(4) == [2, 4]
    assert longer.leaves.tolist() == [1, 3, 4]
    assert longer.terminals.tolist() == [1, 3]
    assert longer.num_children.tolist() == [2, 0, 2, 0, 0]
    assert longer.num_trained.tolist() == [0, 1, 1, 1, 1]
    assert longer.tree.tolist() == [-1, 0, 1, 1, 1]
    assert graph.append([]) is graph


def test_embeddings_may_come_late_and_must_agree():
    graph = small_graph()
    assert graph.embeddings is None
    row = np.array([1.0, 2.0], np.float32)
    with_one = graph.append([NewNode(2, (), (), (), False, None, embedding=row)])
    assert with_one.embeddings.tolist() == [[0, 0]] * 4 + [[1, 2]]
    assert with_one.append([NewNode(2, (), (), (), False, None)]).has_embedding.tolist() == [
        False, False, False, False, True, False,
    ]  # fmt: skip
    with pytest.raises(GraphError, match="node 5: embedding has shape"):
        with_one.append([NewNode(2, (), (), (), False, None, embedding=row[:1])])
    with pytest.raises(ValueError, match="lengths disagree"):
        NewNode(2, (7,), (1, 1), (-0.1,), False, None)


def test_tokens_that_are_not_trained_need_no_logprobs():
    graph, last = small_graph(), np.arange(6) == 5
    silent = replace(graph, logprobs=np.where(last, np.nan, graph.logprobs))
    advantages = np.zeros((1, 4))
    assert to_sample(silent, advantages, untrained=last).loss_mask.sum() == 2
    assert to_sample(silent, advantages, rows=np.array([1])).loss_mask.sum() == 1
    with pytest.raises(GraphError, match="node 3: cannot be trained on without logprobs"):
        to_sample(silent, advantages, rows=np.array([1, 3]))
