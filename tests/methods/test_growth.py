"""Which chains go on within a budget."""

from dataclasses import replace

import numpy as np
import pytest

from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.growth import steady_chains
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.spo_tree import SpoTree
from graphpo_agent.methods.tree import tree
from graphpo_agent.methods.tree_grpo import TreeGrpo
from graphpo_agent.methods.treepo import TreePO
from graphpo_agent.methods.treerl import TreeRL
from graphpo_agent.methods.treerpo import TreeRpo
from tests.methods.growing import End, World, grow
from tests.methods.test_waves import graph_of, growth


@pytest.mark.parametrize(
    ("tokens", "behind", "goes_on", "begun"),
    [
        # Edges of up to 4 tokens, paths of up to 12; what is behind 1, 2 and 3.
        (10, [8], [1], 0),  # 2 tokens would not be sure to hold another edge.
        (12, [8], [1], 1),
        (3, [8], [1], 0),  # The first one goes on in any case.
        (10, [8, 8, 2], [1], 0),  # 2 waits, and its tokens are not 3's.
        (12, [8, 8, 2], [1, 2], 0),
        (18, [8, 8, 2], [1, 2, 3], 0),
    ],
)
def test_a_chain_goes_on_or_begins_where_its_next_edge_is_sure(tokens, behind, goes_on, begun):
    active = 1 + np.arange(len(behind))
    one = replace(
        growth(graph_of([(0, None)] * len(behind)), tokens=tokens),
        active=active,
        path_tokens=12,
        tokens_behind=lambda v: behind[v - 1],
    )
    plan = steady_chains(one, 0)
    counts = {branch.node: branch.count for branch in plan.branches}
    assert counts == dict.fromkeys(goes_on, 1) | ({0: begun} if begun else {})
    assert list(plan.waiting) == [v for v in active.tolist() if v not in goes_on]


def _after_the_first(reached: int, rng: np.random.Generator) -> End:
    """Paths of two edges or more: the first ones are all sampled together."""
    return "terminal" if reached > 1 and rng.random() < 0.15 else "goes_on"


def _trunks(graph: RolloutGraph) -> list[list[bool]]:
    """For each edge from the prompt, in order, which of the leaves behind it have ended."""
    leaves: dict[int, list[bool]] = {}
    for leaf in graph.leaves.tolist():
        leaves.setdefault(graph.path(leaf)[0], []).append(bool(graph.terminal[leaf]))
    return [leaves[v] for v in sorted(leaves)]


@pytest.mark.parametrize(
    "method",
    [
        GraphPO((6, 1)),
        tree((4, 1, 2, 1, 2, 1)),
        SpoTree((4, 1, 2, 1)),
        TreeRpo((4, 2, 1)),
        TreeGrpo(trees=6, expansions=1, rounds=0),
        TreeRL(trees=6, forks=1, rounds=0),
        TreePO(width=6, divergence=6),
        Grpo(group_size=6),
    ],
    ids=lambda method: method.name,
)
def test_a_budget_cuts_off_the_last_paths_and_not_the_long_ones(method):
    cut = 0
    for seed in range(20):
        world = World(end=_after_the_first, tokens=90, max_layers=200)
        whole = [all(ended) for ended in _trunks(grow(method, world, seed).graph)]
        assert whole == sorted(whole, reverse=True)
        cut += 0 < sum(whole) < len(whole)
    assert cut > 10
