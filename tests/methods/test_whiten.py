import json
import math
from dataclasses import replace

import numpy as np
import pytest

from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.records import parse_graph
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.method import Credit
from graphpo_agent.methods.rows import trajectory_credit
from graphpo_agent.methods.spo_chain import SpoChain
from graphpo_agent.methods.spo_tree import SpoTree
from graphpo_agent.methods.treerl import TreeRL
from graphpo_agent.methods.whiten import whitened
from tests.graph.strategies import random_record
from tests.methods.shapes import record_from

NAN = math.nan


def graph_of(*edges: tuple[int, int, float | None]) -> RolloutGraph:
    """A graph of (parent, tokens, reward)."""
    graph = RolloutGraph.root("g", token_ids=[1, 2])
    nodes = [NewNode(p, [9] * n, [1] * n, [-1.0] * n, r is not None, r) for p, n, r in edges]
    return graph.append(nodes)


def edge_credit(graph: RolloutGraph, *advantages: float, **fields) -> Credit:
    values = np.array([NAN, *advantages])
    return Credit(np.arange(graph.num_nodes), values[None], {"advantage": values}, **fields)


def moments(tokens: list[float]) -> tuple[float, float]:
    mean = sum(tokens) / len(tokens)
    variance = sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1)
    return mean, 1 / math.sqrt(variance + 1e-8)


# By hand


def test_an_edge_counts_with_its_tokens() -> None:
    graph = graph_of((0, 3, 1.0), (0, 1, 0.0))
    (credit,) = whitened([graph], [edge_credit(graph, 1.0, -1.0)])
    mean, scale = moments([1.0, 1.0, 1.0, -1.0])
    assert (mean, scale) == (0.5, pytest.approx(1.0, abs=1e-6))
    np.testing.assert_allclose(credit.advantages, [[NAN, 0.5, -1.5]], atol=1e-7)
    np.testing.assert_array_equal(credit.columns["advantage"], credit.advantages[0])
    assert credit.trajectory_advantages is None and credit.rows is None


def test_an_edge_without_an_advantage_counts_nowhere() -> None:
    graph = graph_of((0, 3, 1.0), (0, 1, 0.0), (0, 5, None))
    (credit,) = whitened([graph], [edge_credit(graph, 1.0, -1.0, NAN)])
    np.testing.assert_allclose(credit.advantages, [[NAN, 0.5, -1.5, NAN]], atol=1e-7)


def test_untrained_tokens_do_not_count_but_their_edge_moves_along() -> None:
    graph = graph_of((0, 3, 1.0), (0, 4, 0.0), (0, 2, 0.5))
    untrained = np.array([1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1], bool)  # the prompt's two are no matter
    credit = edge_credit(graph, 1.0, -1.0, 7.0, untrained=untrained)
    (white,) = whitened([graph], [credit])
    mean, scale = moments([1.0, 1.0, 1.0, -1.0])
    expected = [NAN, *((a - mean) * scale for a in (1.0, -1.0, 7.0))]
    np.testing.assert_allclose(white.advantages, [expected])
    assert white.untrained is untrained


def test_a_shared_edge_counts_once_for_every_row() -> None:
    #  0 ── 1 (2 tokens) ── 2 (1), 3 (1), 4 (1);  0 ── 5 (3)      rows: 2, 3, 5
    graph = graph_of((0, 2, None), (1, 1, 1.0), (1, 1, 0.0), (1, 1, 0.0), (0, 3, 0.0))
    credit = edge_credit(graph, 0.5, 1.0, -1.0, 0.0, -0.25, rows=np.array([2, 3, 5]))
    (white,) = whitened([graph], [credit])
    mean, scale = moments([0.5] * 4 + [1.0] + [-1.0] + [-0.25] * 3)
    expected = [(a - mean) * scale for a in (0.5, 1.0, -1.0, 0.0, -0.25)]
    expected[3] = 0.0  # no row runs through it
    np.testing.assert_allclose(white.advantages, [[NAN, *expected]])
    np.testing.assert_allclose(white.columns["advantage"], [NAN, *expected])
    np.testing.assert_array_equal(white.rows, [2, 3, 5])


def test_a_trajectory_counts_with_all_its_tokens() -> None:
    graph = graph_of((0, 2, None), (1, 1, 1.0), (1, 3, 0.0), (0, 4, 0.0))
    (white,) = whitened([graph], [trajectory_credit(graph, np.array([1.0, -0.5, NAN]))])
    mean, scale = moments([1.0] * 3 + [-0.5] * 5)
    a, b = (1.0 - mean) * scale, (-0.5 - mean) * scale
    assert white.trajectory_advantages is not None
    np.testing.assert_allclose(white.trajectory_advantages, [a, b, NAN])
    np.testing.assert_allclose(white.advantages, [[NAN, (a + b) / 2, a, b, 0]])
    np.testing.assert_array_equal(white.rows, [2, 3])
    assert not white.columns
    np.testing.assert_array_equal(graph.num_trained, [0, 2, 1, 3, 4])


