"""What every method must keep to: the budget, and how often it trains an edge."""

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from graphpo_agent.errors import ConfigError
from graphpo_agent.graph.budget import Budget
from graphpo_agent.graph.samples import to_path_rows
from graphpo_agent.methods import METHODS
from graphpo_agent.methods.dapo import Dapo
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.growth import Branch, Plan
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Method, credits_of, training_sample
from graphpo_agent.methods.prm import Prm
from graphpo_agent.methods.pros import Pros
from graphpo_agent.methods.spo_chain import SpoChain
from graphpo_agent.methods.spo_tree import SpoTree
from graphpo_agent.methods.tree import tree
from graphpo_agent.methods.tree_grpo import TreeGrpo
from graphpo_agent.methods.treepo import TreePO
from graphpo_agent.methods.treerl import TreeRL
from graphpo_agent.methods.treerpo import TreeRpo
from graphpo_agent.rollout.grow import UNLIMITED, Rollout
from graphpo_agent.types import SamplingParams
from tests.methods.shapes import graph_from
from tests.rollout.test_grow import NoPolicy, Walk, grower, tasks

EACH_EDGE_ONCE: dict[str, Method] = {
    "graphpo": GraphPO(schedule=(4, 2, 2, 2)),
    "waves": GraphPO(schedule=(4, 2), refill="uncertain"),
    "tree": tree((3, 3)),
    "spo_tree": SpoTree(schedule=(3, 2), max_probability=None, drop_zero=False),
    "spo_chain": SpoChain(num_chains=3, rollouts=2, cut_interval=2, cut="edge"),
    "treerpo": TreeRpo(schedule=(3, 2)),
}
TRAJECTORIES: dict[str, Method] = {
    "grpo": Grpo(4),
    "dapo": Dapo(4),
    "treerl": TreeRL(trees=3, rounds=2, fork="edge", select=7),
    "tree_grpo": TreeGrpo(rounds=2, kept=3),
    "treepo": TreePO(width=6),
    "prm": Prm(3),
    "pros": Pros(4),
}
ALL = EACH_EDGE_ONCE | TRAJECTORIES


def test_advantages_of_trajectories_belong_to_their_rows():
    """An early-stopped path beside two answers: the local engine and verl would differ."""
    graph = graph_from([None, 0, 0, 0], [None, None, 1.0, 0.0])

    def credits(**changed):
        class Own(Grpo):
            def assign_credit(self, graphs, classes):
                found = super().assign_credit(graphs, classes)
                return [replace(credit, **changed) for credit in found]

        return credits_of(Own(2), [graph], [np.arange(4)])

    for rows in (None, [1, 3], [2]):
        with pytest.raises(ConfigError, match="rows that are the terminals"):
            credits(rows=None if rows is None else np.array(rows))
    with pytest.raises(ConfigError, match="graph g: trajectory_advantages want one number"):
        credits(trajectory_advantages=np.array([0.5, np.nan, 0.5]))
    (credit,) = credits()
    assert credit.rows is not None and credit.rows.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"advantages": np.zeros(4)}, "advantages want an array of numbers, [num_terms, 4]"),
        ({"advantages": np.zeros((1, 3))}, "advantages want an array of numbers, [num_terms, 4]"),
        ({"advantages": [[0.0] * 4]}, "advantages want an array of numbers, [num_terms, 4]"),
        ({"advantages": np.full((1, 4), None)}, "advantages want an array of numbers"),
        ({"advantages": np.full((1, 4), np.inf)}, "an advantage is infinite"),
        ({"classes": None}, "classes want an array of 4 numbers"),
        ({"classes": list(range(4))}, "classes want an array of 4 numbers"),
        ({"columns": {"score": np.zeros(3)}}, "score want an array of 4 numbers"),
        ({"untrained": np.zeros(1, np.bool_)}, "untrained want an array of 0 numbers"),
    ],
)
def test_a_credit_that_does_not_fit_its_graph_is_refused(
    changed: dict[str, Any], says: str
) -> None:
    graph = graph_from([None, 0, 0, 0], [None, None, 1.0, 0.0])

    class Own(TreeRpo):
        def assign_credit(self, graphs, classes):
            found = super().assign_credit(graphs, classes)
            return [replace(credit, **changed) for credit in found]

    with pytest.raises(ConfigError, match=re.escape(f"method treerpo: graph g: {says}")):
        credits_of(Own(schedule=(3,)), [graph], [np.arange(4)])


@pytest.mark.parametrize("credits", [None, (credit for credit in ()), [None], [np.zeros((1, 4))]])
def test_what_is_no_list_of_credits_is_refused(credits: Any) -> None:
    class Own(Grpo):
        def assign_credit(self, graphs, classes):
            return credits

    graph = graph_from([None, 0, 0, 0], [None, None, 1.0, 0.0])
    with pytest.raises(ConfigError, match=r"method grpo: assign_credit returned .*, want a "):
        credits_of(Own(2), [graph], [np.arange(4)])


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (None, "None, want a Plan"),
        (Plan(Branch(0)), r"Branch\(node=0, .* as branches, want a list"),  # type: ignore[arg-type]
        (Plan([0]), "0, want a Branch with a whole count"),  # type: ignore[list-item]
        (Plan([Branch(0, 2.0)]), "count=2.0, .*, want a Branch"),  # type: ignore[arg-type]
        (Plan([Branch(0, -1)]), "count=-1, .*, want a Branch"),
        (Plan([Branch(1)]), r"Branch\(node=1, .*\) for a graph of 1 nodes"),
        (Plan([Branch(0)], waiting=[7]), "7 as waiting for a graph of 1 nodes"),
    ],
)
def test_a_plan_that_does_not_fit_its_graph_is_refused(plan: Any, says: str) -> None:
    class Own(Grpo):
        def plan(self, growth):
            return plan

    with pytest.raises(ConfigError, match=f"method grpo: plan returned .*{says}"):
        grown(Own(2))


