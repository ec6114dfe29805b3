"""Held-out evaluation over the walk of tests/rollout/test_grow.py."""

import numpy as np
import pytest

from graphpo_agent.evals.heldout import evaluate
from graphpo_agent.rollout.grow import Grower
from graphpo_agent.types import Outcome, SamplingParams, Task
from tests.rollout.test_grow import NoPolicy, Walk, tasks


def even(task: Task, outcome: Outcome) -> float:
    return float(len(outcome.turns) % 2 == 0)


def run(count: int, samples: int, seed: int = 0):  # type: ignore[no-untyped-def]
    grower = Grower(Walk(), even)
    return evaluate(grower, NoPolicy(), tasks(count), samples, SamplingParams(), seed)  # type: ignore[arg-type]


def test_the_numbers_are_means_over_all_trajectories() -> None:
    evaluation, rollouts = run(30, samples=4)
    rewards = np.array([r.graph.reward[r.graph.terminals] for r in rollouts])
    assert rewards.shape == (30, 4)
    assert evaluation.num_trajectories == 120
    assert evaluation.accuracy == pytest.approx(rewards.mean())
    of_task = rewards.mean(axis=1)
    assert evaluation.standard_error == pytest.approx(of_task.std(ddof=1) / 30**0.5)
    assert evaluation.turns == pytest.approx(np.mean([r.graph.num_edges for r in rollouts]) / 4)
    assert evaluation.response_tokens == evaluation.turns  # one policy token a step


def test_more_tasks_than_fit_at_once_give_the_same_trajectories() -> None:
    _, many = run(300, samples=1)
    _, few = run(20, samples=1)
    for a, b in zip(many, few, strict=False):
        assert a.task.id == b.task.id
        assert np.array_equal(a.graph.token_ids, b.graph.token_ids)


def test_one_task_has_no_standard_error() -> None:
    assert np.isnan(run(1, samples=3)[0].standard_error)


def test_a_path_that_was_stopped_early_counts_as_wrong() -> None:
    grower = Grower(Walk(max_layers=1), lambda task, outcome: 1.0, truncated="early_stopped")
    evaluation, _ = evaluate(grower, NoPolicy(), tasks(5), 2, SamplingParams(), 0)  # type: ignore[arg-type]
    assert evaluation.accuracy == 0.0
