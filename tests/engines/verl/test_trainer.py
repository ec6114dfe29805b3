"""The trainer's own steps, without verl's processes."""

import math
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphpo_agent.errors import RunError
from graphpo_agent.rollout.outages import Outages

pytestmark = pytest.mark.verl


def nested(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def fail() -> None:
    raise ValueError("as it was")


def test_weights_that_no_server_takes_end_the_run() -> None:
    from graphpo_agent.engines.verl.trainer import GraphTrainer

    waiting: Any = SimpleNamespace(_own=SimpleNamespace(sync_seconds=0.2), global_steps=3)
    given: list[int] = []
    GraphTrainer._in_time(waiting, lambda: given.append(1))
    assert given == [1]
    with pytest.raises(ValueError, match="as it was"):
        GraphTrainer._in_time(waiting, fail)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"^step 3: a vLLM server did not take the new weights"):
        GraphTrainer._in_time(waiting, lambda: time.sleep(30))
    assert time.monotonic() - began < 10


def test_workers_meet_where_no_connection_is_made() -> None:
    from verl.single_controller.ray import base
    from verl.trainer.ppo.v1 import trainer_base

    from graphpo_agent.engines.verl.trainer import meeting_apart

    maker: Any = trainer_base
    with meeting_apart():
        made = maker.RayWorkerGroup
    assert made.func is maker.RayWorkerGroup is base.RayWorkerGroup
    ports = made.keywords["master_port_range"]
    with socket.socket() as taken:
        taken.bind(("", ports[0]))
        _, port = base.get_master_addr_port._function(ports)
    assert 20_000 <= ports[0] < int(port) < 32_768


@pytest.mark.parametrize(("parts", "ranks"), [([0, 1], 2), ([0, 0, 1, 1], 2), ([0, 0], 1)])
def test_processes_that_share_their_rows_are_one(parts: list[int], ranks: int) -> None:
    from graphpo_agent.engines.verl.trainer import GraphTrainer

    asked: list[str] = []

    def query(role: str) -> list[int]:
        asked.append(role)
        return parts

    trainer: Any = GraphTrainer.__new__(GraphTrainer)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={}, _query_dispatch_info=query)
    assert trainer._ranks == trainer._ranks == ranks and asked == ["actor"]


def test_a_step_in_which_a_prompt_brought_no_graph_ends_the_run() -> None:
    from graphpo_agent.engines.verl.trainer import GraphTrainer

    config = SimpleNamespace(data=SimpleNamespace(train_batch_size=3))
    step: Any = SimpleNamespace(config=config, global_steps=2)
    GraphTrainer._check_complete(step, ["a", "b", "b", "c"])
    with pytest.raises(RunError, match="step 2: 1 prompts brought no graph"):
        GraphTrainer._check_complete(step, ["a", "b", "b"])