def test_all_graphs_are_one_batch() -> None:
    graphs = [graph_of((0, 2, 1.0)), graph_of((0, 1, 0.0), (0, 2, 1.0))]
    credits = [edge_credit(graphs[0], 2.0), edge_credit(graphs[1], -1.0, 0.5)]
    first, second = whitened(graphs, credits)
    mean, scale = moments([2.0, 2.0, -1.0, 0.5, 0.5])
    np.testing.assert_allclose(first.advantages, [[NAN, (2 - mean) * scale]])
    np.testing.assert_allclose(
        second.advantages, [[NAN, (-1 - mean) * scale, (0.5 - mean) * scale]]
    )


def test_terms_are_whitened_apart() -> None:
    graph = graph_of((0, 1, 1.0), (0, 1, 0.0))
    terms = np.array([[NAN, 1.0, -1.0], [NAN, 5.0, 1.0]])
    (white,) = whitened([graph], [Credit(np.arange(3), terms, {"advantage": terms.sum(axis=0)})])
    half = math.sqrt(0.5)
    np.testing.assert_allclose(white.advantages, [[NAN, half, -half]] * 2, atol=1e-6)
    np.testing.assert_allclose(white.columns["advantage"], [NAN, 2 * half, -2 * half], atol=1e-6)


def test_counts_of_a_file_without_tokens() -> None:
    nodes = [
        {"id": 0, "parent": None, "terminal": False},
        {"id": 1, "parent": 0, "terminal": True, "reward": 1.0, "num_tokens": 3},
        {"id": 2, "parent": 0, "terminal": True, "reward": 0.0},
        {"id": 3, "parent": 0, "terminal": True, "reward": 0.0, "loss_mask": [1, 0, 1]},
    ]
    graph = parse_graph(json.dumps({"schema": "graphpo.graph/1", "id": "g", "nodes": nodes}))
    untrained = np.ones(len(graph.token_ids), bool)  # which can only speak of node 3's tokens
    for fields, third in (({}, 2), ({"untrained": untrained}, 0)):
        (white,) = whitened([graph], [edge_credit(graph, 1.0, -1.0, 0.25, **fields)])
        mean, scale = moments([1.0] * 3 + [-1.0] + [0.25] * third)
        np.testing.assert_allclose(
            white.advantages, [[NAN, *((a - mean) * scale for a in (1.0, -1.0, 0.25))]]
        )


def test_dropped_edges_of_a_file_without_tokens_do_not_count() -> None:
    """SPO-tree drops edges worth 0, of which a file may tell only how many tokens they have."""
    record = record_from([None, 0, 0, 0], [None, 1.0, 0.0, 0.5], num_tokens=[2, 3, 1, 5])
    counted = parse_graph(json.dumps(record))
    spelled = graph_of((0, 3, 1.0), (0, 1, 0.0), (0, 5, 0.5))
    mean, scale = moments([0.5] * 3 + [-0.5])
    for graph in (counted, spelled):
        (white,) = whitened([graph], SpoTree().assign_credit([graph], []))
        expected = [(a - mean) * scale for a in (0.5, -0.5)]
        np.testing.assert_allclose(white.advantages[0, 1:3], expected)


def test_one_token_has_nothing_to_compare_with_and_none_changes_nothing() -> None:
    graph = graph_of((0, 1, 1.0))
    (white,) = whitened([graph], [edge_credit(graph, 3.0)])
    np.testing.assert_array_equal(white.advantages, [[NAN, 0.0]])
    untrained = edge_credit(graph, 3.0, untrained=np.array([False, False, True]))
    assert whitened([graph], [untrained]) == [untrained]
    assert whitened([], []) == []


def test_equal_advantages_become_0() -> None:
    graph = graph_of((0, 3, 1.0), (0, 2, 1.0))
    (white,) = whitened([graph], [edge_credit(graph, 0.1, 0.1)])
    np.testing.assert_allclose(white.advantages, [[NAN, 0, 0]], atol=1e-10)


# Against a list of all tokens


