"""A run through verl: its checks, start, logs and end."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from graphpo_agent.atomic import replacing, write_atomically
from graphpo_agent.build import build_expander, device_of, model_in_outline
from graphpo_agent.config import RunConfig
from graphpo_agent.engines.local.model import (
    model_config,
    model_without_weights,
    quantization,
    stored_config,
)
from graphpo_agent.engines.local.reach import check_context, position_limit
from graphpo_agent.engines.verl.launch import (
    check_answers,
    compose,
    environment,
    is_installed,
    launch,
    validate,
)
from graphpo_agent.engines.verl.nodes import named_paths
from graphpo_agent.engines.verl.overrides import check_composed
from graphpo_agent.engines.verl.settings import model_fields, verl_engine, verl_settings
from graphpo_agent.engines.vllm_start import check_cpu_kernels, model_arguments
from graphpo_agent.errors import ConfigError, ModelError, RunError, first_line
from graphpo_agent.graph.step_id import split_step_id
from graphpo_agent.installed import vllm_is_for_cpus
from graphpo_agent.report.checkpoints import BestModel
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.report.tracking import Tail
from graphpo_agent.run_tasks import RunTasks, usable_tasks
from graphpo_agent.types import Task

__all__ = [
    "check_resumed",
    "check_verl",
    "keep_tasks",
    "prepare_verl",
    "rewind_logs",
    "train_through_verl",
]

WORKER = "graphpo_agent.verl_worker:make_worker"
_OF_THE_CHECKPOINT = ("learning_rate", "betas", "weight_decay")
"""Settings of the update that verl takes from the checkpoint that it goes on from."""
_GRAPH_ID = re.compile(rb'"id": ?("(?:[^"\\]|\\.)*")')
"""The first one of a line is the graph's."""
_ANOTHER_RUN = "start another run with model.path=RUN/checkpoints/global_step_N/actor/huggingface"


def check_verl(config: RunConfig) -> list[str]:
    """Check verl's side of a run as far as it goes without GPUs and data.

    Returns:
        Lines about it for a reader.

    Raises:
        ConfigError: verl refuses the settings.
    """
    if not is_installed():
        return ["verl: not installed here, its own configuration has not been checked"]
    engine, composed = verl_engine(config), _composed(config, Path(config.output))
    validate(composed)
    check_composed(composed)
    gpus = engine.nodes * engine.gpus_per_node
    return [
        f"verl: {engine.nodes} × {engine.gpus_per_node} GPUs, FSDP2 over all of them, "
        f"{gpus // engine.tensor_parallel} vLLM servers, {engine.grower_processes} processes that "
        "grow graphs; verl's configuration composes"
    ]


def check_resumed(config: RunConfig, before: RunConfig) -> None:
    """Raise ConfigError where a run would go on with settings that verl does not change any more.

    Args:
        config: with which the run is to go on.
        before: with which it went so far.
    """
    now, then = config.update, before.update
    changed = [
        f"update.{name}" for name in _OF_THE_CHECKPOINT if getattr(now, name) != getattr(then, name)
    ]
    processes = [each.nodes * each.gpus_per_node for each in map(verl_engine, (config, before))]
    if processes[0] != processes[1]:
        changed.append("engine.nodes times engine.gpus_per_node")
    now, then = config.model, before.model
    if now.lora != then.lora:
        changed.append("model.lora")
    elif now.lora is not None and now.path != then.path:  # it holds adapters alone
        changed.append("model.path")
    if changed:
        names = ", ".join(changed)
        raise ConfigError(
            f"engine.kind verl: a resumed run keeps {names}, which verl has in its checkpoint; "
            f"leave it out, or {_ANOTHER_RUN}"
        )


def prepare_verl(config: RunConfig) -> RunTasks:
    """Check all that a run needs before it starts.

    Returns:
        Its tasks.

    Raises:
        ConfigError: verl or the model refuses the settings, verl is not installed, or a step needs
            more tasks than there are.
        DataError: a task cannot be used, or the prompt of a held-out task does not fit.
        ModelError: there is no such model.
        RunError: the Ray cluster is not there.
    """
    if not is_installed():
        raise ConfigError(
            'engine.kind is verl, which is not installed: pip install "graphpo-agent[verl]" on '
            'machines with GPUs, else "graphpo-agent[verl-cpu]"'
        )
    _check_machines(config)
    _check_context(config)
    _check_positions(config)
    _check_weights(config.model.path)
    if _device(config) == "cpu":
        path = config.model.path
        check_cpu_kernels(path, model_config(path), config.model.vllm_dtype)
    if config.model.lora is not None:
        model_in_outline(config.model)  # the adapters fit
    tasks = usable_tasks(config, build_expander(config.mode))
    check_verl(config)
    return tasks


