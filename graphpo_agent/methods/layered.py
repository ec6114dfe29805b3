"""Trees that grow layer by layer and are valued from their leaves up (SPO-tree, TreeRPO)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphpo_agent.graph.advantages import node_scores, own_counts
from graphpo_agent.graph.arrays import FloatArray
from graphpo_agent.graph.budget import branching_at
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.growth import Branch, Growth, Plan, dealt, onward, steady_chains

__all__ = ["layer_plan", "nested_means"]


def layer_plan(growth: Growth, schedule: Sequence[int]) -> Plan:
    """Continue every path of layer h by the schedule's b_h, beyond the schedule by one.

    Where a budget holds fewer paths, all states fork alike, as far as that goes.

    When all paths have ended, the rest of a budget goes to plain chains from the prompt. The
    plan's memory says whether these have begun.
    """
    if growth.memory or not len(growth.active):
        return steady_chains(growth, 0, memory=True)
    plan, depth = onward(growth), growth.graph.depth
    nodes = np.array([branch.node for branch in plan.branches])
    wanted = np.array([branching_at(schedule, layer) for layer in (depth[nodes] + 1).tolist()])
    counts = dealt(nodes, wanted, np.arange(len(nodes)), growth.trajectories_left)
    return replace(plan, branches=tuple(map(Branch, nodes.tolist(), counts.tolist())))


def nested_means(graph: RolloutGraph) -> FloatArray:
    """[n] V: the reward of a terminal, else the mean of V over the children that have one.

    On unbalanced trees this is not the mean over the leaves below. NaN where no terminal is below:
    early-stopped leaves have no value and are left out.
    """
    correct, total = own_counts(
        graph.parent, graph.depth, graph.terminal, graph.reward, backup="mean"
    )
    return node_scores(correct, total, np.arange(graph.num_nodes), pool_weight=0.0)
