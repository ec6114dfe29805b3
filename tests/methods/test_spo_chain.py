import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.records import parse_graph
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Branch, Growth
from graphpo_agent.methods.spo_chain import SpoChain
from tests.graph.strategies import random_record
from tests.methods.growing import World, ends_at, grow

AUTHORS = json.loads((Path(__file__).parent / "spo_chain_authors.json").read_text())


def credit_of(graph: RolloutGraph, **settings):
    method = SpoChain(**settings)
    (credit,) = method.assign_credit([graph], [np.arange(graph.num_nodes)])
    return credit


def sampled(parent: int, *probabilities: float, reward: float | None = None) -> NewNode:
    n = len(probabilities)
    logprobs = np.log(probabilities).tolist()
    return NewNode(parent, [9] * n, [1] * n, logprobs, reward is not None, reward)


def rollout(parent: int, reward: float | None) -> NewNode:
    return NewNode(parent, [9, 9], [0, 0], [-0.1, np.nan], reward is not None, reward)


def graph_of(*nodes: NewNode) -> RolloutGraph:
    return RolloutGraph.root("g", token_ids=[1, 2]).append(nodes)


# Credit


def test_by_hand() -> None:
    #  0 ── 1 ── 2 ── 3 R=1     V(1) = 1/4, V(2) unknown, V(3) = 1; before the first cut: 0
    #       ├~ 4 R=1, 5 R=0, 6 R=0, 7 ~ 8 R=0
    graph = graph_of(
        sampled(0, 0.95),
        sampled(1, 0.5, 0.9),
        sampled(2, 0.95, 0.2, reward=1.0),
        *(rollout(1, r) for r in (1.0, 0.0, 0.0, None)),
        rollout(7, 0.0),
    )
    credit = credit_of(graph)
    nan = np.nan
    np.testing.assert_allclose(
        credit.columns["score"], [nan, 0.25, nan, 1, 1, 0, 0, nan, 0], atol=1e-12
    )
    expected = [nan, 0, 0.75, 0.75, nan, nan, nan, nan, nan]
    np.testing.assert_allclose(credit.advantages, [expected])
    np.testing.assert_array_equal(credit.columns["advantage"], expected)
    assert credit.rows is None and credit.trajectory_advantages is None
    assert credit.untrained is not None  # 0.9 and above, and what no reward follows
    of_chain = credit.untrained[2:7].tolist()
    assert of_chain == [True, False, True, True, False] and credit.untrained[7:].all()


def test_the_prompts_value_is_the_first_base() -> None:
    graph = graph_of(
        sampled(0, 0.5),
        rollout(0, 1.0),
        rollout(0, 0.5),
        sampled(1, 0.3, reward=0.0),
        rollout(1, 1.0),
        sampled(0, 0.4, reward=1.0),
    )
    credit = credit_of(graph)
    np.testing.assert_allclose(
        credit.advantages, [[np.nan, 0.25, np.nan, np.nan, -1, np.nan, 0.25]]
    )
    assert credit.columns["score"][0] == 0.75


def test_without_cuts_nothing_is_learnt() -> None:
    credit = credit_of(graph_of(sampled(0, 0.95), sampled(1, 0.99, reward=1.0)))
    np.testing.assert_array_equal(credit.advantages, [[np.nan, 0, 0]])
    assert not credit.has_signal


def test_an_early_stopped_chain_is_trained_up_to_its_last_cut() -> None:
    graph = graph_of(
        sampled(0, 0.5), sampled(1, 0.5), sampled(2, 0.5), rollout(0, 1.0), rollout(2, 0.0)
    )
    credit = credit_of(graph)
    np.testing.assert_array_equal(credit.advantages, [[np.nan, -1, -1, np.nan, np.nan, np.nan]])
    assert credit.untrained is not None
    assert credit.untrained[2:5].tolist() == [False, False, True]


def test_rollouts_that_were_stopped_early_are_not_wrong() -> None:
    graph = graph_of(
        sampled(0, 0.5), rollout(0, None), sampled(1, 0.5, reward=1.0), rollout(1, None),
        rollout(1, 1.0), rollout(1, 0.5),
    )  # fmt: skip
    credit = credit_of(graph)
    np.testing.assert_allclose(credit.columns["score"][[0, 1]], [np.nan, 0.75])
    np.testing.assert_allclose(credit.advantages[0, [1, 3]], [0, 0.25])


def test_tokens_without_probabilities_are_trained() -> None:
    graph = graph_of(sampled(0, 0.95, 0.5, reward=1.0))
    unknown = replace(graph, logprobs=np.full(4, np.nan, np.float32))
    credit = credit_of(unknown)
    assert credit.untrained is not None and not credit.untrained[2:].any()


