"""The tasks of a training run, checked before any weights are loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphpo_agent.config import RunConfig, VerlEngineConfig, VllmEngineConfig
from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.engines.local.model import model_config
from graphpo_agent.engines.local.reach import longest_context
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.errors import ConfigError
from graphpo_agent.protocols import Expander
from graphpo_agent.rollout.fitting import Prompts, check_fitting, fitting_tasks
from graphpo_agent.types import Task

__all__ = ["RunTasks", "load_run_tasks", "usable_tasks"]


@dataclass(frozen=True, slots=True)
class RunTasks:
    """What a run trains with and is evaluated with.

    Attributes:
        train: training tasks whose prompts fit into the policy's context.
        heldout: tasks of the evaluations.
        left_out: places of the other training tasks among all of them.
        told: what a reader should know of these.
        prompt_tokens: of a training prompt, on average.
        max_context_tokens: what a context of the run's policy holds.
    """

    train: list[Task]
    heldout: list[Task]
    left_out: list[int]
    told: list[str]
    prompt_tokens: int
    max_context_tokens: int


def load_run_tasks(config: RunConfig) -> tuple[list[Task], list[Task]]:
    """All training tasks of a run, and those that are held out.

    Raises:
        ConfigError: a step needs more tasks than there are.
        DataError: a file holds none, or a row that cannot be used.
    """
    tasks = load_tasks(*map(Path, config.tasks.train))
    _check_enough(config, tasks)
    heldout = load_tasks(Path(config.tasks.heldout)) if config.tasks.heldout else []
    return tasks, heldout[: config.train.eval_tasks]


def usable_tasks(config: RunConfig, expander: Expander) -> RunTasks:
    """The tasks whose prompts the run's model can begin; needs its tokenizer and no weights.

    Raises:
        ConfigError: a step needs more tasks than there are, or contexts are to be longer than the
            model holds.
        DataError: a file holds no task or a row that cannot be used, or the prompt of a held-out
            task does not fit into the policy's context.
        ModelError: there is no model, or none that can be trained.
    """
    tasks, heldout = load_run_tasks(config)
    prompts = Prompts(HfTokenizer.load(config.model.path), _context_tokens(config))
    fitting = fitting_tasks(expander, prompts, tasks)
    told = [
        f"{len(fitting.reasons):,} training tasks are left out, as the first: {reason}"
        for reason in list(fitting.reasons.values())[:1]
    ]
    usable = [task for i, task in enumerate(tasks) if i not in fitting.reasons]
    _check_enough(config, usable, told)
    check_fitting(expander, prompts, heldout)
    return RunTasks(
        train=usable,
        heldout=heldout,
        left_out=list(fitting.reasons),
        told=told,
        prompt_tokens=fitting.prompt_tokens,
        max_context_tokens=prompts.max_context_tokens,
    )


def _context_tokens(config: RunConfig) -> int:
    """What a context of the run's policy holds."""
    engine = config.engine
    if isinstance(engine, VerlEngineConfig):
        return engine.max_context_tokens
    wanted = engine.max_context_tokens if isinstance(engine, VllmEngineConfig) else None
    return longest_context(model_config(config.model.path), wanted)


def _check_enough(config: RunConfig, tasks: Sequence[Task], told: Sequence[str] = ()) -> None:
    """Raise ConfigError where a step needs more tasks than there are; ``told``: of the others."""
    if config.train.prompts_per_step > len(tasks):
        raise ConfigError(
            f"train.prompts_per_step is {config.train.prompts_per_step}, but "
            f"{', '.join(config.tasks.train)} has {len(tasks)} tasks that can be used"
            + "".join(f"; {line}" for line in told)
        )
