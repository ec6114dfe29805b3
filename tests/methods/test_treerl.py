import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.jsonl import graph_to_json, read_graphs
from graphpo_agent.graph.new_node import NewNode
from graphpo_agent.graph.records import parse_graph
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods import treerl
from graphpo_agent.methods.growth import Branch, Growth
from graphpo_agent.methods.treerl import TreeRL
from tests.graph.strategies import random_record
from tests.methods.growing import Grown, World, ends_at, grow

AUTHORS = json.loads((Path(__file__).parent / "treerl_authors.json").read_text())


def credit_of(graph: RolloutGraph, **settings):
    method = TreeRL(**settings)
    (credit,) = method.assign_credit([graph], [np.arange(graph.num_nodes)])
    return credit


def edges(*nodes: tuple[int, float | None]) -> RolloutGraph:
    """A graph of (parent, reward) with one token per edge."""
    graph = RolloutGraph.root("g", token_ids=[1])
    new = [NewNode(p, [9], [1], [-1.0], r is not None, r) for p, r in nodes]
    return graph.append(new)


# Credit


def test_by_hand() -> None:
    #  0 ── 1 ── 2 ── 3 R=1     Leave-one-out: right 1 − 1/3, wrong 0 − 2/3.
    #  │    │    └─── 4 R=0
    #  │    └──────── 5 R=1
    #  └─ 6 R=0
    graph = edges((0, None), (1, None), (2, 1.0), (2, 0.0), (1, 1.0), (0, 0.0))
    credit = credit_of(graph, select=None)
    v = {0: 0, 1: 2 / 9, 2: 0, 3: 2 / 3, 4: -2 / 3, 5: 2 / 3, 6: -2 / 3}
    np.testing.assert_allclose(credit.columns["score"], [v[i] for i in range(7)], atol=1e-12)
    u1 = 2 / 9 / math.sqrt(3)
    expected = [np.nan, 2 * u1, -u1, 4 / 3, -4 / 3, 4 / 3 - u1, -4 / 3]
    np.testing.assert_allclose(credit.advantages, [expected], atol=1e-12)
    np.testing.assert_array_equal(credit.columns["advantage"], credit.advantages[0])
    np.testing.assert_array_equal(credit.rows, [3, 4, 5, 6])
    assert credit.trajectory_advantages is None and credit.untrained is None


def test_equal_values_take_the_gain_of_the_edge_before() -> None:
    #  0 ── 1 ── 2 ── 3 R=1: U is 1 on all of the chain, so only the first edge has a gain.
    #  └─ 4 R=0
    graph = edges((0, None), (1, None), (2, 1.0), (0, 0.0))
    np.testing.assert_allclose(credit_of(graph).advantages, [[np.nan, 2, 2, 2, -2]])
    paper = credit_of(graph, weighting="paper")
    np.testing.assert_allclose(paper.advantages, [[np.nan, 1, 0.5, 0.5, -1]])


def test_the_first_edge_has_no_edge_before() -> None:
    # Both first edges are worth the root's 0 and stay at 0; the second layer differs.
    graph = edges((0, None), (0, None), (1, 1.0), (1, 0.0), (2, 1.0), (2, 0.0))
    np.testing.assert_allclose(
        credit_of(graph).advantages, [[np.nan, 0, 0, 4 / 3, -4 / 3, 4 / 3, -4 / 3]], atol=1e-12
    )


def test_early_stopped_leaves_count_nowhere() -> None:
    graph = edges((0, None), (1, 1.0), (1, None), (0, 0.0), (0, None))
    credit = credit_of(graph)
    np.testing.assert_allclose(credit.advantages, [[np.nan, 2, 2, np.nan, -2, np.nan]])
    np.testing.assert_array_equal(credit.rows, [2, 4])


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_fewer_than_two_answers_train_nothing(rewards: list[float]) -> None:
    credit = credit_of(edges(*((0, r) for r in rewards)))
    assert np.isnan(credit.advantages).all() and np.isnan(credit.columns["score"]).all()
    assert credit.rows is not None and not len(credit.rows) and not credit.has_signal


