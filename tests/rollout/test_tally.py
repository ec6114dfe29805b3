"""A step's metrics, counted again over plain lists."""

from statistics import mean

import pytest

from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Method, credits_of
from graphpo_agent.methods.spo_chain import SpoChain
from graphpo_agent.rollout.tally import credit_tally, rollout_tally
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
    metrics = rollout_tally(rollouts).metrics
    assert metrics["reward/mean"] == pytest.approx(mean(rewards[True]))
    assert metrics["rollout/terminals"] == len(rewards[True] + rewards[False]) / 4
    if isinstance(method, SpoChain):
        assert mean(rewards[True] + rewards[False]) != pytest.approx(mean(rewards[True]))


def test_shares_are_of_all_edges_and_roots_are_none() -> None:
    method = GraphPO(schedule=(2,))
    rollouts = grow(method)
    edges = [(rollout, v) for rollout in rollouts for v in range(1, rollout.graph.num_nodes)]
    metrics = rollout_tally(rollouts).metrics
    merged = [rollout.classes.tolist().count(rollout.classes[v]) > 1 for rollout, v in edges]
    assert 0 < metrics["rollout/merge_rate"] == mean(merged) < 1
    shares = {k.removeprefix("rollout/status/"): v for k, v in metrics.items() if "/status/" in k}
    statuses = [rollout.statuses[v] for rollout, v in edges]
    assert shares == {status: statuses.count(status) / len(edges) for status in set(statuses)}
    rewards = [set(rollout.graph.reward[rollout.graph.terminals].tolist()) for rollout in rollouts]
    mixed = mean(len(each) > 1 for each in rewards)
    assert 0 < metrics["reward/mixed_prompts"] == mixed < 1

    graphs, classes = zip(*((r.graph, r.classes) for r in rollouts), strict=True)
    credits = credits_of(method, graphs, classes)
    shown = (rollout_tally(rollouts) + credit_tally(credits)).metrics
    for name, values in (
        ("credit/nonzero", [credit.advantages.sum(axis=0)[1:] for credit in credits]),
        (
            "credit/efficiency_nonzero",
            [credit.columns["efficiency_advantage"][1:] for credit in credits],
        ),
    ):
        assert 0 < shown[name] == mean(bool(x != 0) for own in values for x in own.tolist()) < 1
