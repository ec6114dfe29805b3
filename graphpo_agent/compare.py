"""``graphpo compare``: several methods side by side on one configuration, with several seeds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.status import Status

from graphpo_agent.compare_run import Told, train_apart
from graphpo_agent.config import RunConfig, VerlEngineConfig
from graphpo_agent.config_file import load_config, read_yaml
from graphpo_agent.errors import ConfigError, GraphPOError, RunError
from graphpo_agent.memory import describe_budget, describe_memory
from graphpo_agent.outputs import check_above
from graphpo_agent.plain_text import plain_text
from graphpo_agent.report.checkpoints import step_of
from graphpo_agent.report.compare_page import comparison_tables, write_comparison
from graphpo_agent.report.compare_stats import read_comparison, read_outcome, run_path
from graphpo_agent.report.console import TimeLeft
from graphpo_agent.report.numbers import compact, duration, percent
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.report.run_files import read_run
from graphpo_agent.run_tasks import load_run_tasks
from graphpo_agent.train_run import changed_settings, check_run, run_inputs

__all__ = ["MethodFile", "compare_command", "find_methods", "time_left"]

_DEFAULT_PRESETS = {"graphpo": "paper"}
_DEFAULT_PRESET = "graphpo_adapted"
_OURS = {"seed": "--seeds", "output": "--out"}
"""Keys of a configuration that the comparison sets itself, and what they are set with."""


@dataclass(frozen=True, slots=True)
class MethodFile:
    """One method of a comparison.

    Example: ``MethodFile("grpo/as_released", Path("configs/methods/grpo/as_released.yaml"))``.
    """

    label: str
    path: Path


@dataclass(frozen=True, slots=True)
class _Run:
    label: str
    config: RunConfig
    directory: RunDirectory
    inputs: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.label}, seed {self.config.seed}"


def compare_command(
    config_path: str,
    overrides: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    out: str,
    jobs: int,
) -> int:
    """``graphpo compare``.

    Every configuration is checked before the first run starts. Runs that are complete are kept, one
    that was interrupted goes on from its newest checkpoint.

    Args:
        config_path: the configuration that all methods share.
        overrides: applied after each method's file.
        methods: see ``find_methods``.
        seeds: of the runs, different ones.
        out: a directory; receives ``runs/<label>/seed-<k>``, ``compare.md``, ``.json``, ``.svg``.
        jobs: runs at once.

    Raises:
        ConfigError: a configuration that cannot be used.
        RunError: a directory holds another run, or a run stopped.
    """
    if not out or (Path(out).exists() and not Path(out).is_dir()):
        raise RunError(f"--out {out!r} is not a directory")
    check_above(Path(out) / "runs")
    read_yaml(Path(config_path))  # that it is there comes before what is beside it
    files = find_methods(config_path, methods)
    runs = list(_plan(config_path, overrides, files, seeds, Path(out)))
    budgets = [run.config.budget for run in runs]
    if any(budget.tokens is None and budget.trajectories is None for budget in budgets):
        print("no budget.tokens: a prompt costs each method what its own structure needs")
    if not any(run.directory.checkpoints() for run in runs):
        for line in _outlook(runs):
            print(line)
    complete = {run.name for run in runs if _is_complete(run)}
    _train(runs, complete, jobs)
    limits = [run.config.train.token_budget for run in runs]
    limit = min((each for each in limits if each is not None), default=None)
    labels = [method.label for method in files]
    comparison = read_comparison(Path(out), labels, seeds, limit)
    write_comparison(Path(out), Path(config_path).stem, comparison)
    print("\n".join(["", *comparison_tables(comparison), "", f"comparison: {out}/compare.md"]))
    return 0


def find_methods(config_path: str, arguments: Sequence[str]) -> list[MethodFile]:
    """The file and the label of each method.

    Args:
        config_path: names are looked up in the nearest ``configs/methods`` at or above its
            directory, else in that of the working directory.
        arguments: each a YAML file, a name or ``NAME/PRESET``; the preset that a name means alone
            is ``paper`` for graphpo, else ``graphpo_adapted``.

    Raises:
        ConfigError: a name without such a preset, or a label twice.
    """
    found: dict[str, MethodFile] = {}
    for argument in arguments:
        is_file = argument.endswith((".yaml", ".yml"))
        method = _of_file(Path(argument)) if is_file else _of_name(config_path, argument)
        other = found.get(method.label)
        if other is not None and other.path.resolve() == method.path.resolve():
            raise ConfigError(f"--methods: {argument} is there twice; name every method once")
        if other is not None:
            raise ConfigError(
                f"--methods: {other.path} and {method.path} are both called "
                f"{method.label!r}; copy one to a file of another name"
            )
        found[method.label] = method
    return list(found.values())


def time_left(seconds: Mapping[str, Sequence[float]], waiting: Sequence[str]) -> float:
    """Seconds until all waiting runs are done; NaN while no run is.

    A run takes as long as those of its method did on average, or as all did.

    >>> time_left({"grpo": [10.0, 14.0], "tree": []}, ["grpo", "tree"])
    24.0

    Args:
        seconds: of the runs that are done, by label.
        waiting: labels of the others.
    """
    every = [value for values in seconds.values() for value in values]
    if not every:
        return math.nan
    return float(sum(mean(seconds[label] or every) for label in waiting))


def _of_file(path: Path) -> MethodFile:
    """A file in ``configs/methods`` has its preset's label, any other one its own name."""
    place = path.resolve().parent
    is_preset = place.parts[-3:-1] == ("configs", "methods")
    return MethodFile(_label(place.name, path.stem) if is_preset else path.stem, path)