@pytest.mark.parametrize("weighting", ["sqrt", "uniform", "paper"])
def test_a_lone_answer_has_nothing_to_be_compared_with(weighting: str) -> None:
    credit = credit_of(edges((0, None), (1, 1.0), (0, None)), weighting=weighting)
    assert np.isnan(credit.advantages).all() and np.isnan(credit.columns["score"]).all()
    assert credit.rows is not None and not len(credit.rows)


def test_all_answers_alike_have_no_signal() -> None:
    assert not credit_of(edges((0, None), (1, 1.0), (1, 1.0), (0, 1.0))).has_signal


def slow_advantages(graph: RolloutGraph, rows: list[int], weighting: str) -> dict[int, float]:
    """From the definitions, edge by edge and leaf by leaf."""
    reward = {v: float(graph.reward[v]) for v in graph.terminals.tolist()}
    mean = sum(reward.values()) / len(reward)

    def below(v: int, leaves: list[int]) -> list[int]:
        return [leaf for leaf in leaves if v == 0 or v in graph.path(leaf)]

    def centred(leaf: int) -> float:
        if weighting == "paper":
            return reward[leaf] - mean
        others = [r for v, r in reward.items() if v != leaf]
        return reward[leaf] - sum(others) / len(others)

    def state_value(v: int) -> float:
        leaves = below(v, list(reward))
        return sum(map(centred, leaves)) / len(leaves)

    def scaled(v: int) -> float:
        power = {"sqrt": 0.5, "uniform": 1.0}[weighting]
        return state_value(v) / len(below(v, rows)) ** power

    advantages: dict[int, float] = {}
    for row in rows:
        gain = math.nan
        for above, v in pairwise([0, *graph.path(row)]):
            if weighting == "paper":
                gain = state_value(v) - state_value(above)
                n = len(below(v, list(reward)))
                advantages[v] = (state_value(v) + gain) / math.sqrt(n)
                continue
            new = scaled(v) - scaled(above)
            gain = gain if above != 0 and abs(new) < 1e-8 else new
            advantages[v] = scaled(v) + gain
    return advantages


@pytest.mark.parametrize("weighting", ["sqrt", "uniform", "paper"])
@pytest.mark.parametrize("select", [None, 1, 3])
def test_agrees_with_the_slow_definition(weighting: str, select: int | None) -> None:
    checked = 0
    for seed in range(150):
        record = random_record(3 + seed % 22, seed, keys=False, embeddings=False)
        graph = parse_graph(json.dumps(record))
        credit = credit_of(graph, weighting=weighting, select=select)
        assert credit.rows is not None
        if len(graph.terminals) < 2:
            continue
        checked += 1
        expected = slow_advantages(graph, credit.rows.tolist(), weighting)
        dense = [expected.get(v, math.nan) for v in range(graph.num_nodes)]
        np.testing.assert_allclose(credit.advantages[0], dense, atol=1e-12)
    assert checked > 60


# Which leaves are trained


def forest(num_right: int, num_wrong: int, prompt: int = 0) -> RolloutGraph:
    graph = edges(*[(0, 0.0)] * num_wrong, *[(0, 1.0)] * num_right)
    return replace(graph, token_ids=np.concatenate([[prompt], graph.token_ids[1:]]))


def rows_of(graph: RolloutGraph, **settings) -> list[int]:
    rows = credit_of(graph, **settings).rows
    assert rows is not None
    return rows.tolist()


@pytest.mark.parametrize("select", [1, 2, 5, 11])
def test_selection_holds_a_right_leaf_and_no_leaf_twice(select: int) -> None:
    for right in (0, 1, 4):
        graph = forest(right, 12 - right)
        rows = rows_of(graph, select=select)
        assert len(rows) == select and rows == sorted(set(rows))
        assert set(rows) <= set(graph.terminals.tolist())
        assert right == 0 or (graph.reward[rows] == 1.0).any()


def test_selection_depends_on_the_content_alone(tmp_path: Path) -> None:
    graph = forest(3, 20)
    (tmp_path / "g.jsonl").write_text(graph_to_json(graph) + "\n")
    (again,) = read_graphs(tmp_path / "g.jsonl")
    rows = rows_of(graph)
    assert rows == rows_of(again) == rows_of(replace(graph, id="step-3/g"))
    assert any(rows != rows_of(forest(3, 20, i)) for i in range(1, 6))