class Tokenizer:
    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


class Policy(NoPolicy):
    """The walk's, able to say what a token reads."""

    tokenizer = Tokenizer()


def grown(method: Method, budget: Budget = UNLIMITED, truncated: str = "terminal") -> list[Rollout]:
    one = grower(Walk(), truncated=truncated)
    return one.grow(Policy(), tasks(4), method, SamplingParams(), (0,), budget)  # type: ignore[arg-type]


def test_no_method_is_left_out() -> None:
    assert set(ALL) - {"waves"} == set(METHODS)


@pytest.mark.parametrize("truncated", ["terminal", "early_stopped"])
@pytest.mark.parametrize("name", ALL)
def test_every_prompt_costs_the_same_tokens_whatever_the_method(name: str, truncated: str) -> None:
    for tokens in (1, 7, 20, 100):
        for rollout in grown(ALL[name], Budget(tokens=tokens), truncated):
            # Every edge of the walk is one sampled token and two observed ones.
            assert rollout.graph.num_edges == rollout.ledger.generated_tokens == tokens


@pytest.mark.parametrize("truncated", ["terminal", "early_stopped"])
@pytest.mark.parametrize("name", ALL)
def test_every_prompt_has_the_same_trajectories_whatever_the_method(
    name: str, truncated: str
) -> None:
    for trajectories in (1, 2, 11, 64):
        for rollout in grown(ALL[name], Budget(trajectories=trajectories), truncated):
            assert len(rollout.graph.leaves) == trajectories
            ends = [rollout.statuses[v] for v in rollout.graph.leaves.tolist()]
            assert set(ends) <= {"answered", "out_of_turns"}  # none is left open


@pytest.mark.parametrize("name", sorted(set(ALL) - {"waves", "spo_chain"}))
def test_what_a_structure_leaves_goes_to_whole_chains_that_grow_together(name: str) -> None:
    structures = [rollout.graph.num_nodes for rollout in grown(ALL[name])]
    tokens = max(structures) + 40
    for first, rollout in zip(structures, grown(ALL[name], Budget(tokens=tokens)), strict=True):
        graph = rollout.graph
        if name in ("grpo", "dapo", "prm", "pros"):
            first = 1  # nothing but such chains
        assert (graph.num_children[first:] <= 1).all()
        chains = sorted(graph.path(v) for v in graph.leaves.tolist() if v >= first)
        assert len(chains) > 2 and all(graph.parent[chain[0]] == 0 for chain in chains)
        assert graph.terminal[[chain[-1] for chain in chains[:-1]]].all()
        assert any(after[0] < before[-1] for before, after in pairwise(chains))


def times_trained(rollout: Rollout, method: Method) -> tuple[Counter[int], Counter[int]]:
    """How often each node's edge is trained, and how many trained trajectories it lies on.

    Tokens are told apart by numbering them anew.
    """
    scores = np.linspace(0, 1, rollout.graph.num_nodes)  # the step scorer's, for prm
    graph = replace(rollout.graph, step_scores=scores)
    (credit,) = method.assign_credit([graph], [rollout.classes])
    graph = replace(graph, token_ids=np.arange(len(graph.token_ids)))
    trained: Counter[int] = Counter()
    for row in to_path_rows(training_sample(graph, credit)):
        places = row.token_ids[row.loss_mask]
        trained.update((np.searchsorted(graph.offsets, places, side="right") - 1).tolist())
    rows = [] if credit.rows is None else credit.rows.tolist()
    assert len(set(rows)) == len(rows)
    return trained, Counter(v for leaf in rows for v in graph.path(leaf))


@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 0.6, 0.7, 0.8, 0.9, 1 / 3])
@pytest.mark.parametrize("name", sorted(set(ALL) - {"graphpo", "waves", "tree"}))
def test_equal_graded_rewards_say_nothing(name: str, reward: float) -> None:
    """The three left out compare the lengths of ways, too."""
    for rollout in grown(ALL[name]):
        graph = rollout.graph
        graph = replace(
            graph,
            reward=np.where(graph.terminal, reward, np.nan),
            step_scores=np.full(graph.num_nodes, reward),
        )
        (credit,) = ALL[name].assign_credit([graph], [rollout.classes])
        assert not credit.has_signal


@pytest.mark.parametrize("name", EACH_EDGE_ONCE)
def test_no_edge_is_trained_twice(name: str) -> None:
    method = EACH_EDGE_ONCE[name]
    for rollout in grown(method):
        graph = rollout.graph
        trained, _ = times_trained(rollout, method)
        sampled = np.flatnonzero(graph.num_trained).tolist()
        assert trained == Counter(sampled)
        assert (len(sampled) < graph.num_edges) == (name == "spo_chain")  # its estimates


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_an_edge_is_trained_once_for_every_trained_trajectory_on_it(name: str) -> None:
    method = TRAJECTORIES[name]
    shared = 0
    for rollout in grown(method):
        trained, trajectories = times_trained(rollout, method)
        assert trained == trajectories and trained
        shared += max(trained.values()) > 1
    assert bool(shared) == (name in ("treerl", "tree_grpo", "treepo"))
