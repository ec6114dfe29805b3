"""A step's metrics, counted again over plain lists."""

from statistics import mean

import pytest

from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Method
from graphpo_agent.methods.spo_chain import SpoChain
from graphpo_agent.report.metrics import rollout_metrics
from tests.rollout.test_grow import grow


@pytest.mark.parametrize(
    "method", [Grpo(3), SpoChain(num_chains=3, rollouts=4, cut_interval=2, cut="edge")]
)
def test_the_mean_reward_is_that_of_trained_trajectories(method: Method) -> None:
    rollouts = grow(method)
    rewards = {True: [], False: []}
    for graph in (rollout.graph for rollout in rollouts):
        for v in graph.terminals.tolist():
            sampled = graph.loss_mask[graph.offsets[v] : graph.offsets[v + 1]]
            rewards[bool(sampled.any())].append(float(graph.reward[v]))
    assert len(rewards[True]) == 4 * 3
    metrics = rollout_metrics(rollouts)
    assert metrics["reward/mean"] == pytest.approx(mean(rewards[True]))
    assert metrics["rollout/terminals"] == len(rewards[True] + rewards[False]) / 4
    if isinstance(method, SpoChain):
        assert mean(rewards[True] + rewards[False]) != pytest.approx(mean(rewards[True]))