def test_selection_is_uniform() -> None:
    # One right leaf of two is certain; then the others are equally likely.
    times = np.zeros(9)
    for i in range(1500):
        times[rows_of(forest(2, 6, i), select=4)] += 1
    np.testing.assert_allclose(times[7:] / 1500, 0.5 + 0.5 * 3 / 7, atol=0.05)
    np.testing.assert_allclose(times[1:7] / 1500, 3 / 7, atol=0.05)


# Growth


def open_tokens(growth: Growth, own: list[int], is_trunk: bool) -> list[tuple[float, int, int]]:
    """(−log p, edge, place) of what may be forked in a trunk or branch, told its edges."""
    graph = growth.graph
    found: list[tuple[float, int, int]] = []
    first = not is_trunk
    for v in own:
        start, end = graph.offsets[v], graph.offsets[v + 1]
        for t in range(start, end):
            if not graph.loss_mask[t]:
                continue
            if not first:
                found.append((-float(graph.logprobs[t]), v, t - start))
            first = False
            text = growth.decode([int(graph.token_ids[t])]).lower()
            if "answer" in text or "conclusion" in text:
                return found
    return found


def slow_forks(growth: Growth, method: TreeRL) -> list[tuple[int, int | None, int | None]]:
    """From the definition: a branch is what the path to a leaf adds to those of older leaves."""
    graph, taken = growth.graph, set[int]()
    of_tree: dict[int, list[tuple[float, int, int]]] = {}
    for leaf in sorted(graph.leaves.tolist(), key=lambda v: graph.node_ids[v]):
        own = [v for v in graph.path(leaf) if v not in taken]
        taken |= set(own)
        is_trunk = int(graph.tree[leaf]) not in of_tree
        found = open_tokens(growth, own, is_trunk)
        if method.fork == "edge":
            best = {v: max(u for u, w, _ in found if w == v) for _, v, _ in found}
            if not is_trunk:
                best.pop(own[0], None)
            found = [(u, v, 0) for v, u in best.items()]
        found = sorted(found, reverse=True)[: method.forks]
        while found and len(found) < method.forks:
            found = (found * method.forks)[: method.forks]
        of_tree.setdefault(int(graph.tree[leaf]), []).extend(found)
    best = [x for t in sorted(of_tree) for x in sorted(of_tree[t], reverse=True)[: method.forks]]
    tree = graph.tree.tolist()
    return [(v if k else int(graph.parent[v]), k or None, tree[v]) for _, v, k in best]


def rounds(grown: Grown) -> list[int]:
    """Layers, 0 the first, in which something was forked."""
    steps = pairwise(zip(grown.growths, grown.plans, strict=True))
    layers: list[int] = []
    for i, ((_, before), (growth, plan)) in enumerate(steps, 1):
        if not len(growth.active) and plan.memory != before.memory and plan.branches:
            layers.append(i)
    return layers


def text(ids) -> str:
    return "".join(" The Answer" if i % 11 == 0 else f"<{i}>" for i in ids)


@pytest.mark.parametrize("fork", ["token", "edge"])
@pytest.mark.parametrize("observations", [0, 2])
@pytest.mark.parametrize("settings", [(3, 2, 2, 2), (2, 3, 3, 1), (1, 6, 1, 1)])
def test_forks_the_unlikeliest(fork: Literal["token", "edge"], observations: int, settings) -> None:
    trees, forks, num_rounds, copies = settings
    method = TreeRL(trees, forks, num_rounds, copies, fork=fork)
    at_the_prompt = inside = 0
    for seed in range(8):
        end = ends_at(4, finish=0.15)
        world = World(end, edge_tokens=6, observations=observations, decode=text)
        grown = grow(method, world, seed)
        layers = rounds(grown)
        for i in layers:
            growth, branches = grown.growths[i], grown.plans[i].branches
            expected = slow_forks(growth, method)
            assert [(b.node, b.offset, b.tree) for b in branches] == expected * copies
            assert all(b.count == 1 and not b.value_only for b in branches)
            at_the_prompt += sum(b.node == 0 for b in branches)
            inside += sum(b.offset is not None for b in branches)
        if len(layers) == num_rounds:
            assert len(grown.graph.terminals) == trees * (1 + forks * copies * num_rounds)
            sizes = np.bincount(grown.graph.tree[grown.graph.terminals])
            assert (sizes == 1 + forks * copies * num_rounds).all()
    assert at_the_prompt and (inside > 0) == (fork == "token")


