"""One training run from its configuration to its report: what ``train`` and ``compare`` share."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpo_agent.build import check_named, check_precision, set_threads
from graphpo_agent.build_method import build_method
from graphpo_agent.config import RunConfig, VerlEngineConfig
from graphpo_agent.config_file import dump_config, load_config
from graphpo_agent.config_methods import SpoChainMethod
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.engines.verl.settings import check_settings
from graphpo_agent.errors import ConfigError
from graphpo_agent.evals.heldout import Evaluation
from graphpo_agent.graph.equivalence import find_classes
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.inputs import inputs_name
from graphpo_agent.memory import describe_budget
from graphpo_agent.methods.method import Credit, credits_of
from graphpo_agent.outputs import check_above
from graphpo_agent.protocols import Tracker
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.html import write_report
from graphpo_agent.report.run_dir import RunDirectory, command_line, locked
from graphpo_agent.report.run_files import flatten, read_run
from graphpo_agent.report.tracking import build_trackers, tracked
from graphpo_agent.train import prepare, train
from graphpo_agent.train_verl import (
    check_resumed,
    keep_tasks,
    prepare_verl,
    rewind_logs,
    train_through_verl,
)

__all__ = [
    "FinishedRun",
    "changed_settings",
    "check_new_run",
    "check_run",
    "run_inputs",
    "train_run",
    "write_run_report",
]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What a run left behind.

    Attributes:
        before: held-out accuracy of the policy as the run's first part found it; NaN where it is
            unknown.
        after: of the policy as it left; None where nothing was evaluated, and through verl.
        page: the report.
        model: the model with its adapters merged; None for a run without adapters, whose model is
            its newest checkpoint.
        best: the checkpoint with the highest held-out accuracy; None where none has one.
    """

    before: float
    after: Evaluation | None
    page: Path
    model: Path | None
    best: Path | None


def check_run(config: RunConfig) -> None:
    """Check what can be checked without loading anything.

    Raises:
        ConfigError: settings that do not go together, or a name that is not there.
    """
    build_method(config.method)
    check_precision(config.model)
    check_named(config)
    _check_values_fit(config)
    if isinstance(config.engine, VerlEngineConfig):
        check_settings(config)


def _check_values_fit(config: RunConfig) -> None:
    """Refuse chains that use up all paths: nothing would be left to estimate values with."""
    method, paths = config.method, config.budget.trajectories
    if isinstance(method, SpoChainMethod) and paths is not None and paths <= method.num_chains:
        raise ConfigError(
            f"budget.trajectories {paths} leaves spo_chain no rollouts beside its chains, so that "
            f"nothing would be trained: set it above method.num_chains ({method.num_chains})"
        )


def run_inputs(config: RunConfig) -> dict[str, Any]:
    """What decides a run beside its configuration: what is in its task files, and its policy."""
    heldout = [] if config.tasks.heldout is None else [config.tasks.heldout]
    files = {"tasks.train": config.tasks.train, "tasks.heldout": heldout}
    return inputs_name(
        config.model.path, {name: [Path(path) for path in paths] for name, paths in files.items()}
    )


def check_new_run(config: RunConfig) -> None:
    """Raise RunError where no run can be started, or where there is one."""
    path = Path(config.output)
    check_above(path / "config.yaml")
    if path.is_dir():
        with locked(path):
            RunDirectory(path).check_new()


def train_run(config: RunConfig, resume: Path | None, console: RunConsole) -> FinishedRun:
    """Train as a checked configuration says, and write the report.

    Everything is loaded before the run directory is made: a mistake leaves no run.

    Args:
        config: the run.
        resume: a run directory that goes on from its newest checkpoint; None: a new run.
        console: where progress is shown.

    Raises:
        ConfigError: a run is to go on with an engine that does not read its checkpoints.
    """
    set_threads(config.threads)
    if resume is not None:
        _check_goes_on(config, resume)
    trackers = build_trackers(config.trackers)
    if isinstance(config.engine, VerlEngineConfig):
        return _verl_run(config, resume, console, trackers)
    path = resume or Path(config.output)
    title, budget = f"{config.method.name} → {path}", describe_budget(config)
    setup = prepare(config, lambda lines: console.tell([title, *lines, *budget]))
    with _begun(config, path, resume is not None, console, trackers) as run:
        after = train(config, setup, run, console, resume is not None)
    model = None
    if config.model.lora is not None:
        model = run.path / "model"
        setup.engine.save_model(model)
    return _finished(run, config, after, model)


