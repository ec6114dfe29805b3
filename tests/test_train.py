"""Whole runs through the command line, in both modes."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from graphpo_agent.cli import main
from graphpo_agent.graph.jsonl import read_graphs
from graphpo_agent.protocols import RewardFn
from graphpo_agent.report.panels import PANELS
from graphpo_agent.types import Outcome, Task
from tests.engines.tiny import long_rope
from tests.runs import rows, weights
from tests.worlds import ROOT, run_arguments, sft_overrides


@pytest.mark.parametrize("world", ["kb", "reach"])
def test_what_a_run_leaves(world: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place: Path = request.getfixturevalue(world)
    run = tmp_path / "run"
    overrides = ["train.steps=2", "train.max_resample=1"]
    assert main(["train", *run_arguments(place, run, *overrides)]) == 0
    before, *steps = rows(run)
    assert before["step"] == 0 and {"eval/accuracy", "eval/greedy_accuracy"} <= set(before)
    assert [row["step"] for row in steps] == [1, 2]
    assert steps[-1]["tokens/total"] == sum(row["tokens/generated"] for row in steps)
    assert "eval/accuracy" in steps[-1]
    charted = {name for panel in PANELS for name, _ in panel.metrics if "/status/" not in name}
    assert charted <= {name for row in (before, *steps) for name in row}
    assert {path.name for path in run.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "graphs.jsonl",
        "manifest.json",
        "metrics.jsonl",
        "report.html",
    }
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["seed"] == 0 and manifest["versions"]["torch"]


def test_the_checkpoint_of_the_best_evaluation_is_kept_and_told(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    more = ["train.steps=6", "train.eval_every=2", "train.keep_checkpoints=1"]
    assert main(["train", *run_arguments(reach, run, *more, "update.learning_rate=1e-3")]) == 0
    evaluated = {row["step"]: row["eval/accuracy"] for row in rows(run) if "eval/accuracy" in row}
    del evaluated[0]  # of which there is no checkpoint
    best = max(evaluated, key=evaluated.__getitem__)
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step-{step:06d}" for step in sorted({best, 6})]
    path = run / f"checkpoints/step-{best:06d}"
    assert f"best held-out accuracy {evaluated[best]:.1%}: {path}\n" in capsys.readouterr().out
    progress = json.loads((path / "progress.json").read_text())
    assert progress["accuracy"] == evaluated[best]


@pytest.mark.parametrize(
    "state",
    [
        "state={kind: policy_summary, max_summary_tokens: 4, embedder: {kind: hashing}}",
        "state={kind: key}",
        "state={kind: key, function: 'graphpo_agent.rewards.toy:facts_key'}",
        "state={kind: frozen_summary, max_summary_tokens: 8, embedder: {kind: hashing},"
        " chat: {class: graphpo_agent.local_chat:LocalChat, path: POLICY}}",
        "state={kind: text, embedder: {kind: encoder, path: POLICY}}",
    ],
)
def test_every_way_of_naming_a_state_runs(state: str, kb: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    state = state.replace("POLICY", str(kb / "policy"))
    assert main(["train", *run_arguments(kb, run, state, "train.steps=1")]) == 0
    summary_tokens = rows(run)[1]["tokens/summary"]
    assert (summary_tokens > 0) == ("policy_summary" in state)


def test_a_users_own_modules_beside_the_run_are_found(reach: Path, tmp_path: Path) -> None:
    (tmp_path / "my_parts.py").write_text(
        "def reward(task, outcome):\n    return len(outcome.response) % 2\n"
        "def key(state):\n    return str(state.depth)\n"
    )
    script = Path(sys.executable).with_name("graphpo")
    own = ["reward=my_parts:reward", "state={kind: key, function: 'my_parts:key'}"]
    arguments = run_arguments(reach, tmp_path / "run", "train.steps=1", *own)
    done = subprocess.run([script, "train", *arguments], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run")[1]["reward/mean"] > 0


def test_what_a_reward_object_counts_is_in_the_metrics(reach: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = "reward={class: tests.worlds:CountingReward, name: seen}"
    assert main(["train", *run_arguments(reach, run, own, "train.steps=2")]) == 0
    terminals = [3 * row["rollout/terminals"] for row in rows(run)[1:]]
    assert [row["seen"] for row in rows(run)[1:]] == pytest.approx(terminals)


def test_another_seed_draws_other_rollouts(reach: Path, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for run, seed in zip(runs, (0, 0, 1), strict=True):
        arguments = run_arguments(reach, run, f"seed={seed}", "train.steps=1")
        assert main(["train", *arguments]) == 0
    assert weights(runs[0]) == weights(runs[1]) != weights(runs[2])


def test_dry_run_prints_the_resolved_configuration_and_writes_nothing(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(kb, run, "train.steps=7"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "steps: 7" in printed
    assert "# memory: about" in printed and "# memory: prompts are not read" in printed
    assert "# tasks: 24 to train with, 8 held out\n" in printed
    bounds = ["train.prompts_per_step=24", "train.eval_tasks=3"]
    assert main(["train", *run_arguments(kb, run, *bounds), "--dry-run"]) == 0
    assert "# tasks: 24 to train with, 3 held out\n" in capsys.readouterr().out
    trained = f"tasks.train={kb}/heldout.jsonl"
    few = [trained, "train.prompts_per_step=2"]
    assert main(["train", *run_arguments(kb, run, *few), "--dry-run"]) == 0
    assert "held out; 8 of these are training tasks\n" in capsys.readouterr().out
    gone = [*run_arguments(kb, run, "tasks.train=/nowhere/tasks.jsonl"), "--dry-run"]
    assert main(["train", *gone]) == 0
    assert "# tasks: not known yet: " in capsys.readouterr().out
    assert not run.exists()


def test_memory_is_told_and_tasks_are_checked_before_weights_are_loaded(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(kb / "policy", model)
    (model / "model.safetensors").write_bytes(b"damaged")
    arguments = run_arguments(kb, run, f"model.path={model}")
    assert main(["train", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(f"graphpo → {run}\nmemory: about ")
    assert "a weight file is damaged" in printed.err
    assert main(["train", *arguments, f"tasks.train={tmp_path}/none.jsonl"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "none.jsonl" in printed.err
    assert not run.exists()


class Best:
    """The highest of several rewards."""

    def __init__(self, of: Sequence[RewardFn]) -> None:
        self._of = of

    def __call__(self, task: Task, outcome: Outcome) -> float:
        return max(reward(task, outcome) for reward in self._of)


def test_a_budget_of_paths_that_a_method_cannot_keep_is_told(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chains = "method={name: spo_chain, num_chains: 4}"
    for paths, status in ((4, 2), (5, 0)):
        some = [f"budget.trajectories={paths}", chains, "--dry-run"]
        assert main(["train", *run_arguments(reach, tmp_path / "run", *some)]) == status
    told = capsys.readouterr()
    assert "leaves spo_chain no rollouts beside its chains" in told.err
    assert "paths a prompt, and budget.trajectories is 5: most of its branches" in told.out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("reward=graphpo_agent.rewards.qa:exact_match", "qa:exact_match compares the answer"),
        (
            "reward={class: 'graphpo_agent.rewards.qa:Binarize', threshold: 0.5, "
            "reward: {function: 'graphpo_agent.rewards.qa:token_f1'}}",
            "qa:token_f1 compares the answer",
        ),
        (
            "reward={class: 'tests.test_train:Best', "
            "of: [{function: 'graphpo_agent.rewards.gaia:gaia_match'}]}",
            "gaia:gaia_match compares the answer",
        ),
        ("state={kind: key}", "documents_key tells what an agent has found"),
    ],
)
def test_what_only_an_agent_has_is_refused_in_segment_mode(
    override: str, says: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *run_arguments(reach, tmp_path / "run", override), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.path=/nowhere/model", "/nowhere/model"),
        ("tasks.train=/nowhere/tasks.jsonl", "/nowhere/tasks.jsonl"),
        ("mode.tools.search.retriever.directory=/nowhere/index", "/nowhere/index"),
        ("mode.tools.search.class=tools.search:Nonesuch", "tools.search:Nonesuch"),
        ("mode.tools.search.depth=3", "depth"),
        ("reward=graphpo_agent.rewards.qa:nonesuch", "nonesuch"),
        ("state={kind: key, function: 'no_module:f'}", "no_module"),
        ("train.prompts_per_step=2000", "prompts_per_step"),
        ("model.device=abacus", "abacus"),
        ("update.betas=[1.0, 0.9]", "update.betas"),
        ("reward=os:sep", "os:sep"),
        ("reward=os:getcwd", "task, outcome"),
        ("reward=graphpo_agent.rewards.qa", "reward: 'graphpo_agent.rewards.qa': write module"),
        ("state={kind: key, function: 'os:getcwd'}", "state.function: 'os:getcwd' cannot be"),
        (
            "mode.tools.search.class=tests.worlds:AnyArguments",
            "mode.tools.search: tests.worlds:AnyArguments has no run, name",
        ),
        ("mode.tools.search={class: 'tests.worlds:Noted'}", "Noted: schema is no JSON object: "),
        (
            "mode.tools.search={class: tests.worlds:Noted, schema: {}, description: null}",
            "is no te",
        ),
        ("reward={class: 'tests.worlds:AnyArguments'}", "reward: 'tests.worlds:AnyArguments' can"),
        (
            "state={kind: key, function: {class: 'tests.worlds:AnyArguments'}}",
            "state.function: 'tests.worlds:AnyArguments' cannot be called with (state)",
        ),
        ("mode.tools.search.class=tests.worlds:Runs", "Runs has no name, description, schema"),
        ("mode.tools.search.retriever=books", "mode.tools.search: tools.search:SearchTool: retri"),
        ("mode.tools.search.topk=many", "topk is not valid: input should be a valid integer"),
        ("method.merge_treshold=0.9", "merge_treshold: unknown key"),
        ("method.schedule=[6,0]", "method.schedule.1"),
    ],
)
def test_a_mistake_is_one_line_status_2_and_leaves_no_run(
    override: str, says: str, kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(kb, run, override)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error and error.startswith("graphpo: ")
    assert not run.exists()


@pytest.mark.parametrize("minibatch", [8, 2])
def test_a_policy_that_diverges_is_one_line_and_status_2(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], minibatch: int
) -> None:
    overrides = ["update.learning_rate=1e30", f"update.minibatch_graphs={minibatch}"]
    arguments = run_arguments(reach, tmp_path / "run", *overrides, "train.steps=3")
    assert main(["train", *arguments]) == 2
    assert "the policy has diverged; lower " in capsys.readouterr().err


def test_rollout_eval_score_and_report(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs, transcripts, credit = (tmp_path / name for name in ("g.jsonl", "t.jsonl", "c.jsonl"))
    arguments = run_arguments(kb, tmp_path / "run")
    assert main(["rollout", *arguments, "--count", "3", "--out", str(graphs)]) == 0
    assert len(list(read_graphs(graphs))) == 3
    others = tmp_path / "others.jsonl"
    few = ["seed=1", "budget.trajectories=2", "--count", "3", "--out", str(others)]
    assert main(["rollout", *arguments, *few]) == 0
    assert all(len(graph.leaves) <= 2 for graph in read_graphs(others))
    assert main(["rollout", *arguments, *few, "seed=2"]) == 0
    sampled = others.read_text()
    assert main(["rollout", *arguments, *few]) == 0
    assert others.read_text() != sampled
    assert main(["score", str(graphs), "--method", "graphpo", "--out", str(credit)]) == 0
    assert len(credit.read_text().splitlines()) == 3
    capsys.readouterr()
    assert main(["eval", *arguments, "--samples", "2", "--out", str(transcripts)]) == 0
    assert "8 tasks, 16 trajectories" in capsys.readouterr().out
    lines = [json.loads(line) for line in transcripts.read_text().splitlines()]
    assert len(lines) == 16 and all(line["reward"] in (0.0, 0.5, 1.0) for line in lines)
    assert not (tmp_path / "run").exists()


def test_a_report_finds_the_classes_that_its_file_does_not_name(
    reach: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert main(["train", *run_arguments(reach, run, "train.steps=1")]) == 0
    page, log = (run / "report.html").read_text(), run / "graphs.jsonl"
    records = [json.loads(line) for line in log.open()]
    assert records and all("class" in node for record in records for node in record["nodes"])
    for record in records:
        for node in record["nodes"]:
            del node["class"]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text() == page


def test_torch_has_the_threads_that_were_asked_for(reach: Path, tmp_path: Path) -> None:
    run = run_arguments(reach, tmp_path / "run", "train.steps=1")
    sft = [str(ROOT / "configs/toy/reach_sft.yaml"), *sft_overrides(reach)]
    before = torch.get_num_threads()
    try:
        for threads, command in (
            (3, ["train", *run]),
            (2, ["eval", *run]),
            (1, ["rollout", *run, "--count", "1", "--out", str(tmp_path / "g.jsonl")]),
            (2, ["sft", *sft, f"output={tmp_path / 'policy'}"]),
        ):
            assert main([*command, f"threads={threads}"]) == 0
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_small_task_file_ends_resampling_not_the_run(reach: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join((reach / "train.jsonl").read_text().splitlines(True)[:5]))
    run = tmp_path / "run"
    never = ["reward=tests.worlds:no_reward", "train.max_resample=2", "train.steps=2"]
    assert main(["train", *run_arguments(reach, run, f"tasks.train={few}", *never)]) == 0
    first, second = rows(run)[1:]
    assert first["rollout/nodes"] > 1 and second["rollout/nodes"] > 1
    assert "update/loss" not in second
    # The same tasks and the same policy, yet each step draws with random numbers of its own.
    assert first["tokens/generated"] != second["tokens/generated"]


def test_tasks_whose_prompts_do_not_fit_are_told_before_the_first_step(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_long_ones(name: str) -> Path:
        lines = (reach / name).read_text().splitlines()[:4]
        long = [json.loads(lines[0]) | {"id": f"long {n}", "question": "a " * 900} for n in (1, 2)]
        made = tmp_path / name
        made.write_text("\n".join([*map(json.dumps, long), *lines]) + "\n")
        return made

    train, heldout = with_long_ones("train.jsonl"), with_long_ones("heldout.jsonl")
    run, few = tmp_path / "run", ["train.prompts_per_step=2", "train.steps=4"]
    assert main(["train", *run_arguments(reach, run, f"tasks.train={train}", *few)]) == 0
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4]
    assert "2 training tasks are left out, as the first: task 'long 1'" in capsys.readouterr().out

    refused = tmp_path / "refused"
    assert main(["train", *run_arguments(reach, refused, f"tasks.heldout={heldout}", *few)]) == 2
    error = capsys.readouterr().err
    assert "'long 1'" in error and "2 such tasks of 6" in error and error.count("\n") == 1
    many = ["train.prompts_per_step=5"]
    assert main(["train", *run_arguments(reach, refused, f"tasks.train={train}", *many)]) == 2
    error = capsys.readouterr().err
    assert "has 4 tasks that can be used; 2 training tasks are left out, as the first" in error
    assert "'long 1'" in error and error.count("\n") == 1
    assert not refused.exists()


def test_positions_that_end_contexts_early_are_told(
    reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(reach / "policy", policy)

    def trained(original: int) -> int:
        settings = json.loads((policy / "config.json").read_text())
        factors = [1.0] * (settings["hidden_size"] // settings["num_attention_heads"] // 2)
        settings["rope_parameters"] = long_rope(original) | {
            "short_factor": factors,
            "long_factor": factors,
        }
        (policy / "config.json").write_text(json.dumps(settings))
        shown = [f"model.path={policy}", "train.steps=1"]
        return main(["train", *run_arguments(reach, tmp_path / f"run-{original}", *shown)])

    says = "contexts end at 30 tokens, not at the 512 that"
    assert trained(30) == 0
    assert says in capsys.readouterr().out
    arguments = run_arguments(reach, tmp_path / "run", f"model.path={policy}")
    assert main(["eval", *arguments]) == 0
    assert capsys.readouterr().out.startswith(says)
    assert main(["rollout", *arguments, "--count", "1", "--out", str(tmp_path / "g.jsonl")]) == 0
    assert capsys.readouterr().out.startswith(says)
    assert trained(8) == 2
    error = capsys.readouterr().err
    assert "has 0 tasks that can be used" in error and error.count("\n") == 1
    assert "the policy's context of 8; remove" in error and "longer context" in error


@pytest.mark.parametrize("out", ["nowhere/x.jsonl", ".", "/dev/null"])
@pytest.mark.parametrize("verb", ["rollout", "eval"])
def test_an_impossible_output_is_refused_before_the_work(
    verb: str, out: str, reach: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = run_arguments(reach, tmp_path / "run", "model.path=/never/loaded")
    assert main([verb, *arguments, "--out", out]) == 2
    assert "output" in capsys.readouterr().err