def test_nothing_is_forked_after_the_last_words() -> None:
    # All tokens read "answer": of each trunk only the first may be forked, of a branch none.
    world = World(ends_at(3), decode=lambda ids: "In conclusion")
    grown = grow(TreeRL(trees=2, forks=2, rounds=2, copies=1), world)
    layers = rounds(grown)
    assert len(layers) == 2
    for i in layers:
        assert {(b.node, b.offset) for b in grown.plans[i].branches} == {(0, None)}


def test_no_more_rounds_once_nothing_can_be_forked() -> None:
    # Without a candidate the rest of a budget goes to chains, which are not forked any more.
    graph = RolloutGraph.root("g", token_ids=[1])
    graph = graph.append([NewNode(0, [5], [0], [np.nan], True, 1.0)])
    method = TreeRL(rounds=2)
    growth = growth_of(graph, 2, 0, trajectories_left=4)
    plan = method.plan(growth)
    assert plan.branches == (Branch(0, 4),)
    later = graph.append([NewNode(0, [5, 6], [1, 1], [-1.0, -2.0], True, 1.0)])
    assert method.plan(growth_of(later, 3, plan.memory)).branches == ()


def test_budget_left_over_goes_to_chains() -> None:
    world = World(ends_at(2), trajectories=40)
    grown = grow(TreeRL(trees=2, forks=1, rounds=1, copies=2), world)
    assert grown.plans[0].branches == (Branch(0, 2),)
    graph = grown.graph
    assert len(graph.terminals) == 40
    alone = np.bincount(graph.tree[graph.terminals])
    assert sorted(alone.tolist(), reverse=True) == [3, 3, *[1] * 34]


@pytest.mark.parametrize("settings", [{"trees": 0}, {"copies": 0}, {"select": 0}, {"rounds": -1}])
def test_refuses_numbers_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"treerl: {next(iter(settings))} is"):
        TreeRL(**settings)


# The authors' own code


def growth_of(graph: RolloutGraph, layer: int, memory, trajectories_left=None) -> Growth:
    none = np.zeros(0, np.int64)
    return Growth(
        graph=graph,
        reached=none,
        active=none,
        layer=layer,
        memory=memory,
        tokens_left=None,
        trajectories_left=trajectories_left,
        path_tokens=100,
        edge_tokens=4,
        tokens_behind=lambda v: 10,
        seed=0,
        decode=authors_text,
    )


def authors_text(ids) -> str:
    return "".join({7: "Answer", 9: " conclusion:"}.get(i, f"t{i}") for i in ids)


def tokens_to(graph: RolloutGraph, v: int) -> list[int]:
    path = graph.path(v)
    return [t for u in path for t in graph.token_ids[graph.offsets[u] : graph.offsets[u + 1]]]


def tokens_before(graph: RolloutGraph, branch: Branch) -> list[int]:
    tokens = tokens_to(graph, branch.node)
    cut_off = 0 if branch.offset is None else int(graph.num_tokens[branch.node]) - branch.offset
    return tokens[: len(tokens) - cut_off]


def state_after(graph: RolloutGraph, prefix: list[int]) -> tuple[RolloutGraph, int]:
    """The graph with a node that ``prefix`` leads to, and that node."""
    for v in range(graph.num_nodes):
        reached = tokens_to(graph, v)
        if reached == prefix:
            return graph, v
        before = len(reached) - int(graph.num_tokens[v])
        if v and before < len(prefix) < len(reached) and reached[: len(prefix)] == prefix:
            return graph.split([(v, len(prefix) - before)]), v
    raise AssertionError("no such prefix")


