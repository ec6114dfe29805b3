"""One training run from its configuration to its report: what ``train`` and ``compare`` share."""

from dataclasses import dataclass
from pathlib import Path

import torch

from graphpo_agent.build import check_named, check_precision
from graphpo_agent.build_method import build_method
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import dump_config
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.graph.equivalence import find_classes
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.memory import describe_budget, describe_memory
from graphpo_agent.methods.method import Credit
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.html import write_report
from graphpo_agent.report.run_dir import RunDirectory, command_line, locked
from graphpo_agent.train import TrainResult, prepare, train

__all__ = ["FinishedRun", "check_run", "set_threads", "train_run", "write_run_report"]


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What a run left behind.

    Attributes:
        result: held-out accuracy before and after.
        page: the report.
        model: the model with its adapters merged; None for a run without adapters, whose model is
            its newest checkpoint.
    """

    result: TrainResult
    page: Path
    model: Path | None


def check_run(config: RunConfig) -> None:
    """Check what can be checked without loading anything.

    Raises:
        ConfigError: settings that do not go together, or a name that is not there.
    """
    build_method(config.method)
    check_precision(config.model)
    check_named(config)


def set_threads(threads: int | None) -> None:
    """How many CPU threads torch uses; None leaves its own choice."""
    if threads is not None:
        torch.set_num_threads(threads)


def train_run(config: RunConfig, resume: Path | None, console: RunConsole) -> FinishedRun:
    """Train as a checked configuration says, and write the report.

    Everything is loaded before the run directory is made: a mistake leaves no run.

    Args:
        config: the run.
        resume: a run directory that goes on from its newest checkpoint; None: a new run.
        console: where progress is shown.
    """
    set_threads(config.threads)
    memory = [*describe_memory(config), *describe_budget(config)]
    setup = prepare(config)
    path = resume or Path(config.output)
    with locked(path):
        if resume is None:
            run = RunDirectory.create(path, dump_config(config), config.seed, command_line())
        else:
            run = RunDirectory.existing(path)
            run.record_resume(dump_config(config), command_line())
        console.start(config.train.steps, [f"{config.method.name} → {path}", *memory])
        try:
            result = train(config, setup, run, console, resume is not None)
        finally:
            console.close()
    model = None
    if config.model.lora is not None:
        model = run.path / "model"
        setup.engine.save_model(model)
    return FinishedRun(result, write_run_report(run, config), model)


def write_run_report(run: RunDirectory, config: RunConfig) -> Path:
    """The page; with a checkpoint's tokenizer it also shows what the edges say."""
    checkpoints = run.checkpoints()
    decode = HfTokenizer.load(str(checkpoints[-1])).decode if checkpoints else None
    method = build_method(config.method)

    def credit_of(graph: RolloutGraph) -> Credit:
        classes = graph.given_classes
        if classes is None:
            classes = find_classes(graph, method.merging)
        return method.assign_credit([graph], [classes])[0]

    return write_report(run.path, credit_of, decode)
