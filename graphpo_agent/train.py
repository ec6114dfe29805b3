"""The whole run on one page: grow graphs, credit them, update, log, evaluate, checkpoint."""

import gc
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphpo_agent.atomic import write_atomically
from graphpo_agent.build import (
    build_budget,
    build_engine,
    build_grower,
    build_prefixes,
    build_sampling,
    build_step_scoring,
)
from graphpo_agent.build_method import build_method
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import dump_config
from graphpo_agent.data.stream import TaskStream
from graphpo_agent.engines.local.model import model_config
from graphpo_agent.engines.local.reach import told_reach
from graphpo_agent.errors import RunError, first_line
from graphpo_agent.evals.heldout import Evaluation, judged_paths, measured, sample
from graphpo_agent.graph.budget import Budget
from graphpo_agent.graph.jsonl import graph_to_json
from graphpo_agent.graph.step_id import step_id
from graphpo_agent.memory import describe_memory
from graphpo_agent.methods.method import Credit, Method, credits_of, training_sample
from graphpo_agent.methods.prefix_pool import Grown, PrefixPool
from graphpo_agent.methods.whiten import whitened
from graphpo_agent.protocols import Engine, Expander
from graphpo_agent.report.checkpoints import read_json
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.run_dir import Progress, RunDirectory, command_line
from graphpo_agent.report.watch import Watch
from graphpo_agent.rollout.counts import Counts
from graphpo_agent.rollout.grow import Grower, Rollout
from graphpo_agent.rollout.outages import outages_of
from graphpo_agent.rollout.seeds import derive_seed
from graphpo_agent.rollout.step_scores import StepScoring
from graphpo_agent.rollout.tally import credit_tally, rollout_tally
from graphpo_agent.run_tasks import usable_tasks
from graphpo_agent.types import Prefix, SamplingParams, Task

__all__ = ["Setup", "prepare", "train"]

PREFIXES = "prefixes.json"
"""What PROS's pool knows, beside the weights of a checkpoint."""
PREFIX_TOKENS = "prefixes.int32"
"""The tokens of its prefixes in a row, little-endian."""
GREEDY = SamplingParams(temperature=0.0)

Signal = list[tuple[Rollout, Credit]]
"""Graphs that have an advantage somewhere, beside their credit."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a run is made of, loaded and checked before anything is written."""

    engine: Engine
    grower: Grower
    method: Method
    budget: Budget
    step_scoring: StepScoring | None
    prefixes: PrefixPool | None
    sampling: SamplingParams
    tasks: Sequence[Task]
    heldout: Sequence[Task]

    def save(self, directory: Path) -> None:
        """Write all that learns into a new directory."""
        self.engine.save_checkpoint(directory)
        if self.prefixes is not None:
            record, token_ids = self.prefixes.state()
            write_atomically(directory / PREFIXES, json.dumps(record))
            write_atomically(directory / PREFIX_TOKENS, [token_ids.astype("<i4", copy=False).data])

    def load(self, checkpoint: Path) -> None:
        """Continue from what ``save`` wrote.

        Raises:
            ModelError: the weights are damaged or of another model.
            RunError: the prefixes are, or the run had none.
        """
        if self.prefixes is not None and not (checkpoint / PREFIXES).exists():
            raise RunError(f"{checkpoint} has no {PREFIXES}: its run was not one of method pros")
        self.engine.load_checkpoint(checkpoint)
        if self.prefixes is not None:
            _restore(self.prefixes, checkpoint)