def token_list(graph: RolloutGraph, credit: Credit) -> list[float]:
    """The advantage of every trained token, as often as it is trained."""

    def trained(v: int) -> int:
        here = range(int(graph.offsets[v]), int(graph.offsets[v + 1]))
        if credit.untrained is None or not len(here):
            return int(graph.num_trained[v])
        return sum(bool(graph.loss_mask[t] and not credit.untrained[t]) for t in here)

    of_edge = credit.advantages[0]
    if credit.trajectory_advantages is not None:
        pairs = zip(graph.terminals.tolist(), credit.trajectory_advantages, strict=True)
        kept = [(leaf, a) for leaf, a in pairs if not math.isnan(a)]
        return [a for leaf, a in kept for v in graph.path(leaf) for _ in range(trained(v))]
    if credit.rows is not None:
        edges = [v for leaf in credit.rows.tolist() for v in graph.path(leaf)]
    else:
        edges = [v for v in range(1, graph.num_nodes) if not math.isnan(of_edge[v])]
    return [of_edge[v] for v in edges for _ in range(trained(v))]


def random_credits(kind: str, graphs: list[RolloutGraph], rng) -> list[Credit]:
    if kind == "treerl":
        return TreeRL(select=3).assign_credit(graphs, [])
    if kind == "spo_chain":
        return SpoChain().assign_credit(graphs, [])
    credits = [trajectory_credit(g, random_values(len(g.terminals), rng)) for g in graphs]
    if kind == "edges":
        credits = [edge_credit(g, *random_values(g.num_nodes - 1, rng)) for g in graphs]
    return [
        replace(c, untrained=rng.random(len(g.token_ids)) < 0.3)
        for g, c in zip(graphs, credits, strict=True)
    ]


def random_values(n: int, rng) -> np.ndarray:
    return np.where(rng.random(n) < 0.2, NAN, rng.normal(1.0, 2.0, n))


def random_graph(seed: int) -> RolloutGraph:
    record = random_record(2 + seed % 14, seed, keys=False, embeddings=False)
    rng = np.random.default_rng(seed)
    for node in record["nodes"][1:]:
        n = node["num_tokens"]
        if rng.random() < 0.5:
            node["loss_mask"] = rng.integers(0, 2, n).tolist()
            node["logprobs"] = np.log(rng.uniform(0.5, 1.0, n)).tolist()
    return parse_graph(json.dumps(record))


@pytest.mark.parametrize("kind", ["treerl", "spo_chain", "edges", "trajectories"])
def test_agrees_with_a_list_of_all_tokens(kind: str) -> None:
    checked = 0
    for seed in range(0, 160, 4):
        graphs = [random_graph(seed + i) for i in range(4)]
        credits = random_credits(kind, graphs, np.random.default_rng(seed))
        batch = list(zip(graphs, credits, strict=True))
        tokens = [a for graph, credit in batch for a in token_list(graph, credit)]
        if len(tokens) < 2:
            continue
        mean, scale = moments(tokens)
        after = whitened(graphs, credits)
        again = [a for g, c in zip(graphs, after, strict=True) for a in token_list(g, c)]
        np.testing.assert_allclose(again, [(a - mean) * scale for a in tokens], atol=1e-8)
        checked += scale < 1e3
    assert checked > 15


# The authors' own code


def test_agrees_with_spo() -> None:
    # masked_whiten of src/treetune/trainers/utils.py, AIFrameResearch/SPO at b9fc6a2, of two rows
    # with old probabilities, unbiased.
    probabilities = [[0.95, 0.5, 0.8, 0.3, 0.99], [0.2, 0.96, 0.7, 0.6]]
    advantages = [[0.0, 0.25, 0.25, -0.5, -0.5], [0.4, 0.4, -1.0, 0.6]]
    expected = [
        [0.0, 0.4060882, 0.4060882, -0.8121764, -0.8121764],
        [0.6497411, 0.6497411, -1.6243529, 0.9746117],
    ]
    graphs: list[RolloutGraph] = []
    for row in probabilities:
        graph = RolloutGraph.root("g", token_ids=[1])
        for i, p in enumerate(row):
            graph = graph.append([NewNode(i, [9], [1], [math.log(p)], False, None)])
        graphs.append(graph)
    untrained = [np.exp(g.logprobs) >= 0.9 for g in graphs]
    credits = [
        edge_credit(g, *a, untrained=u)
        for g, a, u in zip(graphs, advantages, untrained, strict=True)
    ]
    for credit, row in zip(whitened(graphs, credits), expected, strict=True):
        np.testing.assert_allclose(credit.advantages[0, 1:], row, atol=2e-7)


def test_agrees_with_treepo() -> None:
    # masked_whiten of verl/utils/torch_functional.py, multimodal-art-projection/TreePO at f055523.
    graph = graph_of((0, 1, None), (1, 1, 1.0), (1, 2, 0.0), (0, 5, 0.0))
    (white,) = whitened([graph], [trajectory_credit(graph, np.array([0.5, -0.25, 0.125]))])
    assert white.trajectory_advantages is not None
    np.testing.assert_allclose(
        white.trajectory_advantages, [1.4907879, -1.2197356, 0.1355262], atol=2e-7
    )