def regrow(example) -> tuple[RolloutGraph, list[list[int]]]:
    """The authors' tree, grown from their samples; the forks of each round must be theirs.

    Returns the graph and the tokens of each leaf's path, in the order of sampling.
    """
    trees, forks, num_rounds, copies = example["settings"]
    method = TreeRL(trees, forks, num_rounds, copies)
    graph = RolloutGraph.root("g", token_ids=[1, 2])
    memory, layer = None, 1
    paths: dict[tuple[int, int], list[int]] = {}
    starts: dict[tuple[int, int], int] = {}
    for batch in example["rounds"]:
        plan = method.plan(growth_of(graph, layer, memory))
        memory, layer = plan.memory, layer + 1
        prefixes: list[tuple[list[int], int | None]] = []
        for sample in batch:
            tree, parent, split = sample["tree"], sample["parent"], sample["split"]
            prefix = [] if parent is None else paths[tree, parent][: starts[tree, parent] + split]
            prefixes.append((prefix, None if parent is None else tree))
            number = sum(t == tree for t, _ in paths)
            paths[tree, number], starts[tree, number] = prefix + sample["tokens"], len(prefix)
        if layer > 2:
            assert [(tokens_before(graph, b), b.tree) for b in plan.branches] == prefixes
        for sample, (prefix, tree) in zip(batch, prefixes, strict=True):
            graph, v = state_after(graph, prefix)
            mask = [1] * len(sample["tokens"])
            new = NewNode(v, sample["tokens"], mask, sample["logprobs"], True, sample["reward"],
                          tree=tree)  # fmt: skip
            graph = graph.append([new])
    return graph, list(paths.values())


@pytest.mark.parametrize("example", AUTHORS["examples"])
@pytest.mark.parametrize("run", [0, 1, 2])
def test_agrees_with_the_authors_code(example, run: int, monkeypatch) -> None:
    graph, _ = regrow(example)
    told = example["runs"][run]
    by_path = {tuple(tokens): values for tokens, values in told["trained"]}
    theirs = [v for v in graph.terminals.tolist() if tuple(tokens_to(graph, v)) in by_path]
    if told["select"] is not None:  # the leaves that their run drew
        monkeypatch.setattr(treerl, "_selected", lambda graph, count: np.array(theirs))
    credit = credit_of(graph, select=told["select"], weighting=told["weighting"])
    assert credit.rows is not None
    assert len(by_path) == len(credit.rows) == len(theirs)
    for leaf in credit.rows.tolist():
        path = graph.path(leaf)
        values = np.repeat(credit.advantages[0, path], graph.num_tokens[path])
        np.testing.assert_allclose(values, by_path[tuple(tokens_to(graph, leaf))], atol=1e-9)


NAN = float("nan")


def test_only_a_reward_of_1_is_right_for_the_selection():
    for prompt in range(20):
        graph = edges((0, 0.75), (0, 0.9), (0, 1.0), (0, 0.75))
        graph = replace(graph, token_ids=np.array([prompt, 9, 9, 9, 9]))
        assert rows_of(graph, select=1) in ([3], (3,))


def test_no_token_is_forked_behind_one_that_was_not_sampled():
    graph = RolloutGraph.root("g", token_ids=[1])
    # The unlikeliest token stands behind an observation inside the edge; it cannot be cut off.
    logprobs = (-1.0, NAN, -9.0, -2.0)
    graph = graph.append([NewNode(0, (5, 6, 7, 8), (1, 0, 1, 1), logprobs, True, 1.0)])
    plan = TreeRL(trees=1, forks=1, copies=1).plan(
        replace(growth_of(graph, layer=2, memory=0), decode=str)
    )
    assert [(b.node, b.offset) for b in plan.branches] == [(1, 3)]


def test_a_small_difference_is_a_difference():
    # By s, U(2) − U(1) = R̃(2) − (R̃(2) + R̃(3))/4 = 0 for rewards .4, .2, .9; here a little more.
    graph = edges((0, None), (1, 0.4 + 1e-6), (1, 0.2), (0, 0.9))
    (advantage,) = credit_of(graph, weighting="uniform").advantages
    u = graph.reward[2] - (0.2 + 0.9) / 2
    assert advantage[2] == pytest.approx(u, abs=1e-5)