def keep_tasks(run: RunDirectory, tasks: Sequence[Task], resume: bool) -> None:
    """Note which tasks a run draws from; one that goes on must have those that it had.

    verl goes on inside its pass over them.

    Raises:
        ConfigError: it has others.
    """
    path = run.checkpoints_path / "tasks.json"
    ids = json.dumps([task.id for task in tasks])
    if not resume or not path.exists():
        write_atomically(path, ids)
    elif path.read_bytes() != ids.encode():
        raise ConfigError(
            f"engine.kind verl: a resumed run goes on inside a pass over its training tasks, and "
            f"{len(tasks):,} others fit now than those in {path}: give it the same files and "
            f"engine.max_context_tokens, or {_ANOTHER_RUN}"
        )


def _check_machines(config: RunConfig) -> None:
    """Raise ConfigError or RunError where Ray, or this machine, has not what the run needs."""
    engine, here = verl_engine(config), torch.cuda.device_count()
    if _device(config) == "cpu" and not vllm_is_for_cpus():
        raise ConfigError(
            "engine.kind is verl on a CPU, and vLLM's build for CPUs is not installed: pip install "
            '"graphpo-agent[verl-cpu]", in an environment of its own'
        )
    if engine.ray_address is not None:
        check_answers(engine.ray_address)
    elif _device(config) == "cuda" and here < engine.gpus_per_node:
        raise ConfigError(
            f"engine.gpus_per_node is {engine.gpus_per_node}, and this machine has {here} GPUs: "
            "lower it, or set model.device=cpu"
        )


def _check_context(config: RunConfig) -> None:
    """Raise ConfigError where contexts may be longer than the model is made for."""
    wanted, model = verl_engine(config).max_context_tokens, model_config(config.model.path)
    limit = getattr(model, "max_position_embeddings", None)
    rope = getattr(model, "rope_parameters", None) or {}
    if limit and rope.get("rope_type") in ("yarn", "linear", "dynamic"):  # vLLM counts these
        limit = int(limit * (rope.get("factor") or 1))
    if limit:
        check_context(wanted, limit, model)


def _check_positions(config: RunConfig) -> None:
    """Raise ConfigError where positions of a context depend on what is computed beside it."""
    engine, model = verl_engine(config), model_config(config.model.path)
    limit = position_limit(model)
    if engine.share_prefixes and limit is not None and limit < engine.max_context_tokens:
        raise ConfigError(
            f"model {config.model.path} has LongRoPE with an original context of {limit} tokens, "
            f"fewer than engine.max_context_tokens {engine.max_context_tokens}: lower that, or set "
            "engine.share_prefixes=false"
        )


def _check_weights(path: str) -> None:
    """Raise ModelError where verl cannot load and save a model's weights as they are trained."""
    quantized = quantization(path)
    if quantized is not None:
        raise ModelError(
            f"model {path}: its weights are quantized ({quantized}); through verl use the model in "
            "full precision"
        )


def _composed(
    config: RunConfig,
    run: Path,
    resume: bool = False,
    fields: Mapping[str, Any] = {},
    serving: Mapping[str, Any] = {},
    left_out: Sequence[int] = (),
    largest_weight: int = 0,
) -> Any:
    # Without the sign that OmegaConf would put a value for.
    text = json.dumps(config.model_dump(mode="json")).replace("$", r"\u0024")
    device = _device(config)
    settings = verl_settings(
        config,
        run.resolve(),
        device,
        WORKER,
        text,
        resume,
        fields,
        serving,
        left_out,
        largest_weight,
    )
    return compose(settings, verl_engine(config).overrides)


def _device(config: RunConfig) -> str:
    return "cpu" if device_of(config.model) == "cpu" else "cuda"


def _largest_weight(model: str) -> int:
    """In bytes of float32."""
    weights = model_without_weights(model, torch.float32).parameters()
    return max(weight.nbytes for weight in weights)