def _restore(prefixes: PrefixPool, checkpoint: Path) -> None:
    record, path = read_json(checkpoint / PREFIXES), checkpoint / PREFIX_TOKENS
    try:
        prefixes.restore(record, np.frombuffer(path.read_bytes(), "<i4"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({first_line(error)}); delete that checkpoint") from None


def prepare(config: RunConfig, tell: Callable[[list[str]], object] = lambda lines: None) -> Setup:
    """Load data, tools and model of a run; leave training tasks out whose prompts do not fit.

    Args:
        config: the run.
        tell: given what a reader should know before the weights are loaded: the memory that
            training needs, where contexts end, which tasks are left out.

    Raises:
        ConfigError: a step needs more tasks than there are.
        DataError: the prompt of a held-out task does not fit into the policy's context.
        ModelError: there is no model, or none that can be trained.
    """
    method, grower = build_method(config.method), build_grower(config)
    tasks = usable_tasks(config, grower.expander)
    reach = told_reach(model_config(config.model.path), tasks.max_context_tokens)
    tell([*describe_memory(config, tasks.prompt_tokens), *reach, *tasks.told])
    engine = build_engine(config)
    return Setup(
        tasks=tasks.train,
        heldout=tasks.heldout,
        grower=grower,
        method=method,
        budget=build_budget(config.budget),
        step_scoring=build_step_scoring(config.method, engine.policy.tokenizer),
        prefixes=build_prefixes(method),
        sampling=build_sampling(config.sampling),
        engine=engine,
    )


def train(
    config: RunConfig, setup: Setup, run: RunDirectory, console: RunConsole, resume: bool
) -> Evaluation | None:
    """Train until the step or token limit.

    Args:
        config: the run.
        setup: from ``prepare``.
        run: where everything is written.
        console: where progress is shown.
        resume: continue from the newest checkpoint, bit for bit.

    Returns:
        The held-out accuracy of the policy as it left; None where nothing was evaluated.
    """
    # Rollouts make many objects and no cycles: looking for garbage in them takes time.
    gc.freeze()
    gc.set_threshold(100_000)
    progress = Progress()
    if resume:
        checkpoint = run.latest_checkpoint()
        setup.load(checkpoint)
        progress = run.rewind(checkpoint)
        console.goes_on(run.path)
    started = time.monotonic() - progress.seconds
    stream = TaskStream(setup.tasks, config.seed, progress.tasks_drawn)
    after = None
    if setup.heldout and not resume:
        after, metrics = _evaluate(config, setup, console, greedy=True)
        row = {"step": 0, "progress": 0.0} | metrics
        run.log_metrics(row)
        console.step(row)

    over, resuming = _fraction(config, progress) >= 1.0, resume
    if over:
        console.note(f"complete after step {progress.step}; more train.steps or tokens go on")
    while not over:
        watch = Watch(console, f"step {progress.step + 1}")
        progress, row, signal = _step(config, setup, stream, progress, started, watch)
        over = _fraction(config, progress) >= 1.0
        if setup.heldout and (over or progress.step % config.train.eval_every == 0):
            after, metrics = _evaluate(config, setup, console, greedy=over)
            row |= metrics
            row["time/eval"] = time.monotonic() - started - progress.seconds  # since the update
            progress = replace(progress, accuracy=metrics.get("eval/accuracy"))
        progress = replace(progress, seconds=time.monotonic() - started)
        row["time/seconds"] = progress.seconds
        run.log_metrics(row)
        if resuming:  # settings that do not get through a step are not kept
            run.record_resume(dump_config(config), command_line())
            resuming = False
        if signal:
            run.log_graph(_largest(signal, progress.step))
        if over or progress.step % config.train.checkpoint_every == 0:
            run.save_checkpoint(progress, config.train.keep_checkpoints, setup.save)
        console.step(row)
    return after


def _step(
    config: RunConfig,
    setup: Setup,
    stream: TaskStream,
    progress: Progress,
    started: float,
    watch: Watch,
) -> tuple[Progress, dict[str, float], Signal]:
    """Grow graphs, credit them and update.

    Args:
        config: the run.
        setup: whose engine learns.
        stream: where the tasks come from.
        progress: before the step.
        started: when the run would have begun, had it never been interrupted.
        watch: told how far it is.

    Returns:
        The progress after the step, its metrics, and the graphs with signal beside their credit.
    """
    policy, step = setup.engine.policy, progress.step + 1
    began = time.monotonic()
    policy.take_prefilled_tokens()  # those of an evaluation
    counts = Counts(setup.grower, setup.step_scoring)
    rollouts, credits, signal = _collect(config, setup, stream, step, watch)
    outages_of(rollouts, policy.tokenizer.decode).check(config.outage_limit)
    grown = time.monotonic()
    samples = [training_sample(rollout.graph, credit) for rollout, credit in signal]
    updated = setup.engine.update(samples, step, watch.learned) if samples else {}
    ended = time.monotonic()

    generated = sum(rollout.ledger.generated_tokens for rollout in rollouts)
    total = progress.generated_tokens + generated
    progress = Progress(step, stream.position, total, ended - started)
    tally = rollout_tally(rollouts) + credit_tally(credits)
    row = {"step": step, "progress": _fraction(config, progress)} | tally.metrics | updated
    row["tokens/prefill_computed"] = policy.take_prefilled_tokens()
    row |= counts.take()
    row["tokens/total"] = total
    row["tokens/per_second"] = generated / (ended - began)
    row |= {"time/rollout": grown - began, "time/update": ended - grown}
    return progress, row, signal


def _collect(
    config: RunConfig,
    setup: Setup,
    stream: TaskStream,
    step: int,
    watch: Watch,
) -> tuple[list[Rollout], list[Credit], Signal]:
    """Grow until enough graphs have an advantage somewhere, or ``max_resample`` rounds are over.

    Returns:
        Everything that was grown, its credits before any whitening, and the graphs with signal
        beside their credit.
    """
    wanted = config.train.prompts_per_step
    grown: list[Rollout] = []
    credited: list[Credit] = []
    signal: Signal = []
    starts: dict[str, Prefix] = {}
    for _ in range(config.train.max_resample + 1):
        seen = frozenset(rollout.task.id for rollout in grown)
        missing = min(wanted - len(signal), len(setup.tasks) - len(seen))
        if not missing:
            break
        tasks = stream.draw(missing, seen)
        watch.growing(len(tasks))
        begun: dict[str, Prefix] = {}
        if setup.prefixes is not None:
            rng = np.random.default_rng(derive_seed(config.seed, step, len(grown), "prefixes"))
            begun = setup.prefixes.choose(tasks, rng)
        rollouts = setup.grower.grow(
            setup.engine.policy,
            tasks,
            setup.method,
            setup.sampling,
            (config.seed, step),
            setup.budget,
            watch.finished,
            begun,
            setup.step_scoring,
            watch.drawn,
        )
        starts |= begun
        credits = credits_of(
            setup.method,
            [rollout.graph for rollout in rollouts],
            [rollout.classes for rollout in rollouts],
        )
        grown += rollouts
        credited += credits
        signal += [pair for pair in zip(rollouts, credits, strict=True) if pair[1].has_signal]
    graphs = [rollout.graph for rollout, _ in signal]
    credits = [credit for _, credit in signal]
    if setup.prefixes is not None:
        setup.prefixes.update([_grown(rollout, starts, setup.grower.expander) for rollout in grown])
    if setup.method.whiten == "batch":
        credits = whitened(graphs, credits)
    return grown, credited, list(zip((rollout for rollout, _ in signal), credits, strict=True))


def _grown(rollout: Rollout, starts: Mapping[str, Prefix], expander: Expander) -> Grown:
    """What the pool learns from a rollout."""
    states = rollout.states
    start = starts[rollout.task.id]
    return Grown(rollout.task, start, rollout.graph, lambda v: expander.recall(states[v]))


def _largest(signal: Signal, step: int) -> str:
    """The graph that a step shows, of those with signal, in one line."""
    rollout, credit = max(signal, key=lambda pair: pair[0].graph.num_nodes)
    named = replace(rollout.graph, id=step_id(step, rollout.task.id))
    return graph_to_json(named, credit.classes)


def _fraction(config: RunConfig, progress: Progress) -> float:
    """Share of the run that is done, by steps or by tokens, whichever ends it first."""
    by_steps = progress.step / config.train.steps if config.train.steps else 0.0
    budget = config.train.token_budget
    by_tokens = progress.generated_tokens / budget if budget else 0.0
    return max(by_steps, by_tokens)


def _evaluate(
    config: RunConfig, setup: Setup, console: RunConsole, *, greedy: bool
) -> tuple[Evaluation, dict[str, float]]:
    """How the policy does on the held-out tasks, sampling as in training, and its metrics.

    Without an accuracy where outages met too many calls or trajectories; ``greedy`` adds that of
    greedy decoding.
    """
    watch = Watch(console, "held-out")

    def held_out(how: SamplingParams, samples: int) -> tuple[Evaluation, int]:
        watch.growing(len(setup.heldout))
        rollouts = sample(
            setup.grower,
            setup.engine.policy,
            setup.heldout,
            samples,
            how,
            config.seed,
            watch.finished,
            watch.drawn,
        )
        met = outages_of(rollouts, setup.engine.policy.tokenizer.decode)
        found = measured(judged_paths(rollouts)).trusted(met, config.outage_limit)
        return found, met.failed_calls

    sampled, failed_calls = held_out(setup.sampling, config.train.eval_samples)
    row = {
        "eval/accuracy": sampled.accuracy,
        "eval/standard_error": sampled.standard_error,
        "eval/response_tokens": sampled.response_tokens,
        "eval/turns": sampled.turns,
        "eval/outages": sampled.num_dropped,
        "eval/failed_calls": failed_calls,
    }
    if greedy:
        best, failed_calls = held_out(GREEDY, 1)
        row["eval/greedy_accuracy"] = best.accuracy
        row["eval/outages"] += best.num_dropped
        row["eval/failed_calls"] += failed_calls
    return sampled, {name: value for name, value in row.items() if math.isfinite(value)}
