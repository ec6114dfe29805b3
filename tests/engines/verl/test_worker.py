"""What a rollout worker makes of a task, with the local engine's policy in the servers' place."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from graphpo_agent.build import build_policy
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.engines.verl.worker import task_from_line, task_line
from graphpo_agent.errors import ConfigError
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.methods.method import Credit
from graphpo_agent.protocols import Policy
from graphpo_agent.types import Task
from graphpo_agent.verl_worker import RunWorker, make_worker
from tests.worlds import Storm, run_arguments

ENGINE = "engine={kind: verl, max_context_tokens: 96}"


def made(reach: Path, tmp_path: Path, *overrides: str) -> tuple[RunWorker, Policy, list[Task]]:
    name, *arguments = run_arguments(reach, tmp_path / "run")
    config = load_config(RunConfig, name, [*arguments, ENGINE, *overrides])
    local = load_config(RunConfig, name, arguments)
    worker = make_worker(json.dumps(config.model_dump(mode="json")))
    return worker, build_policy(local), load_tasks(reach / "train.jsonl")


def test_a_token_beyond_the_tokenizer_can_be_drawn(reach: Path, tmp_path: Path) -> None:
    padded = tmp_path / "padded"
    shutil.copytree(reach / "policy", padded)
    model = AutoModelForCausalLM.from_pretrained(padded)
    model.resize_token_embeddings(model.config.vocab_size + 64)
    model.save_pretrained(padded)
    worker, _, _ = made(reach, tmp_path, f"model.path={padded}")
    assert worker.stops.vocab_size == model.config.vocab_size
    assert worker.stops.table((".",)).shape == (model.config.vocab_size,)


@pytest.mark.parametrize("method", ["{name: tree, schedule: [3, 2, 1, 1]}", "{name: grpo}"])
def test_rows_hold_each_trained_token_of_the_graph(
    reach: Path, tmp_path: Path, method: str
) -> None:
    group = "method.group_size=6" if "grpo" in method else "method.efficiency_weight=0.1"
    method = f"method={method.replace('grpo}', 'grpo, group_size: 6}')}"
    every = "update.entropy_coefficient=0.01"  # gives every token a gradient
    worker, policy, tasks = made(
        reach, tmp_path, method, group, "update.loss_aggregation=token_mean", every
    )
    grown = [worker.grow(policy, task, step=1) for task in tasks[:4]]
    signal = [one for one in grown if one.total]
    assert signal
    for one in signal:
        owned = sum(int(row.loss_mask.sum()) for row in one.rows)
        assert one.total == owned == one.tally.metrics["tokens/generated"]
        for row in one.rows:
            assert len(row.token_ids) <= 96
            assert not np.isnan(row.logprobs[row.loss_mask]).any()
        # Without a weight of its own, the advantages of whole trajectories are centred.
        assert any((row.advantages != 0).any() for row in one.rows)
        assert one.tally.metrics["credit/nonzero"] > 0
    # Without a term that moves every token, rows end with their last advantage.
    moving = replace(worker, moves_all=False)
    for one, task in zip(grown, tasks, strict=False):
        shorter = moving.grow(policy, task, step=1)
        assert shorter.total == one.total and len(shorter.rows) <= len(one.rows)
        assert all(row.advantages[:, -1].any() for row in shorter.rows if shorter.total)
    again = worker.grow(policy, tasks[0], step=1)
    np.testing.assert_array_equal(again.rows[0].token_ids, grown[0].rows[0].token_ids)
    other = worker.grow(policy, tasks[0], step=2)
    assert len(other.rows) != len(again.rows) or any(
        a.token_ids.tolist() != b.token_ids.tolist()
        for a, b in zip(other.rows, again.rows, strict=True)
    )


def test_a_graph_without_advantages_is_one_row_that_is_not_trained(
    reach: Path, tmp_path: Path
) -> None:
    worker, policy, tasks = made(
        reach, tmp_path, "reward=tests.worlds:no_reward", "method.objective=separate"
    )
    one = worker.grow(policy, tasks[0], step=1)
    assert one.total == 0.0 and len(one.rows) == 1 and one.line is None
    assert one.rows[0].advantages.shape == (2, len(one.rows[0].token_ids))
    assert not one.rows[0].weights.any()
    assert one.tally.metrics["reward/mean"] == pytest.approx(0.1)


def test_some_graphs_come_as_lines_named_by_step_and_task(reach: Path, tmp_path: Path) -> None:
    worker, policy, tasks = made(reach, tmp_path)
    lines = [worker.grow(policy, task, step).line for task in tasks[:6] for step in (1, 2)]
    ids = [json.loads(line)["id"] for line in lines if line]
    assert 0 < len(ids) < len(lines)  # one in three, as a step has three prompts
    names = {f"step-{step}/{task.id}" for task in tasks[:6] for step in (1, 2)}
    assert set(ids) <= names


def test_a_graph_brings_what_was_counted_since_the_last_one(reach: Path, tmp_path: Path) -> None:
    reward = "reward={class: tests.worlds:CountingReward, name: seen}"
    worker, policy, tasks = made(reach, tmp_path, reward)
    for task in tasks[:3]:
        grown = worker.grow(policy, task, step=1)
        assert grown.counts == {"seen": grown.tally.metrics["rollout/terminals"]}
        worker.answer(policy, task, 0)  # of an evaluation, and of no step


def test_answers_are_one_trajectory_each(reach: Path, tmp_path: Path) -> None:
    worker, policy, tasks = made(reach, tmp_path)
    (row, reward, _), (other, *_), (same, *_) = [
        worker.answer(policy, tasks[0], number) for number in (0, 1, 0)
    ]
    assert row.token_ids.tolist() == same.token_ids.tolist() != other.token_ids.tolist()
    text = policy.tokenizer.decode(row.token_ids[row.prompt_tokens :].tolist())
    assert reward == len(text) % 3 / 2


@pytest.mark.parametrize("outages", ["drop", "score"])
def test_an_answer_that_met_an_outage_counts_as_set(
    reach: Path, tmp_path: Path, outages: str
) -> None:
    worker, policy, tasks = made(reach, tmp_path, f"outages={outages}")
    _, calm, _ = worker.answer(policy, tasks[0], 0)
    storm = Storm(worker.grower.expander, lambda task: task == tasks[0].id)
    stormy = replace(worker, grower=replace(worker.grower, expander=storm))
    _, reward, met = stormy.answer(policy, tasks[0], 0)
    assert reward == (None if outages == "drop" else calm)
    assert (met.trajectories, met.left_out) == (1, outages == "drop")
    assert stormy.answer(policy, tasks[1], 0)[1] == worker.answer(policy, tasks[1], 0)[1]


def test_a_graph_whose_every_path_met_an_outage_says_so(reach: Path, tmp_path: Path) -> None:
    worker, policy, tasks = made(reach, tmp_path)
    storm = Storm(worker.grower.expander, lambda task: task == tasks[0].id)
    stormy = replace(worker, grower=replace(worker.grower, expander=storm))
    grown = stormy.grow(policy, tasks[0], 1)
    assert grown.outages.left_out == grown.outages.trajectories > 0
    assert grown.total == 0.0 and len(grown.rows) == 1
    calm = stormy.grow(policy, tasks[1], 1).outages
    assert calm.left_out == 0 < calm.trajectories


def test_a_graph_with_an_advantage_but_no_trained_token_is_not_trained(
    reach: Path, tmp_path: Path
) -> None:
    masked = "method={name: spo_tree, schedule: [2, 2], max_probability: 1.0e-9, whiten: none}"
    worker, policy, tasks = made(reach, tmp_path, masked)
    grown = worker.grow(policy, tasks[0], 1)
    assert grown.tally.metrics["credit/nonzero"] > 0
    assert grown.total == 0.0 and len(grown.rows) == 1 and grown.outages.left_out == 0


class TwoTerms(GraphPO):
    """A method of one's own whose edges have two advantages each."""

    def assign_credit(self, *batch: Any) -> list[Credit]:
        return [
            replace(credit, advantages=np.concatenate([credit.advantages, -credit.advantages]))
            for credit in super().assign_credit(*batch)
        ]


def test_a_method_of_ones_own_may_have_two_terms(reach: Path, tmp_path: Path) -> None:
    two = "{class: 'tests.engines.verl.test_worker:TwoTerms', schedule: [3, 2, 1, 1]}"
    own = f"method={{name: own, object: {two}}}"
    worker, policy, tasks = made(reach, tmp_path, own, "method.terms=2")
    rows = [row for task in tasks[:4] for row in worker.grow(policy, task, 1).rows]
    assert any(row.advantages.any() for row in rows)
    for row in rows:
        np.testing.assert_array_equal(row.advantages[1], -row.advantages[0])
    worker, policy, _ = made(reach, tmp_path, own)
    with pytest.raises(
        ConfigError, match=r"method graphpo gives an edge 2 .*: set method.terms=2$"
    ):
        worker.grow(policy, tasks[0], 1)


def test_a_task_travels_as_it_is() -> None:
    task = Task("a-1", "how «far»?", ("one", "two"), {"hops": 2, "kind": ["x"]})
    assert task_from_line(task_line(task)) == task
