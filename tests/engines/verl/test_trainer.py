"""The trainer's own steps, without verl's processes."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from graphpo_agent.errors import RunError

pytestmark = pytest.mark.verl


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


def test_a_step_in_which_a_prompt_brought_no_graph_ends_the_run() -> None:
    from graphpo_agent.engines.verl.trainer import GraphTrainer

    config = SimpleNamespace(data=SimpleNamespace(train_batch_size=3))
    step: Any = SimpleNamespace(config=config, global_steps=2)
    GraphTrainer._check_complete(step, ["a", "b", "b", "c"])
    with pytest.raises(RunError, match="step 2: 1 prompts brought no graph"):
        GraphTrainer._check_complete(step, ["a", "b", "b"])


def test_answers_that_do_not_count_are_left_out_of_the_accuracy() -> None:
    from graphpo_agent.engines.verl.trainer import GraphTrainer

    trainer: Any = GraphTrainer.__new__(GraphTrainer)
    trainer._own = SimpleNamespace(outage_limit=0.5)

    def metrics(
        counts: list[bool], errors: list[str | None], tasks: Sequence[str] = "abc"
    ) -> dict[str, float]:
        infos: dict[str, list[Any]] = {"reward": [1.0, 0.0, 0.0]}
        infos |= {"counts": counts, "error": errors}
        return trainer._val_metrics_update(["heldout"] * 3, list(tasks), infos, [0, 0, 0])

    accuracy = "eval/accuracy"
    all_count = metrics([True, True, True], [None] * 3)
    assert all_count[accuracy] == pytest.approx(1 / 3) and all_count["eval/outages"] == 0
    some = metrics([True, False, True], [None] * 3)
    assert some[accuracy] == 0.5 and some["eval/outages"] == 1
    assert metrics([False] * 3, [None] * 3) == {"eval/outages": 3}
    assert metrics([False, True, False], [None] * 3) == {"eval/outages": 2}
    again = ["a", "b", "b"]  # a was answered again, in vain
    assert metrics([True, True, True], [None] * 3, again)["eval/accuracy"] == 0.5
    with pytest.raises(RunError, match=r"^the quota is used up$"):
        metrics([True, False, True], [None, "the quota is used up", None])