def slow_credit(graph: RolloutGraph) -> tuple[list[float], list[float]]:
    """V and A of each node, recursively from the definition."""
    children: dict[int, list[int]] = {v: [] for v in range(graph.num_nodes)}
    for v in range(1, graph.num_nodes):
        children[int(graph.parent[v])].append(v)

    def is_rollout(v: int) -> bool:
        return any(graph.num_trained[u] == 0 for u in graph.path(v))

    def rewards(v: int) -> list[float]:
        own = [float(graph.reward[v])] if graph.terminal[v] else []
        return own + [r for c in children[v] for r in rewards(c)]

    def value(v: int) -> float:
        if graph.terminal[v]:
            return float(graph.reward[v])
        if is_rollout(v):
            return math.nan
        known = [r for c in children[v] if is_rollout(c) for r in rewards(c)]
        return sum(known) / len(known) if known else math.nan

    def end(v: int) -> float:
        if not math.isnan(value(v)):
            return value(v)
        ends = [end(c) for c in children[v] if not is_rollout(c)]
        known = [x for x in ends if not math.isnan(x)]
        return sum(known) / len(known) if known else math.nan

    def advantage(v: int) -> float:
        if v == 0 or is_rollout(v) or math.isnan(end(v)):
            return math.nan
        for above in [0, *graph.path(v)[:-1]][::-1]:
            if not math.isnan(value(above)):
                return end(v) - value(above)
        return 0.0

    nodes = range(graph.num_nodes)
    return [value(v) for v in nodes], [advantage(v) for v in nodes]


def test_agrees_with_the_slow_definition() -> None:
    # Any file: an edge of no tokens counts as a rollout, and chains may fork.
    signals = 0
    for seed in range(300):
        record = random_record(1 + seed % 25, seed, keys=False, embeddings=False)
        graph = parse_graph(json.dumps(record))
        credit = credit_of(graph)
        value, advantage = slow_credit(graph)
        np.testing.assert_allclose(credit.columns["score"], value, atol=1e-12)
        np.testing.assert_allclose(credit.advantages[0], advantage, atol=1e-12)
        signals += credit.has_signal
    assert signals > 60


@pytest.mark.parametrize("cut", ["token", "edge"])
def test_grown_graphs_agree_with_the_slow_definition(cut: Literal["token", "edge"]) -> None:
    for seed in range(10):
        world = World(ends_at(4, finish=0.2, stop=0.1), edge_tokens=5)
        graph = grow(SpoChain(3, 4, 2, cut=cut), world, seed).graph
        credit = credit_of(graph)
        value, advantage = slow_credit(graph)
        np.testing.assert_allclose(credit.columns["score"], value, atol=1e-12)
        np.testing.assert_allclose(credit.advantages[0], advantage, atol=1e-12)
        assert credit.has_signal


# Growth


def slow_cuts(graph: RolloutGraph, terminal: int, method: SpoChain) -> list[tuple[int, int | None]]:
    """From the definition: one list of a chain's tokens, cut before every so many uncertain."""
    tokens: list[tuple[float, int, int]] = []
    for v in graph.path(terminal):
        for k in range(int(graph.num_tokens[v])):
            t = int(graph.offsets[v]) + k
            if graph.loss_mask[t]:
                tokens.append((math.exp(graph.logprobs[t]), v, k))
    spots = [(v, k) for p, v, k in tokens if p < method.max_probability]
    if method.cut == "edge":
        spots = sorted({(v, 0) for v, _ in spots}, key=lambda spot: graph.depth[spot[0]])
    chosen = [spots[i] for i in range(0, len(spots), method.cut_interval)]
    return [(v, k) if k else (int(graph.parent[v]), None) for v, k in chosen]


@pytest.mark.parametrize("cut", ["token", "edge"])
@pytest.mark.parametrize("observations", [0, 2])
@pytest.mark.parametrize("interval", [1, 3])
def test_cuts_before_uncertain_tokens(
    cut: Literal["token", "edge"], observations: int, interval: int
) -> None:
    method = SpoChain(3, 2, interval, max_probability=0.6, cut=cut)
    inside = at_the_prompt = 0
    for seed in range(12):
        world = World(ends_at(3, finish=0.2, stop=0.1), edge_tokens=5, observations=observations)
        grown = grow(method, world, seed)
        assert grown.plans[0].branches == (Branch(0, 3),)
        (i,) = [i for i, plan in enumerate(grown.plans) if any(b.value_only for b in plan.branches)]
        graph, branches = grown.growths[i].graph, grown.plans[i].branches
        assert not len(grown.growths[i].active)
        expected = [x for v in graph.terminals.tolist() for x in slow_cuts(graph, v, method)]
        assert [(b.node, b.offset) for b in branches] == list(dict.fromkeys(expected))
        assert all(b.count == 2 and b.value_only for b in branches)
        inside += sum(b.offset is not None for b in branches)
        at_the_prompt += sum(b.node == 0 for b in branches)
        leaves = grown.graph.leaves
        trained = grown.graph.num_trained[leaves] > 0
        assert trained.sum() == 3 and (~trained).sum() == 2 * len(branches)
    assert at_the_prompt and (inside > 0) == (cut == "token")


def test_a_token_after_an_observation_is_cut_before_at_its_edge_only() -> None:
    # Within an edge, observation 5 stands before the uncertain 6, which cannot be sampled anew.
    low = math.log(0.1)
    graph = graph_of(
        NewNode(0, [4, 5, 6, 7], [1, 0, 1, 1], [low, np.nan, low, low], False, None),
        NewNode(1, [8], [1], [low], True, 1.0),
    )
    plan = SpoChain(cut_interval=1).plan(growth_of(graph, 2, frozenset()))
    assert [(b.node, b.offset) for b in plan.branches] == [(0, None), (1, 3), (1, None)]


