"""What each verb does, in terms of the package. The command line only parses."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from graphpo_agent.build import (
    build_budget,
    build_grower,
    build_policy,
    build_sampling,
    build_sft_engine,
    build_step_scoring,
    check_named,
    set_threads,
)
from graphpo_agent.build_method import build_method
from graphpo_agent.config import RunConfig, SftConfig, VerlEngineConfig
from graphpo_agent.config_file import dump_config, load_config
from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.engines.local.model import model_config
from graphpo_agent.engines.local.reach import told_reach
from graphpo_agent.errors import ConfigError, GraphPOError, ModelError
from graphpo_agent.evals.heldout import Evaluation, Judged, by_level, measured, sample
from graphpo_agent.evals.transcripts import TranscriptFile, Transcripts, counted_in
from graphpo_agent.inputs import output_name
from graphpo_agent.memory import describe_budget, describe_memory
from graphpo_agent.outputs import check_apart, check_output
from graphpo_agent.partial_output import partial_output
from graphpo_agent.protocols import Policy
from graphpo_agent.report.checkpoints import read_progress
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.numbers import duration
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.report.task_bar import TaskBar
from graphpo_agent.rollout.counts import counts_of
from graphpo_agent.rollout.fitting import Prompts, check_fitting
from graphpo_agent.rollout.graph_file import GraphFile, outages_in
from graphpo_agent.rollout.grow import Grower, Rollout, batches
from graphpo_agent.rollout.outages import outages_of
from graphpo_agent.rollout.tally import Tally, rollout_tally
from graphpo_agent.run_tasks import load_run_tasks
from graphpo_agent.sft import check_model_output, finished_steps, warm_start, with_observations
from graphpo_agent.toy import make_toy
from graphpo_agent.train_run import (
    check_new_run,
    check_run,
    train_run,
    write_run_report,
)
from graphpo_agent.train_verl import check_verl
from graphpo_agent.types import SamplingParams, Task

__all__ = [
    "evaluate_policy",
    "report",
    "rollout",
    "sft",
    "toy",
    "train",
]

_NOT_LEARNED = ("output", "threads")
_NOT_GROWN = ("output", "threads", "outage_limit", "update", "train", "trackers")
_NOT_EVALUATED = (*_NOT_GROWN, "budget")
"""What of a configuration changes nothing in what a warm start, rollout or evaluation makes."""


def train(arguments: Sequence[str], resume: str | None, dry_run: bool) -> int:
    """``graphpo train``: a configuration and overrides, or overrides of a run to be resumed."""
    if resume is not None:
        run = RunDirectory.existing(Path(resume))
        for argument in arguments:
            if argument.startswith("output=") or "=" not in argument:
                raise ConfigError(
                    f"--resume {resume} goes on there, as its own config.yaml says: {argument} "
                    "cannot change that; give key=value for what is to be another from now on"
                )
        config = load_config(RunConfig, run.config_path, arguments)
    elif arguments:
        config = load_config(RunConfig, arguments[0], arguments[1:])
    else:
        raise ConfigError("train takes a configuration file or --resume RUN")
    check_run(config)
    if resume is None:
        check_new_run(config)
    if dry_run:
        print(dump_config(config), end="")
        _print_outlook(config)
        return 0
    done = train_run(config, None if resume is None else Path(resume), RunConsole())
    if done.model is not None:
        print(f"model, its adapters merged: {done.model}")
    after = done.after
    if after is not None:
        left_out = f", {after.num_dropped} left out for outages" if after.num_dropped else ""
        print(
            f"held-out accuracy {_percent(done.before)} → {_percent(after.accuracy)} "
            f"({after.num_trajectories} trajectories at the training temperature{left_out})"
        )
    if done.best is not None:
        print(f"best held-out accuracy {read_progress(done.best)['accuracy']:.1%}: {done.best}")
    print(f"report: {done.page}")
    return 0


def _percent(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{share:.1%}"


def _print_outlook(config: RunConfig) -> None:
    """Memory, budget and tasks, as comments: what is printed stays a configuration."""
    try:
        through_verl = isinstance(config.engine, VerlEngineConfig)
        lines = (
            check_verl(config)
            if through_verl
            else [*describe_memory(config, 0), "memory: prompts are not read here and not counted"]
        )
    except ModelError as error:
        lines = [f"memory: not known yet: {error}"]
    lines += [*describe_budget(config), _describe_tasks(config)]
    print("\n".join(f"# {line}" for line in lines))


def _describe_tasks(config: RunConfig) -> str:
    try:
        tasks, heldout = load_run_tasks(config)
    except GraphPOError as error:
        return f"tasks: not known yet: {error}"
    trained = {task.id for task in tasks}
    both = sum(task.id in trained for task in heldout)
    warning = f"; {both:,} of these are training tasks" if both else ""
    return f"tasks: {len(tasks):,} to train with, {len(heldout):,} held out{warning}"


def sft(config_path: str, overrides: Sequence[str]) -> int:
    """``graphpo sft``: write a model that imitates demonstrations.

    Steps are kept while it runs, and the same command goes on with them.
    """
    config = load_config(SftConfig, config_path, overrides)
    check_model_output(Path(config.output))
    check_apart([Path(config.output)], [Path(config.model.path)])
    set_threads(config.threads)
    demonstrations = load_demonstrations(Path(config.demonstrations))
    if config.observations:
        demonstrations = [with_observations(each) for each in demonstrations]
    engine = build_sft_engine(config)
    engine.check_demonstrations(demonstrations)

    files = {"demonstrations": [Path(config.demonstrations)]}
    name = output_name("sft", config, _NOT_LEARNED, files)
    with finished_steps(engine, Path(config.output), name) as steps:
        if steps.count:
            print(f"{steps.count} of {config.steps} steps were finished before: {steps.path}")

        def finished(step: int, metrics: dict[str, float]) -> None:
            if step == 1 or step % 50 == 0 or step == config.steps:
                shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                print(f"step {step}/{config.steps}  {shown}", flush=True)
            if step < config.steps:
                steps.add(step)
                if step == steps.count + 1:
                    every = f"every {duration(math.ceil(steps.interval))} in {steps.path}"
                    print(f"steps are kept {every}; a kill costs those since", flush=True)

        size, seed = config.batch_size, config.seed
        warm_start(engine, demonstrations, config.steps, size, seed, finished, steps.count)
        engine.save_model(Path(config.output))
    print(f"warm-started policy: {config.output}")
    return 0


def rollout(
    config_path: str, overrides: Sequence[str], tasks_path: str | None, count: int, out: str
) -> int:
    """``graphpo rollout``: grow graphs without training and write them.

    Every graph is written as soon as it is finished, and the same command goes on with them.
    """
    check_output(Path(out))
    config = load_config(RunConfig, config_path, overrides)
    check_named(config)
    set_threads(config.threads)
    paths = [tasks_path] if tasks_path else config.tasks.train
    check_apart([Path(out)], _inputs(config, [config_path, *overrides], paths))
    tasks = load_tasks(*map(Path, paths))[:count]
    grower, method, policy = build_grower(config), build_method(config.method), build_policy(config)
    _check_reach(config, grower, policy, tasks)
    sampling = build_sampling(config.sampling)
    scoring = build_step_scoring(config.method, policy.tokenizer)
    files = {"tasks": [Path(each) for each in paths]}
    named = output_name("rollout", config, _NOT_GROWN, files, count=count)
    seed, budget = (config.seed, "rollout"), build_budget(config.budget)
    tally = Tally()
    with partial_output(Path(out), named, outages_in) as partial:
        graphs = GraphFile(partial, tasks)
        missing = graphs.missing
        with _bar(len(tasks), len(missing), "graph", out) as bar:

            def finished(rollout: Rollout) -> None:
                graphs.add(rollout, policy.tokenizer)
                bar.update()

            for now in batches(missing):  # no more is held at once
                tally += rollout_tally(
                    grower.grow(
                        policy,
                        now,
                        method,
                        sampling,
                        seed,
                        budget,
                        finished,
                        scoring=scoring,
                        drawn=bar.drawn,
                    )
                )
        graphs.outages.check(config.outage_limit)
        graphs.complete()
    if 0 < len(missing) < len(tasks):
        print(f"of the {len(missing)} graphs that were grown now:")
    for name, value in tally.metrics.items():
        print(f"{name:28} {value:.4g}")
    for name, number in counts_of(grower, scoring).items():
        print(f"{name:28} {number}")
    print(f"graphs: {len(tasks)} in {out}")
    return 0


def _check_reach(config: RunConfig, grower: Grower, policy: Policy, tasks: Sequence[Task]) -> None:
    """Print where contexts end, if that is not where the model says; all prompts must fit."""
    for line in told_reach(model_config(config.model.path), policy.max_context_tokens):
        print(line)
    prompts = Prompts(policy.tokenizer, policy.max_context_tokens)
    check_fitting(grower.expander, prompts, tasks)


def _bar(total: int, missing: int, unit: str, out: str | None) -> TaskBar:
    """The progress over all tasks, some of which an interrupted command may have finished."""
    if missing < total:
        print(f"{total - missing} of {total} tasks were finished before: {out}.partial")
    return TaskBar(total=total, initial=total - missing, unit=unit)


def _inputs(config: RunConfig, arguments: Sequence[str], tasks: Sequence[str]) -> list[Path]:
    """Files that no output may replace: of a configuration, its tasks, and those read instead."""
    files = [argument for argument in arguments if "=" not in argument]
    heldout = [] if config.tasks.heldout is None else [config.tasks.heldout]
    return [Path(path) for path in (*files, *config.tasks.train, *heldout, *tasks)]


def evaluate_policy(
    config_path: str,
    overrides: Sequence[str],
    tasks_path: str | None,
    samples: int,
    greedy: bool,
    out: str | None,
) -> int:
    """``graphpo eval``: accuracy of one policy on the held-out tasks.

    With ``out`` every task's transcripts are written as soon as they are there, and the same
    command goes on with them.
    """
    if out is not None:
        check_output(Path(out))
    config = load_config(RunConfig, config_path, overrides)
    set_threads(config.threads)
    path = tasks_path or config.tasks.heldout
    if path is None:
        raise ConfigError("there are no held-out tasks: set tasks.heldout or give --tasks FILE")
    if out is not None:
        check_apart([Path(out)], _inputs(config, [config_path, *overrides], [path]))
    tasks = load_tasks(Path(path))
    grower, policy = build_grower(config), build_policy(config)
    _check_reach(config, grower, policy, tasks)
    sampling = SamplingParams(temperature=0.0) if greedy else build_sampling(config.sampling)
    with ExitStack() as stack:
        transcripts = Transcripts(tasks)
        if out is not None:
            flags = {"samples": samples, "greedy": greedy}
            name = output_name("eval", config, _NOT_EVALUATED, {"tasks": [Path(path)]}, **flags)
            partial = stack.enter_context(partial_output(Path(out), name, counted_in))
            transcripts = TranscriptFile(partial, tasks)
        missing, met = transcripts.missing, transcripts.outages
        with _bar(len(tasks), len(missing), "task", out) as bar:

            def finished(rollout: Rollout) -> None:
                transcripts.add(rollout, grower.expander)
                bar.update()

            for now in batches(missing):  # no more is held at once
                met += outages_of(
                    sample(
                        grower, policy, now, samples, sampling, config.seed, finished, bar.drawn
                    ),
                    policy.tokenizer.decode,
                )
        met.check(config.outage_limit)
        transcripts.complete()
    _print_evaluation(transcripts.trajectories, samples)
    for name, count in grower.counts.items():
        print(f"{name} {count}")
    return 0


def _print_evaluation(found: Sequence[Judged], samples: int) -> None:
    evaluation = measured(found)
    print(
        f"accuracy {evaluation.accuracy:.1%}{_spread(evaluation)} "
        f"(95 % over {evaluation.num_tasks} tasks, {evaluation.num_trajectories} trajectories)"
    )
    if samples > 1:
        print(f"best of {samples} {_percent(evaluation.best)}")
    for level, of_level in by_level(found).items():
        print(f"level {level}: {_percent(of_level.accuracy)} over {of_level.num_tasks} tasks")
    if evaluation.num_dropped:
        print(f"left out: {evaluation.num_dropped} trajectories that outages left unscored")
    print(f"response tokens {evaluation.response_tokens:.1f}, turns {evaluation.turns:.1f}")


def _spread(evaluation: Evaluation) -> str:
    """How far the accuracy may be off; the exact bound where all tasks are wrong or all right.

    Unknown where all tasks are otherwise alike.
    """
    most = 1 - 0.05 ** (1 / max(1, evaluation.num_tasks))
    if evaluation.accuracy == 0:
        return f", at most {most:.1%}"
    if evaluation.accuracy == 1:
        return f", at least {1 - most:.1%}"
    return f" ± {_percent(1.96 * (evaluation.standard_error or math.nan))}"


def report(run_directory: str) -> int:
    """``graphpo report``: write the page of a run again."""
    run = RunDirectory.existing(Path(run_directory))
    config = load_config(RunConfig, run.config_path)
    print(f"report: {write_run_report(run, config)}")
    return 0


def toy(world: str, output: str, knobs: Sequence[str]) -> int:
    """``graphpo data toy``."""
    parameters = make_toy(world, Path(output), knobs)
    if parameters is None:
        print(f"this {world} world is there already, delete {output} to make it anew")
        return 0
    print(f"{world} world and an untrained policy of {parameters:,} parameters: {output}")
    return 0
