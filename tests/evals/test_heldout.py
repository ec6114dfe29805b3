"""Held-out evaluation over the walk of tests/rollout/test_grow.py."""

from dataclasses import replace

import numpy as np
import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.evals.heldout import by_level, judged_paths, leaves, measured, sample
from graphpo_agent.rollout.grow import Grower
from graphpo_agent.rollout.outages import Outages, outages_of
from graphpo_agent.types import Outcome, PathState, SamplingParams, Step, Task
from tests.rollout.test_grow import NoPolicy, StormyWalk, Walk, tasks


def even(task: Task, outcome: Outcome) -> float:
    return float(len(outcome.turns) % 2 == 0)


def run(count: int, samples: int, seed: int = 0, grower: Grower | None = None):  # type: ignore[no-untyped-def]
    grower = grower or Grower(Walk(), even)
    return evaluate(grower, tasks(count), samples, seed)


def evaluate(grower: Grower, asked: list[Task], samples: int, seed: int = 0):  # type: ignore[no-untyped-def]
    rollouts = sample(grower, NoPolicy(), asked, samples, SamplingParams(), seed)  # type: ignore[arg-type]
    return measured(judged_paths(rollouts)), rollouts


def test_the_numbers_are_means_over_all_judged_paths() -> None:
    evaluation, rollouts = run(30, samples=4)
    rewards = np.array([r.graph.reward[r.graph.terminals] for r in rollouts])
    assert rewards.shape == (30, 4)
    assert evaluation.num_trajectories == 120
    assert evaluation.accuracy == pytest.approx(rewards.mean())
    of_task = rewards.mean(axis=1)
    assert evaluation.standard_error == pytest.approx(of_task.std(ddof=1) / 30**0.5)
    assert evaluation.turns == pytest.approx(np.mean([r.graph.num_edges for r in rollouts]) / 4)
    assert evaluation.response_tokens == evaluation.turns  # one policy token a step


def test_more_tasks_than_fit_at_once_give_the_same_judged_paths() -> None:
    _, many = run(300, samples=1)
    _, few = run(20, samples=1)
    for a, b in zip(many, few, strict=False):
        assert a.task.id == b.task.id
        assert np.array_equal(a.graph.token_ids, b.graph.token_ids)


def test_one_task_has_no_standard_error() -> None:
    assert np.isnan(run(1, samples=3)[0].standard_error)


def test_a_path_that_was_stopped_early_counts_as_wrong() -> None:
    grower = Grower(Walk(max_layers=1), lambda task, outcome: 1.0, truncated="early_stopped")
    evaluation, _ = evaluate(grower, tasks(5), 2)
    assert evaluation.accuracy == 0.0


def test_a_path_that_met_an_outage_does_not_count() -> None:
    evaluation, rollouts = run(40, samples=3, grower=Grower(StormyWalk(), even))
    judged, judged_rollouts = run(40, samples=3, grower=Grower(StormyWalk(), even, outages="score"))
    means, counted = [], 0
    for rollout, same in zip(rollouts, judged_rollouts, strict=True):
        # The walk is the same whether an outage is judged or not; so the rewards are known.
        ends = [v for v in range(len(rollout.states)) if v not in set(rollout.graph.parent[1:])]
        assert len(ends) == 3
        well = [v for v in ends if rollout.states[v].outages == 0]
        rewards = [float(same.graph.reward[v]) for v in well]
        assert leaves(rollout) == [
            (v, float(same.graph.reward[v]) if v in well else None) for v in ends
        ]
        counted += len(well)
        means += [sum(rewards) / len(rewards)] if rewards else []
    assert 0 < len(means) < 40
    assert evaluation.accuracy == pytest.approx(sum(means) / len(means))
    assert evaluation.standard_error == pytest.approx(np.std(means, ddof=1) / len(means) ** 0.5)
    assert evaluation.num_tasks == len(means)
    assert (evaluation.num_trajectories, evaluation.num_dropped) == (counted, 120 - counted)
    assert (judged.num_tasks, judged.num_trajectories, judged.num_dropped) == (40, 120, 0)


class Storm(Walk):
    """Every step meets an outage."""

    def _step(self, state: PathState, seed: int) -> Step:
        step = super()._step(state, seed)
        return replace(step, state=replace(step.state, outages=1))


def test_there_is_no_accuracy_where_outages_met_every_path() -> None:
    evaluation, _ = run(4, samples=2, grower=Grower(Storm(), even))
    assert np.isnan(evaluation.accuracy) and np.isnan(evaluation.standard_error)
    assert (evaluation.num_tasks, evaluation.num_trajectories, evaluation.num_dropped) == (0, 0, 8)