def test_the_least_probability_that_is_certain_enough() -> None:
    graph = graph_of(sampled(0, 0.2, 0.5, 0.4999, 0.6, reward=1.0))
    assert np.exp(graph.logprobs[3]) == 0.5
    plan = SpoChain(cut_interval=1, max_probability=0.5).plan(growth_of(graph, 2, frozenset()))
    assert [(b.node, b.offset) for b in plan.branches] == [(0, None), (1, 2)]
    credit = credit_of(graph, max_probability=0.5)
    assert credit.untrained is not None
    assert credit.untrained[2:].tolist() == [False, True, False, True]


def test_chains_that_fill_a_budget_are_cut_too_but_the_prompt_once() -> None:
    method = SpoChain(2, 3, 1)
    world = World(ends_at(2), edge_tokens=3, tokens=600)
    grown = grow(method, world, seed=1)
    planned = [b for plan in grown.plans for b in plan.branches]
    assert sum(b.node == 0 and not b.value_only for b in planned) > 2
    assert sum(b.node == 0 and b.value_only for b in planned) == 1
    graph = grown.graph
    asked = [plan for plan in grown.plans if any(b.value_only for b in plan.branches)]
    assert len(asked) > 2
    ends = graph.terminals[graph.num_trained[graph.terminals] > 0]
    with_rollouts = {int(graph.parent[v]) for v in np.flatnonzero(graph.num_trained == 0) if v}
    cut = [bool(with_rollouts & set(graph.path(v))) for v in ends.tolist()]
    assert sum(cut) > 2
    estimate = (graph.num_trained == 0) & (graph.parent >= 0)
    begun = np.flatnonzero(estimate & ~estimate[graph.parent])
    assert np.bincount(graph.parent[begun]).max() == 3  # a place is never asked again


def test_nothing_to_cut_goes_to_chains() -> None:
    graph = graph_of(sampled(0, 0.95, reward=1.0))
    growth = replace(growth_of(graph, 2, frozenset()), trajectories_left=5)
    assert SpoChain().plan(growth).branches == (Branch(0, 5),)
    assert SpoChain().plan(growth_of(graph, 2, frozenset())).branches == ()


@pytest.mark.parametrize(
    "settings", [{"num_chains": 0}, {"rollouts": 0}, {"cut_interval": 0}, {"max_probability": 1.5}]
)
def test_refuses_numbers_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"spo_chain: {next(iter(settings))}"):
        SpoChain(**settings)


def growth_of(graph: RolloutGraph, layer: int, memory: frozenset[int]) -> Growth:
    none = np.zeros(0, np.int64)
    return Growth(
        graph=graph,
        reached=none,
        active=none,
        layer=layer,
        memory=memory,
        tokens_left=None,
        trajectories_left=None,
        path_tokens=100,
        edge_tokens=4,
        tokens_behind=lambda v: 10,
        seed=0,
        decode=lambda ids: "",
    )


# The authors' own code


def chain(probabilities: Sequence[float], reward: float, lengths: Sequence[int]) -> RolloutGraph:
    """A chain of segments of some lengths."""
    graph, start = RolloutGraph.root("g", token_ids=[1, 2]), 0
    for i, length in enumerate(lengths):
        here = probabilities[start : start + length]
        last = i == len(lengths) - 1
        graph = graph.append([sampled(i, *here, reward=reward if last else None)])
        start += length
    assert start == len(probabilities)
    return graph


@pytest.mark.parametrize("example", AUTHORS["examples"])
@pytest.mark.parametrize("segment", [2, 5, 100])
def test_agrees_with_the_authors_code(example, segment: int) -> None:
    probabilities = example["probs"]
    n = len(probabilities)
    lengths = [min(segment, n - i) for i in range(0, n, segment)]
    graph = chain(probabilities, example["score"], lengths)
    method = SpoChain(rollouts=3, cut_interval=example["interval"])
    plan = method.plan(growth_of(graph, 2, frozenset()))
    before = {0: 0} | {v: int(graph.num_tokens[1 : v + 1].sum()) for v in range(1, len(lengths))}
    places = [
        before[b.node] if b.offset is None else before[b.node - 1] + b.offset for b in plan.branches
    ]
    assert places == [cut + 1 for cut in example["cutpoints"]]
    for branch, rewards in list(zip(plan.branches, example["rewards"], strict=True))[::-1]:
        v = branch.node
        if branch.offset is not None:
            graph = graph.split([(v, branch.offset)])
        graph = graph.append([rollout(v, r) for r in rewards])
    credit = credit_of(graph)
    assert credit.untrained is not None
    own = graph.loss_mask
    values = np.repeat(credit.advantages[0], np.diff(graph.offsets))
    of_tokens = np.where(credit.untrained, 0.0, values)[own]
    np.testing.assert_allclose(of_tokens, example["advantages"], atol=1e-9)