def _of_name(config_path: str, argument: str) -> MethodFile:
    name, slash, preset = argument.partition("/")
    if not slash:
        preset = _DEFAULT_PRESETS.get(name, _DEFAULT_PRESET)
    above = Path(config_path).resolve().parents
    places = [place / "configs/methods" for place in (*above, Path.cwd())]
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        raise ConfigError(
            f"--methods {argument}: there is no configs/methods above {config_path}; name a file"
        )
    known = sorted(path.parent.name + "/" + path.stem for path in place.glob("*/*.yaml"))
    if f"{name}/{preset}" not in known:
        near = [each for each in known if each.startswith(f"{name}/")]
        raise ConfigError(
            f"--methods {argument}: {place} has no {name}/{preset}; it has "
            f"{', '.join(near or known) or 'nothing'}"
        )
    return MethodFile(_label(name, preset), place / name / f"{preset}.yaml")


def _label(name: str, preset: str) -> str:
    return name if preset == _DEFAULT_PRESETS.get(name, _DEFAULT_PRESET) else f"{name}/{preset}"


def _plan(
    config_path: str,
    overrides: Sequence[str],
    methods: Sequence[MethodFile],
    seeds: Sequence[int],
    out: Path,
) -> Iterator[_Run]:
    """All runs, checked, seed by seed: what is done can be compared at any time."""
    for override in overrides:
        key = override.partition("=")[0]
        if key in _OURS:
            raise ConfigError(f"override {override!r}: here {key} is what {_OURS[key]} says")
    configs: dict[str, tuple[RunConfig, dict[str, Any]]] = {}
    for method in methods:
        try:
            config = load_config(RunConfig, config_path, [str(method.path), *overrides])
            _check_comparable(config)
            check_run(config)
            load_run_tasks(config)
            describe_memory(config, 0)  # that its model and device are there
        except GraphPOError as error:
            raise ConfigError(f"{method.label}: {error}") from None
        configs[method.label] = config, run_inputs(config)
    for seed in seeds:
        for label, (config, inputs) in configs.items():
            path = run_path(out, label, seed)
            if plain_text(str(path)) != str(path):
                raise RunError(f"{str(path)!r} is no UTF-8 text, as config.yaml is: name another")
            settings = {"seed": seed, "output": str(path)}
            run = _Run(label, config.model_copy(update=settings), RunDirectory(path), inputs)
            _check_unchanged(run)
            yield run


def _outlook(runs: Sequence[_Run]) -> list[str]:
    """What a reader of the comparison should know of its methods, told when it begins."""
    configs = {run.label: run.config for run in runs}
    lines = [f"{label}: {line}" for label, one in configs.items() for line in describe_budget(one)]
    rates = {label: config.update.learning_rate for label, config in configs.items()}
    if len(set(rates.values())) > 1:
        told = ", ".join(f"{label} {rate:g}" for label, rate in rates.items())
        lines.append(f"update.learning_rate differs: {told}")
    return lines