def train_through_verl(
    config: RunConfig,
    run: RunDirectory,
    console: RunConsole,
    resume: bool,
    going: Callable[[], None],
    left_out: Sequence[int],
) -> None:
    """Train until the last step.

    Args:
        config: checked.
        run: exists; its logs end where the run goes on.
        console: where progress is shown.
        resume: go on from verl's newest checkpoint.
        going: called once, when the first row of metrics is there.
        left_out: places of the training tasks that are not drawn.

    Raises:
        ConfigError: verl is not installed or refuses its settings.
        RunError: a process of the run ended, or nothing happened for too long.
    """
    engine, device = verl_engine(config), _device(config)
    gpus = engine.gpus_per_node if device == "cpu" else None
    model = config.model.path
    fields, serving = model_fields(stored_config(model)), model_arguments(model, device == "cpu")
    largest = _largest_weight(model) if device == "cpu" else 0
    watch = _Watch(run, console, engine.patience_minutes * 60, going)
    try:
        launch(
            _composed(config, run.path, resume, fields, serving, left_out, largest),
            environment(device, engine.kv_cache_gib, engine.share_prefixes),
            engine.ray_address,
            gpus,
            [str(run.path.resolve()), *named_paths(config.model_dump(mode="json"))],
            watch,
        )
    finally:
        watch.show()


class _Watch:
    """Shows the rows of a run's log as they come, keeps its best model, and ends it if stuck."""

    def __init__(
        self, run: RunDirectory, console: RunConsole, patience: float, going: Callable[[], None]
    ) -> None:
        self._checkpoints, self._best = run.checkpoints_path, BestModel(run.best_path)
        self._console, self._patience = console, patience
        self._going: Callable[[], None] | None = going
        self._rows = Tail(run.metrics_path, run.metrics_path.stat().st_size)
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
        rows = self._rows.rows()
        if not rows:
            return False
        if self._going is not None:
            self._going()
            self._going = None
        for row in rows:
            self._console.step(row)
            step, accuracy = int(row["step"]), row.get("eval/accuracy")
            model = self._checkpoints / f"global_step_{step}/actor/huggingface"
            if accuracy is not None and model.is_dir():
                self._best.offer(step, accuracy, model)
        return True


def rewind_logs(run: RunDirectory) -> int:
    """Cut a run's logs back to the checkpoint that it goes on from, and tell verl which that is.

    It is the newest one whose step is in the log: verl writes the log last. A run that keeps one
    checkpoint may have none such and goes on from that.

    Returns:
        Its step.

    Raises:
        RunError: there is none, or a log holds something else.
    """
    newest = run.verl_newest_path
    if not newest.is_file():
        raise RunError(
            f"{run.path} ended before its first checkpoint: start it again without --resume"
        )
    rows = _logged(run.metrics_path)
    logged = [step for _, step in rows]
    there = _checkpoint_steps(run.checkpoints_path)
    if text := newest.read_text().strip():
        there = [step for step in there if step <= int(text)]
    else:  # torn: complete is what is in the log
        there = [step for step in there if step in logged]
    step = max([step for step in there if step in logged] or there, default=None)
    if step is None:
        raise RunError(
            f"{run.checkpoints_path} holds no complete checkpoint any more; set another output=…"
        )
    _cut_graphs(run.graphs_path, step)
    write_atomically(newest, str(step))
    write_atomically(run.metrics_path, "".join(line for line, of in rows if of <= step))
    return step


def _checkpoint_steps(checkpoints: Path) -> list[int]:
    """The steps of those that verl has begun to write."""
    found = (path.parent.name for path in checkpoints.glob("global_step_*/actor"))
    return [int(step) for name in found if (step := name.removeprefix("global_step_")).isdecimal()]


def _logged(path: Path) -> list[tuple[str, int]]:
    """The rows of metrics, each with its step; a last one that was cut off is left out."""
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        return [(line, json.loads(line)["step"]) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path}: not a log of a run: {first_line(error)}") from error


def _cut_graphs(path: Path, step: int) -> None:
    """Leave out the graphs of later steps; lines are long, and only their beginnings are read."""
    with replacing(path) as partial, path.open("rb") as before, partial.open("wb") as after:
        for line in before:
            if not line.endswith(b"\n"):
                break
            named = _GRAPH_ID.search(line)
            found = split_step_id(json.loads(named[1])) if named else None
            if found is None:
                raise RunError(f"{path}: not a log of a run: a line is of no step's graph")
            if found[0] <= step:
                after.write(line)
