"""Every method of the paper's tables, trained for a few steps in both modes."""

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpo_agent.cli import main
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.graph.samples import TrainingSample, row_paths, to_path_rows
from graphpo_agent.methods.prefix_pool import PrefixPool
from graphpo_agent.types import Prefix, Task
from tests.runs import rows
from tests.worlds import run_arguments

METHODS = {
    "graphpo": "{name: graphpo, schedule: [3, 2], singleton: inherit}",
    "graphpo_plus": "{name: graphpo, schedule: [3, 2], backup: class, normalize: rms, "
    "trajectory_weight: 1, reallocate: uncertain, singleton: inherit}",
    "waves": "{name: graphpo, schedule: [3, 1], backup: class, refill: uncertain}",
    "separate": "{name: graphpo, schedule: [3, 2], objective: separate}",
    "tree": "{name: tree, schedule: [3, 2]}",
    "grpo": "{name: grpo, group_size: 4}",
    "dapo": "{name: dapo, group_size: 4, max_length: 30, overlong_buffer: 10}",
    "dr_grpo": "{name: grpo, group_size: 4, normalize: none}",
    "treerl": "{name: treerl, trees: 2, select: 5, fork: edge}",
    "spo_tree": "{name: spo_tree, schedule: [3, 2], normalize: std}",
    "spo_chain": "{name: spo_chain, num_chains: 2, rollouts: 2, cut_interval: 3, cut: edge}",
    "tree_grpo": "{name: tree_grpo, kept: 2}",
    "treepo": "{name: treepo, width: 6}",
    "treerpo": "{name: treerpo, schedule: [3, 2]}",
    "pros": "{name: pros, group_size: 4, pool: {cut: edge}}",
    "prm": "{name: prm, group_size: 4, scorer: {class: tests.worlds:LengthScorer}}",
    "prm_edges": "{name: prm, steps: edges, group_size: 4, "
    "scorer: {class: tests.worlds:LengthScorer}}",
}
EACH_EDGE_ONCE = (
    *("graphpo", "graphpo_plus", "waves", "separate", "tree"),
    *("spo_tree", "spo_chain", "treerpo"),
)
WHITENED = ("spo_tree", "spo_chain", "treepo")
IN_SEGMENTS = {
    "pros": "{name: pros, group_size: 4}",
    "treerl": "{name: treerl, trees: 2, select: 5}",
    "spo_chain": "{name: spo_chain, num_chains: 2, rollouts: 2, cut_interval: 3}",
}


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[list[TrainingSample]]:
    """What the engine is given to train on, update by update."""
    given: list[list[TrainingSample]] = []
    update = LocalEngine.update

    def spied(
        self: LocalEngine, samples: Sequence[TrainingSample], *others: Any
    ) -> dict[str, float]:
        given.append(list(samples))
        return update(self, samples, *others)

    monkeypatch.setattr(LocalEngine, "update", spied)
    return given


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("world", "budget"), [("kb", "tokens"), ("reach", "tokens"), ("reach", None)]
)
def test_every_method_trains_in_both_modes(
    world: str,
    method: str,
    budget: str | None,
    updates: list[list[TrainingSample]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    place: Path = request.getfixturevalue(world)
    settings = (IN_SEGMENTS if world == "reach" else METHODS).get(method) or METHODS[method]
    run = tmp_path / "run"
    overrides = [f"method={settings}", "train.steps=2", "train.max_resample=0"]
    tokens = {"kb": 900, "reach": 150}[world]
    if budget:
        overrides += [f"budget.tokens={tokens}"]
    assert main(["train", *run_arguments(place, run, *overrides)]) == 0
    _, *steps = rows(run)
    assert [row["step"] for row in steps] == [1, 2]
    if budget:
        assert [row["tokens/generated"] for row in steps] == [3 * tokens] * 2
    page = (run / "report.html").read_text()
    assert ("before whitening" in page) == (method in WHITENED)
    losses = [row["update/loss"] for row in steps if "update/loss" in row]
    assert losses and all(math.isfinite(loss) for loss in losses)
    assert len(updates) == len(losses)
    for samples in updates:
        assert len({sample.graph_id for sample in samples}) == len(samples) <= 3
        for sample in samples:
            assert times_trained(sample) == (
                sample.loss_mask.sum() if method in EACH_EDGE_ONCE else on_trajectories(sample)
            )
        if method in WHITENED:
            advantages = advantages_of(samples)
            assert np.mean(advantages) == pytest.approx(0.0, abs=1e-9)
            assert np.std(advantages, ddof=1) == pytest.approx(1.0, rel=1e-3)


def advantages_of(samples: Sequence[TrainingSample]) -> list[float]:
    """Those of every token with a loss in an update."""
    rows = [row for sample in samples for row in to_path_rows(sample)]
    return [a for row in rows for a in row.advantages[0, row.loss_mask].tolist()]


def times_trained(sample: TrainingSample) -> int:
    """Tokens with a loss in an update, counted as often as they have one."""
    return sum(int(row.loss_mask.sum()) for row in to_path_rows(sample))


def on_trajectories(sample: TrainingSample) -> int:
    """Tokens of all trained trajectories, each of which may occur once only."""
    assert sample.rows is not None
    assert len(set(sample.rows.tolist())) == len(sample.rows)
    node = np.repeat(np.arange(len(sample.parent)), np.diff(sample.offsets))
    own = np.bincount(node[sample.loss_mask], minlength=len(sample.parent))
    return int(sum((own * through).sum() for through in row_paths(sample.parent, sample.rows)))


@pytest.mark.parametrize(("world", "cut"), [("reach", "token"), ("kb", "edge")])
def test_pros_goes_on_from_its_pool_after_a_stop(
    world: str, cut: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A resumed run chooses the prefixes that the run without a stop chooses."""
    place: Path = request.getfixturevalue(world)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    pros = f"method={{name: pros, group_size: 4, pool: {{cut: {cut}}}}}"
    settings = [pros, "train.prompts_per_step=12"]
    assert main(["train", *run_arguments(place, whole, *settings, "train.steps=5")]) == 0
    assert main(["train", *run_arguments(place, stopped, *settings, "train.steps=3")]) == 0
    assert main(["train", "--resume", str(stopped), "train.steps=5"]) == 0
    last = [(run / "graphs.jsonl").read_text().splitlines()[-1] for run in (whole, stopped)]
    assert last[0] == last[1]
    for name in ("prefixes.json", "prefixes.int32"):
        pools = [run / "checkpoints/step-000005" / name for run in (whole, stopped)]
        assert pools[0].read_bytes() == pools[1].read_bytes()
    held = json.loads((whole / "checkpoints/step-000005/prefixes.json").read_text())
    assert any(len(question["lengths"]) > 1 for question in held.values())
    memories = [each for question in held.values() for each in question["memories"][1:]]
    assert all((memory is None) == (cut == "token") for memory in memories)


def test_prefixes_are_chosen_by_other_random_numbers_in_every_round(
    reach: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    choose = PrefixPool.choose

    def spied(
        self: PrefixPool, tasks: Sequence[Task], rng: np.random.Generator
    ) -> dict[str, Prefix]:
        drawn.append(int(copy.deepcopy(rng).integers(2**62)))
        return choose(self, tasks, rng)

    monkeypatch.setattr(PrefixPool, "choose", spied)
    pros = "method={name: pros, group_size: 4}"
    more = [pros, "reward=tests.worlds:no_reward", "train.max_resample=1", "train.steps=2"]
    assert main(["train", *run_arguments(reach, tmp_path / "run", *more)]) == 0
    assert len(drawn) == len(set(drawn)) == 4


def test_a_damaged_pool_is_one_line(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = ["method={name: pros, group_size: 4}", "train.steps=1"]
    assert main(["train", *run_arguments(reach, run, *settings)]) == 0
    record, tokens = ((run / f"checkpoints/step-000001/prefixes.{x}") for x in ("json", "int32"))
    whole = tokens.read_bytes()
    assert whole
    for path, content, reason in (
        (tokens, whole[:-4], f"{len(whole) // 4 - 1} tokens, want {len(whole) // 4}"),
        (tokens, whole[:-1], "must be a multiple of element size"),
        (tokens, None, "No such file"),
        (record, b"{", "Expecting property name"),
    ):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        capsys.readouterr()
        assert main(["train", "--resume", str(run), "train.steps=2"]) == 2
        assert f"{path.name} is damaged (" in (told := capsys.readouterr().err)
        assert reason in told and told.count("\n") == 1


def test_another_methods_run_has_no_pool(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = ["method={name: grpo, group_size: 4}", "train.steps=1"]
    assert main(["train", *run_arguments(reach, run, *settings)]) == 0
    capsys.readouterr()
    pros = ["method={name: pros, group_size: 4}", "train.steps=2"]
    assert main(["train", "--resume", str(run), *pros]) == 2
    assert "step-000001 has no prefixes.json: its run was not one of" in capsys.readouterr().err


def test_a_rollout_refuses_what_a_run_refuses(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = run_arguments(kb, tmp_path / "run", "method={name: spo_chain}")
    assert main(["rollout", *arguments, "--out", str(tmp_path / "graphs.jsonl")]) == 2
    assert "method.cut=edge" in capsys.readouterr().err