def test_gains_weigh_what_the_servers_drew_too_seldom_or_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graphpo_agent.engines.verl import trainer as module

    lists = {
        "response_mask": [[1, 1, 0, 1], [1, 1], [1]],
        "advantages_0": [[1.0, -2.0, 0.0, 3.0], [4.0, -5.0], [7.0]],
        "advantages_1": [[0.5, 0.5, 0.0, 0.5], [0.5, 0.5], [0.5]],
        "graph_weights": [[1.0, 1.0, 0.0, 1.0], [1.0, 1.0], [1.0]],
        "old_log_probs": [[-1.0, -1.0, -1.0, -1.0], [-2.0, -2.0], [-1.0]],
        "rollout_log_probs": [[-0.5, -1.2, 0.0, -3.0], [-2.0, -90.0], [-9.0]],
    }
    written: dict[str, Any] = {}

    def get(select_fields: Sequence[str], **_: object) -> Any:
        return {name: nested(lists[name]) for name in select_fields}

    monkeypatch.setattr(module.tq, "kv_batch_get", get)
    monkeypatch.setattr(module.tq, "kv_batch_put", lambda fields, **_: written.update(fields))
    trainer: Any = module.GraphTrainer.__new__(module.GraphTrainer)
    trainer._terms = ["advantages_0", "advantages_1"]
    trainer._update = module._Update(1, 3, {"a": 2.0, "b": 2.0}, 6)  # c only fills the minibatch
    batch = module.KVBatchMeta(partition_id="train", keys=["a", "b", "c"], tags=[{}, {}, {}])

    def computed(cap: float | None, metrics: dict[str, float]) -> dict[str, list[list[float]]]:
        trainer._own = SimpleNamespace(mismatch_cap=cap)
        correction = SimpleNamespace(bypass_mode=False)
        trainer.config = SimpleNamespace(algorithm=SimpleNamespace(rollout_correction=correction))
        trainer._compute_advantage(batch, metrics)
        return {name: [row.tolist() for row in rows.unbind(0)] for name, rows in written.items()}

    metrics: dict[str, float] = {}
    plain = computed(None, metrics)
    mean = pytest.approx((0.5 + 0.2 + 2 + 0 + 88) / 5)
    assert metrics.pop("update/mismatch") == mean and metrics.pop("update/mismatch_kl") > 1
    assert not metrics and plain["advantages"] == [[0.5, -1.0, 0.0, 1.5], [2.0, -2.5], [0.0]]
    weighed = computed(2.0, metrics)
    assert metrics["update/mismatch"] == mean and metrics["update/mismatch_capped"] == 2 / 5
    assert weighed["token_weights"] == plain["token_weights"]
    first = [0.5 * math.exp(-0.5), -math.exp(0.2), 0.0, 3.0]
    assert weighed["advantages"] == [pytest.approx(first), [2.0, -5.0], [0.0]]
    second = [0.25 * math.exp(-0.5), 0.25 * math.exp(0.2), 0.0, 0.5]
    assert weighed["advantages_1"] == [pytest.approx(second), [0.25, 0.5], [0.0]]


def test_answers_that_do_not_count_are_left_out_of_the_accuracy() -> None:
    from graphpo_agent.engines.verl.trainer import GraphTrainer

    trainer: Any = GraphTrainer.__new__(GraphTrainer)
    trainer._own = SimpleNamespace(outage_limit=0.5)

    def metrics(
        counts: list[bool],
        errors: list[str | None],
        tasks: Sequence[str] = "abc",
        failed_calls: int = 0,
    ) -> dict[str, float]:
        infos: dict[str, list[Any]] = {"reward": [1.0, 0.0, 0.0], "error": errors}
        met = (Outages(1, int(not one), 2, failed_calls) for one in counts)
        infos["outages"] = [asdict(one) for one in met]
        return trainer._val_metrics_update(["heldout"] * 3, list(tasks), infos, [0, 0, 0])

    accuracy = "eval/accuracy"
    all_count = metrics([True, True, True], [None] * 3)
    assert all_count[accuracy] == pytest.approx(1 / 3) and all_count["eval/outages"] == 0
    some = metrics([True, False, True], [None] * 3)
    assert some[accuracy] == 0.5 and some["eval/outages"] == 1
    none = {"eval/failed_calls": 0}
    assert metrics([False] * 3, [None] * 3) == none | {"eval/outages": 3}
    assert metrics([False, True, False], [None] * 3) == none | {"eval/outages": 2}
    judged_all_the_same = metrics([True] * 3, [None] * 3, failed_calls=1)
    assert judged_all_the_same == {"eval/outages": 0, "eval/failed_calls": 3}
    again = ["a", "b", "b"]  # a was answered again, in vain
    assert metrics([True, True, True], [None] * 3, again)["eval/accuracy"] == 0.5
    with pytest.raises(RunError, match=r"^the quota is used up$"):
        metrics([True, False, True], [None, "the quota is used up", None])