def _check_goes_on(config: RunConfig, resume: Path) -> None:
    """Raise ConfigError where these settings cannot go on from a run's checkpoints."""
    run = RunDirectory.existing(resume)
    before = load_config(RunConfig, run.config_path)
    through_verl = [isinstance(each.engine, VerlEngineConfig) for each in (before, config)]
    if through_verl[0] != through_verl[1]:
        raise ConfigError(
            f"{resume} has checkpoints of engine.kind {before.engine.kind}, which engine.kind "
            f"{config.engine.kind} does not go on from: leave engine as it was, or start another "
            "run with model.path set to the model in its newest checkpoint"
        )
    if through_verl[0]:
        check_resumed(config, before)
    _check_adapters(config, before, run)


def _check_adapters(config: RunConfig, before: RunConfig, run: RunDirectory) -> None:
    """Refuse adapters that would be scaled otherwise, or go on upon other weights.

    Checkpoints hold them alone. What a name on the hub stands for is not known here.
    """
    now, then = config.model, before.model
    if now.lora is None or then.lora is None:
        return
    if now.lora.alpha / now.lora.rank != then.lora.alpha / then.lora.rank:
        raise ConfigError(
            f"{run.path} has adapters that are scaled by {then.lora.alpha:g} / {then.lora.rank}: "
            "leave model.lora as it was"
        )
    here = all(Path(each.path).is_dir() for each in (now, then))
    if here and "weights" in run.other_inputs(run_inputs(config)):
        raise ConfigError(
            f"{run.path} has adapters of other weights than {now.path} holds now: put back those "
            "that it began with, or name them as model.path"
        )


def _verl_run(
    config: RunConfig, resume: Path | None, console: RunConsole, trackers: Sequence[Tracker]
) -> FinishedRun:
    """``train_run`` through verl; its checkpoints are verl's own."""
    tasks = prepare_verl(config)
    path = resume or Path(config.output)
    console.tell([f"{config.method.name} → {path}", *tasks.told])

    def going() -> None:  # what cannot go on changes nothing
        if resume is not None:
            run.record_resume(dump_config(config), command_line())

    with _begun(config, path, resume is not None, console, trackers) as run:
        keep_tasks(run, tasks.train, resume is not None)
        step = 0
        if resume is not None:
            step = rewind_logs(run)
            console.goes_on(run.path)
        if step < (config.train.steps or 0):
            train_through_verl(config, run, console, resume is not None, going, tasks.left_out)
        else:
            console.note(f"complete after step {step}; more train.steps go on")
    return _finished(run, config, after=None, model=None)


@contextmanager
def _begun(
    config: RunConfig,
    path: Path,
    resumes: bool,
    console: RunConsole,
    trackers: Sequence[Tracker],
) -> Iterator[RunDirectory]:
    """Hold the directory of a run that begins, or of the one that goes on, and show how it goes."""
    with locked(path):
        if resumes:
            run = RunDirectory.existing(path)
            run.check_manifest()
            console.tell([f"from here on {change}" for change in changed_settings(run, config)])
        else:
            run = RunDirectory.create(
                path, dump_config(config), config.seed, command_line(), run_inputs(config)
            )
        settings = config.model_dump(mode="json")
        with tracked(trackers, path, settings, resumes) as following:
            console.tell(following.told)
            console.follow(following.log)
            console.start(config.train.steps)
            try:
                yield run
            finally:
                console.close()


def changed_settings(run: RunDirectory, config: RunConfig) -> list[str]:
    """What differs from the configuration a run was last started with, place and trackers aside.

    Example: ``["train.steps was 24, now 48"]``.
    """
    stored = load_config(RunConfig, run.config_path)
    then, now = (
        flatten(each.model_dump(mode="json", exclude={"output", "trackers"}))
        for each in (stored, config)
    )
    sections = {key.rpartition(".")[0] for key in (*then, *now)}  # null where they are not set
    return [
        f"{key} was {then.get(key, 'not set')}, now {now.get(key, 'not set')}"
        for key in {**then, **now}
        if then.get(key) != now.get(key) and key not in sections
    ]


def _finished(
    run: RunDirectory, config: RunConfig, after: Evaluation | None, model: Path | None
) -> FinishedRun:
    steps, accuracies = read_run(run.path).metrics.defined("eval/accuracy")
    before = float(accuracies[0]) if len(steps) and steps[0] == 0 else math.nan
    page = write_run_report(run, config)
    return FinishedRun(before, after, page, model, run.best_checkpoint())


def write_run_report(run: RunDirectory, config: RunConfig) -> Path:
    """The page; with a checkpoint's tokenizer it also shows what the edges say."""
    checkpoints = run.checkpoints()
    decode = HfTokenizer.load(str(checkpoints[-1])).decode if checkpoints else None
    method = build_method(config.method)

    def credit_of(graph: RolloutGraph) -> Credit:
        classes = graph.given_classes
        if classes is None:
            classes = find_classes(graph, method.merging)
        (credit,) = credits_of(method, [graph], [classes])
        return credit

    return write_report(run.path, credit_of, decode, method.whiten == "batch")
