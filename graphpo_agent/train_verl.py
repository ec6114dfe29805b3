"""A run through verl: what its workers grow graphs with, and its start, logs and end."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from graphpo_agent.build import (
    build_budget,
    build_grower,
    build_sampling,
    build_step_scoring,
    build_tasks,
    device_of,
)
from graphpo_agent.build_method import build_method
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import dump_config
from graphpo_agent.engines.local.drawing import StopFinder
from graphpo_agent.engines.local.token_weights import LossAggregation
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.verl.launch import compose, environment, is_installed, launch, validate
from graphpo_agent.engines.verl.rows import WeightedRow, weighted_rows
from graphpo_agent.engines.verl.settings import advantage_terms, verl_engine, verl_settings
from graphpo_agent.engines.verl.worker import GrownGraph
from graphpo_agent.errors import ConfigError, RunError
from graphpo_agent.evals.heldout import leaves
from graphpo_agent.graph.budget import Budget
from graphpo_agent.graph.jsonl import graph_to_json
from graphpo_agent.methods.grpo import Grpo
from graphpo_agent.methods.method import Method, credits_of, training_sample
from graphpo_agent.protocols import Policy, Tokenizer
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.metrics import credit_metrics, rollout_metrics
from graphpo_agent.report.run_dir import RunDirectory, write_atomically
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.rollout.step_scores import StepScoring
from graphpo_agent.types import SamplingParams, Task

__all__ = [
    "RunWorker",
    "check_fresh",
    "check_verl",
    "make_worker",
    "rewind_logs",
    "train_through_verl",
]

WORKER = "graphpo_agent.train_verl:make_worker"


@dataclass(frozen=True, slots=True)
class RunWorker:
    """A run's own way to grow and credit a graph (``engines.verl.worker.GraphWorker``)."""

    tokenizer: Tokenizer
    stops: StopFinder
    max_context_tokens: int
    grower: Grower
    method: Method
    budget: Budget
    sampling: SamplingParams
    step_scoring: StepScoring | None
    aggregation: LossAggregation
    horizon: int
    terms: int
    seed: int
    prompts_per_step: int

    def grow(self, policy: Policy, task: Task, step: int) -> GrownGraph:
        """The graph of one task of a training step: grown, scored, credited, cut into rows."""
        (rollout,) = self.grower.grow(
            policy, [task], self.method, self.sampling, (self.seed, step), self.budget
        )
        if self.step_scoring is not None:
            (rollout,) = self.step_scoring([rollout], policy.tokenizer)
        (credit,) = credits_of(self.method, [rollout.graph], [rollout.classes])
        metrics = rollout_metrics([rollout])
        metrics["tokens/prefill_computed"] = policy.take_prefilled_tokens()
        if not credit.has_signal:
            return GrownGraph([_untrained(rollout, self.terms)], 0.0, metrics)
        sample = training_sample(rollout.graph, credit)
        rows = weighted_rows(sample, self.aggregation, self.horizon)
        line = None
        if derive_seed(step, task.id) % self.prompts_per_step == 0:  # about one a step
            named = replace(rollout.graph, id=f"step-{step}/{task.id}")
            line = graph_to_json(named, credit.classes)
        return GrownGraph(rows.rows, rows.total, metrics | credit_metrics([credit]), line)

    def answer(self, policy: Policy, task: Task, number: int) -> tuple[WeightedRow, float | None]:
        """One trajectory of a held-out task, judged as ``evals.heldout`` does."""
        (rollout,) = self.grower.grow(
            policy, [task], Grpo(group_size=1), self.sampling, (self.seed, "evaluation", number)
        )
        ((_, reward),) = leaves(rollout, self.grower.outages)
        return _untrained(rollout, self.terms), reward


def make_worker(config: str) -> RunWorker:
    """A worker of a run, in a process of verl's.

    Args:
        config: the resolved configuration.
    """
    run = RunConfig.model_validate(yaml.safe_load(config))
    tokenizer = HfTokenizer.load(run.model.path)
    return RunWorker(
        tokenizer=tokenizer,
        stops=StopFinder(tokenizer, tokenizer.vocab_size),
        max_context_tokens=verl_engine(run).max_context_tokens,
        grower=build_grower(run),
        method=build_method(run.method),
        budget=build_budget(run.budget),
        sampling=build_sampling(run.sampling),
        step_scoring=build_step_scoring(run.method),
        aggregation=run.update.loss_aggregation,
        horizon=run.mode.max_response_tokens,
        terms=advantage_terms(run.method),
        seed=run.seed,
        prompts_per_step=run.train.prompts_per_step,
    )