class ToldStorm(Storm):
    """The third step says that its call met one."""

    def _step(self, state: PathState, seed: int) -> Step:
        step = super()._step(state, seed)
        third = step.state.depth == 3
        return replace(step, status="tool_outage" if third else "ok", tool_calls=int(third))


@pytest.mark.parametrize(
    ("walk", "told"),
    [(Storm(), "try again$"), (ToldStorm(), r"first call was told: \[9, 9\]$")],
)
def test_rollouts_that_say_nothing_are_refused(walk: Walk, told: str) -> None:
    _, rollouts = run(4, samples=2, grower=Grower(walk, even))
    met = outages_of(rollouts, str)
    with pytest.raises(ToolError, match=f"left 8 of 8 trajectories unscored .*{told}"):
        met.check(1.0)
    _, calm = run(8, samples=2)
    both = met + outages_of(calm, str)
    assert (both.trajectories, both.left_out) == (24, 8)
    assert both == outages_of([*rollouts, *calm], str)
    assert both.reaches(1 / 3) and not Outages(24, 8).reaches(0.34)
    _, cut = run(4, samples=2, grower=Grower(Walk(2), even, truncated="early_stopped"))
    outages_of(cut, str).check(0.01)


@pytest.mark.parametrize(
    ("left_out", "failed", "limit", "refused"),
    [
        (0, 0, 0.01, False),
        (4, 0, 0.5, True),
        (3, 0, 0.5, False),
        (3, 0, 0.375, True),
        (1, 5, 0.5, True),  # few search, and nobody answers them
        (1, 4, 0.5, False),
        (1, 9, 1.0, False),
        (1, 10, 1.0, True),
        (0, 1, 0.1, False),
        (0, 2, 0.2, True),
        (8, 0, 1.0, True),
    ],
)
def test_the_share_from_which_on_outages_are_too_many(
    left_out: int, failed: int, limit: float, refused: bool
) -> None:
    assert Outages(8, left_out, 10, failed).reaches(limit) == refused
    assert not Outages().reaches(limit)


def test_an_accuracy_that_outages_left_too_little_of_is_none() -> None:
    evaluation, rollouts = run(40, samples=3, grower=Grower(StormyWalk(), even))
    share, met = evaluation.num_dropped / 120, outages_of(rollouts, str)
    assert evaluation.trusted(met, share + 0.01) == evaluation
    few = evaluation.trusted(met, share)
    assert np.isnan(few.accuracy) and np.isnan(few.standard_error) and np.isnan(few.best)
    assert few.num_dropped == evaluation.num_dropped and few.turns == evaluation.turns
    calm, rollouts = run(4, samples=1)
    assert calm.trusted(outages_of(rollouts, str), 0.01) == calm
    unanswered = Outages(trajectories=4, tool_calls=6, failed_calls=3)
    assert calm.trusted(unanswered, 0.51) == calm
    assert np.isnan(calm.trusted(unanswered, 0.5).accuracy)


def test_another_seed_draws_other_trajectories_and_the_same_one_the_same():
    (_, first), (_, same), (_, other) = (run(5, samples=2, seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(first, same, other, strict=True):
        assert np.array_equal(a.graph.token_ids, b.graph.token_ids)
        assert not np.array_equal(a.graph.token_ids, c.graph.token_ids)


def test_dropped_trajectories_count_in_lengths():
    dropping, rollouts = run(40, samples=3, grower=Grower(StormyWalk(), even))
    assert dropping.num_dropped > 0
    edges = sum(rollout.graph.num_edges for rollout in rollouts)
    assert dropping.response_tokens == dropping.turns == pytest.approx(edges / 120)


def test_the_best_trajectory_of_each_task() -> None:
    evaluation, rollouts = run(30, samples=2)
    rewards = np.array([r.graph.reward[r.graph.terminals] for r in rollouts])
    assert evaluation.best == pytest.approx(rewards.max(axis=1).mean())
    assert evaluation.accuracy < evaluation.best < 1


def test_each_level_is_measured_by_itself() -> None:
    def levelled(task: Task, level: object) -> Task:
        return replace(task, metadata={"level": level})

    levels = ["10", 2, None] * 10
    asked = [levelled(task, level) for task, level in zip(tasks(30), levels, strict=True)]
    whole, rollouts = evaluate(Grower(Walk(), even), asked, 4)
    found = by_level(judged_paths(rollouts))
    assert list(found) == ["2", "10"]
    rewards = np.array([r.graph.reward[r.graph.terminals] for r in rollouts])
    assert found["10"].accuracy == pytest.approx(rewards[0::3].mean())
    assert found["2"].accuracy == pytest.approx(rewards[1::3].mean())
    assert found["2"].num_tasks == 10 and found["2"].num_trajectories == 40
    assert whole.num_tasks == 30
    assert by_level(judged_paths(run(3, samples=1)[1])) == {}