def _check_comparable(config: RunConfig) -> None:
    if isinstance(config.engine, VerlEngineConfig):
        raise ConfigError(
            "engine.kind verl is for train alone: set engine={kind: local} here, or {kind: vllm}"
        )
    if config.tasks.heldout is None:
        raise ConfigError("a comparison needs held-out tasks: tasks.heldout")


def _check_unchanged(run: _Run) -> None:
    """Raise RunError where the directory holds a run of another configuration or other inputs."""
    if not run.directory.checkpoints():
        return
    changed = changed_settings(run.directory, run.config)
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise RunError(
            f"{run.directory.path} was run with another configuration: {changed[0]}{more}; "
            "choose another --out or delete it"
        )
    others = run.directory.other_inputs(run.inputs)
    if others:
        raise RunError(
            f"{run.directory.path} was run with other {', '.join(others)}, which changed since: "
            "choose another --out or delete it"
        )


def _is_complete(run: _Run) -> bool:
    """Whether the last step, its checkpoint and the report are there."""
    checkpoints = run.directory.checkpoints()
    if not checkpoints or not (run.directory.path / "report.html").is_file():
        return False
    metrics = read_run(run.directory.path).metrics
    return metrics.last("progress") >= 1.0 and metrics.steps[-1] == step_of(checkpoints[-1])


def _train(runs: Sequence[_Run], complete: set[str], jobs: int) -> None:
    """Train what is missing, so many runs at once."""
    progress = _Progress(runs, complete, jobs)
    missing = {run.name: run.config for run in runs if run.name not in complete}
    with closing(train_apart(missing, jobs)) as events, progress.console.status("") as status:
        for told in events:
            progress.show(told, status)


class _Progress:
    """A line when a run begins and when it ends, and what is going on below them."""

    def __init__(self, runs: Sequence[_Run], complete: set[str], jobs: int) -> None:
        self.console = Console(highlight=False)
        self._runs = {run.name: run for run in runs}
        self._jobs = jobs
        self._seconds: dict[str, list[float]] = {run.label: [] for run in runs}
        for name in complete:
            self._count(self._runs[name])
        self._unfinished = [run.name for run in runs if run.name not in complete]
        self._place = {
            name: f"[{number}/{len(runs)}] {name}"
            for number, name in enumerate(self._unfinished, len(complete) + 1)
        }
        self._clocks: dict[str, TimeLeft] = {}
        self._now: dict[str, str] = {}
        if complete:
            self._say(f"{len(complete)} of {len(runs)} runs are complete and kept")

    def show(self, told: Told, status: Status) -> None:
        """Tell what happened."""
        name, run = told.name, self._runs[told.name]
        match told.what:
            case "begins":
                self._clocks[name] = TimeLeft()
                self._now[name] = f"{name} starts"
                self._say(f"{self._place[name]} {_beginning(run)}, {self._left()}")
            case "row":
                row = told.row
                left = self._clocks[name].update(row["progress"], row.get("time/seconds", math.nan))
                share = percent(min(row["progress"], 1.0))
                self._now[name] = (
                    f"{name}: step {row['step']}, {share} of the run, {duration(left)} left in it"
                )
            case "ends":
                del self._now[name]
                self._unfinished.remove(name)
                self._count(run)
                self._say(f"{self._place[name]}: {_ending(run)}, {self._left()}")
        status.update("\n".join(self._now.values()))

    def _count(self, run: _Run) -> None:
        self._seconds[run.label].append(_duration(run))

    def _left(self) -> str:
        waiting = [self._runs[name].label for name in self._unfinished]
        seconds = time_left(self._seconds, waiting) / min(self._jobs, max(1, len(waiting)))
        return "time left unknown" if math.isnan(seconds) else f"about {duration(seconds)} left"

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def _beginning(run: _Run) -> str:
    checkpoints = run.directory.checkpoints()
    if not checkpoints:
        return "begins"
    return f"goes on from step {step_of(checkpoints[-1])}"


def _ending(run: _Run) -> str:
    measures = read_outcome(run.directory.path).measures
    return (
        f"held-out accuracy {percent(measures['final_accuracy'])} after {measures['steps']:.0f} "
        f"steps, {compact(measures['tokens'])} tokens, {duration(_duration(run))}"
    )


def _duration(run: _Run) -> float:
    return read_run(run.directory.path).metrics.last("time/seconds")