def _untrained(rollout: Rollout, terms: int) -> WeightedRow:
    """The first path of a graph, none of it trained."""
    graph = rollout.graph
    path = [0, *graph.path(int(graph.leaves[0]))]
    spans = [np.arange(graph.offsets[v], graph.offsets[v + 1]) for v in path]
    tokens = np.concatenate(spans)
    return WeightedRow(
        token_ids=graph.token_ids[tokens],
        prompt_tokens=len(spans[0]),
        loss_mask=graph.loss_mask[tokens],
        logprobs=graph.logprobs[tokens],
        weights=np.zeros(len(tokens)),
        advantages=np.zeros((terms, len(tokens))),
    )


def check_verl(config: RunConfig, training: bool = False) -> list[str]:
    """Check verl's side of a run as far as it goes without GPUs and data.

    Args:
        config: the run.
        training: it is about to be trained, so that verl must be there.

    Returns:
        Lines about it for a reader.

    Raises:
        ConfigError: verl refuses the settings, or is not installed.
    """
    if not is_installed():
        if not training:
            return ["verl: not installed here, its own configuration has not been checked"]
        raise ConfigError(
            'engine.kind is verl, which is not installed: pip install "graphpo-agent[verl]" on '
            'machines with GPUs, else "graphpo-agent[verl-cpu]"'
        )
    if training:
        build_tasks(config)
    validate(_composed(config, Path(config.output)))
    engine = verl_engine(config)
    gpus = engine.nodes * engine.gpus_per_node
    return [
        f"verl: {engine.nodes} × {engine.gpus_per_node} GPUs, FSDP2 over all of them, "
        f"{gpus // engine.tensor_parallel} vLLM servers, {engine.grower_processes} processes that "
        "grow graphs; verl's configuration composes"
    ]


def _composed(config: RunConfig, run: Path, resume: bool = False) -> Any:
    text = dump_config(config)
    settings = verl_settings(config, run.resolve(), _device(config), WORKER, text, resume)
    return compose(settings, verl_engine(config).overrides)


def check_fresh(path: Path) -> None:
    """Raise RunError where a run through verl has left a checkpoint."""
    if any((path / "checkpoints").glob("global_step_*")):
        raise RunError(
            f"{path} already holds a run: continue it with --resume {path}, or set output=…"
        )


def _device(config: RunConfig) -> str:
    return "cpu" if device_of(config.model) == "cpu" else "cuda"


def train_through_verl(
    config: RunConfig, run: RunDirectory, console: RunConsole, resume: bool
) -> None:
    """Train until the last step.

    Args:
        config: checked.
        run: exists; its logs end where the run goes on.
        console: where progress is shown.
        resume: go on from verl's newest checkpoint.

    Raises:
        ConfigError: verl is not installed or refuses its settings.
        RunError: a process of the run ended, or nothing happened for too long.
    """
    engine, device = verl_engine(config), _device(config)
    gpus = engine.gpus_per_node if device == "cpu" else None
    watch = _Watch(run.metrics_path, console, engine.patience_minutes * 60)
    try:
        launch(
            _composed(config, run.path, resume),
            environment(device, engine.kv_cache_gib),
            engine.ray_address,
            gpus,
            watch,
        )
    finally:
        watch.show()


class _Watch:
    """Shows the rows of a run's log as they come, and ends a run that is stuck."""

    def __init__(self, metrics: Path, console: RunConsole, patience: float) -> None:
        self._metrics, self._console, self._patience = metrics, console, patience
        self._shown = metrics.stat().st_size
        self._changed = time.monotonic()

    def __call__(self) -> None:
        """Show what is new.

        Raises:
            RunError: nothing was for too long.
        """
        if self.show():
            self._changed = time.monotonic()
        elif time.monotonic() - self._changed > self._patience:
            raise RunError(
                f"no step ended for {self._patience / 60:g} minutes (engine.patience_minutes): a "
                "process of verl hangs or has died"
            )

    def show(self) -> bool:
        """Show the complete rows that are new; whether there were any."""
        with self._metrics.open("rb") as file:
            file.seek(self._shown)
            rows = file.read().rpartition(b"\n")[0]
        if not rows:
            return False
        self._shown += len(rows) + 1
        for line in rows.splitlines():
            self._console.step(json.loads(line))
        return True


def rewind_logs(run: RunDirectory) -> int:
    """Cut a run's logs back to verl's newest checkpoint.

    Returns:
        Its step.

    Raises:
        RunError: there is none.
    """
    newest = run.checkpoints_path / "latest_checkpointed_iteration.txt"
    if not newest.is_file():
        raise RunError(
            f"{run.path} ended before its first checkpoint: start it again without --resume"
        )
    step = int(newest.read_text())
    kept = [
        line
        for line in run.metrics_path.read_text().splitlines()
        if json.loads(line)["step"] <= step
    ]
    write_atomically(run.metrics_path, _lines(kept))
    graphs = [
        line
        for line in run.graphs_path.read_text().splitlines()
        if int(json.loads(line)["id"].partition("/")[0].removeprefix("step-")) <= step
    ]
    write_atomically(run.graphs_path, _lines(graphs))
    return step


def _lines(kept: list[str]) -> str:
    return "".join(f"{line}\n" for line in kept)
