"""Memory that runs out in a run: one line that says what to change, and the run goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from graphpo_agent.cli import main
from graphpo_agent.types import Outcome, Task
from tests.runs import rows
from tests.worlds import ROOT, length_reward, run_arguments, sft_overrides

armed = False
CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB" + (
    " of which 1.0 GiB is free. If reserved but unallocated memory is large try setting" * 3
)


def arming_reward(task: Task, outcome: Outcome) -> float:
    """``length_reward``; passes take too much memory from the first one on."""
    global armed
    armed = True
    return length_reward(task, outcome)


@pytest.fixture(params=["cpu", "cuda"])
def learns(request: pytest.FixtureRequest) -> Iterator[list[bool]]:
    """Which passes take too much memory once they are armed: ``[True]`` those that learn."""
    global armed
    armed = False
    which: list[bool] = []

    def greedy(module: torch.nn.Module, inputs: object) -> None:
        if armed and torch.is_grad_enabled() in which:
            if request.param == "cuda":
                raise torch.OutOfMemoryError(CUDA)
            torch.empty(2**50)

    hook = register_module_forward_pre_hook(greedy)
    yield which
    hook.remove()


@pytest.mark.parametrize(
    ("learning", "says"),
    [
        (True, "graphpo: no memory is left for the update: "),
        (False, "graphpo: no memory is left for sampling: "),
    ],
)
def test_a_step_that_takes_too_much_is_one_line_and_the_run_goes_on(
    learning: bool,
    says: str,
    learns: list[bool],
    reach: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    arguments = run_arguments(reach, run, "train.steps=1", "tasks.heldout=null")
    assert main(["train", *arguments]) == 0
    learns.append(learning)
    reward = f"reward={__name__}:arming_reward"
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "train.steps=2", reward]) == 2
    error = capsys.readouterr().err
    assert error.startswith(says) and error.count("\n") == 1 and len(error) < 500
    assert "can't allocate memory" in error or "CUDA out of memory. Tried to allocate" in error
    assert ("; lower update.max_tokens_per_batch" if learning else "; lower engine.max_b") in error
    learns.clear()
    assert main(["train", "--resume", str(run), "train.steps=2"]) == 0
    assert [row["step"] for row in rows(run)] == [1, 2]


def test_a_warm_start_says_so_too(
    learns: list[bool], reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    global armed
    learns.append(True)
    armed = True
    config = str(ROOT / "configs/toy/reach_sft.yaml")
    assert main(["sft", config, *sft_overrides(reach), f"output={tmp_path / 'model'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphpo: no memory is left for a step: ")
    assert "; lower max_tokens_per_batch or batch_size" in error
