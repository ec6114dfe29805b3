"""``graphpo calibrate``: which merge threshold, and which description of states, merges rightly."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from graphpo_agent.build import build_grower, build_policy, build_sampling, set_threads
from graphpo_agent.build_method import build_method
from graphpo_agent.build_state import build_state
from graphpo_agent.calibration_files import summary, write_calibration
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config, read_yaml
from graphpo_agent.config_state import StateConfig
from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.errors import ConfigError, DataError, GraphError, RunError, ToolError, errors_at
from graphpo_agent.evals.calibrate import CalibrateOptions, Calibration, calibrate_choices
from graphpo_agent.evals.calibrate_pairs import (
    CandidatePairs,
    PairSample,
    candidate_pairs,
    equal_keys,
    merge_at,
    plan_samples,
)
from graphpo_agent.evals.calibrate_values import StateChoice, replay_graphs, sample_rewards
from graphpo_agent.graph.arrays import BoolArray, FloatArray, IntArray
from graphpo_agent.graph.jsonl import read_graphs
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.graph.step_id import split_step_id
from graphpo_agent.methods.graphpo import GraphPO
from graphpo_agent.outputs import check_above
from graphpo_agent.report.task_bar import TaskBar
from graphpo_agent.types import Task
from graphpo_agent.yaml_text import to_yaml

__all__ = [
    "RUN_STATE",
    "calibrate",
    "calibrate_command",
    "load_states",
    "tasks_of",
]

RUN_STATE = "run"
"""The name of the configuration's own ``state`` among the choices."""


def calibrate_command(
    config_path: str,
    overrides: Sequence[str],
    graphs_path: str,
    tasks_path: str | None,
    states: Sequence[str],
    options: CalibrateOptions,
    out: str,
) -> int:
    """``graphpo calibrate``.

    Args:
        config_path: the configuration that grew the graphs.
        overrides: ``a.b=value`` each.
        graphs_path: graphpo.graph/1 lines with tokens; an id is a task's, or ``step-7/`` and a
            task's as in a run directory.
        tasks_path: the tasks; None: the configuration's own, held-out ones too.
        states: further choices, see ``load_states``.
        options: what is measured.
        out: a directory that does not exist yet, or is empty.
    """
    directory = Path(os.path.realpath(out))  # of a link, what it leads to
    _check_directory(directory)
    config = load_config(RunConfig, config_path, overrides)
    set_threads(config.threads)
    choices = load_states(config_path, overrides, states)
    graphs = list(read_graphs(graphs_path))
    own = [*config.tasks.train, config.tasks.heldout]
    paths = [tasks_path] if tasks_path else [path for path in own if path is not None]
    known = [task for path in paths for task in load_tasks(Path(path))]
    found = calibrate(config, choices, graphs, tasks_of(graphs, known), options)
    print("\n".join(summary(found)))
    write_calibration(directory, choices, found)
    print(f"calibration: {out}")
    return 0


def load_states(
    config_path: str, overrides: Sequence[str], arguments: Sequence[str]
) -> dict[str, StateConfig]:
    """The ways to describe states that are compared, by name; the run's own first.

    Args:
        config_path: a configuration.
        overrides: ``a.b=value`` each.
        arguments: ``NAME={kind: key, function: …}``, or a YAML file with such a mapping per name.

    Raises:
        ConfigError: a choice that is none, or a name twice.
    """
    choices = {RUN_STATE: load_config(RunConfig, config_path, overrides).state}
    for name, text in _named_states(arguments):
        if name in choices:
            raise ConfigError(
                f"state choice {name!r} occurs twice ({RUN_STATE!r} is the run's own)"
            )
        with errors_at(f"state choice {name!r}"):
            choices[name] = load_config(RunConfig, config_path, [*overrides, f"state={text}"]).state
    return choices


def tasks_of(graphs: Sequence[RolloutGraph], tasks: Sequence[Task]) -> list[Task]:
    """The task of each graph.

    Raises:
        DataError: a graph of no known task.
    """
    by_id = {task.id: task for task in tasks}
    found: list[Task] = []
    for graph in graphs:
        of_step = split_step_id(graph.id)
        task = by_id.get(graph.id) or (by_id.get(of_step[1]) if of_step else None)
        if task is None:
            raise DataError(
                f"graph {graph.id!r}: no task of that id among the {len(tasks)} known; "
                "name the file with --tasks"
            )
        found.append(task)
    return found


def calibrate(
    config: RunConfig,
    states: Mapping[str, StateConfig],
    graphs: Sequence[RolloutGraph],
    tasks: Sequence[Task],
    options: CalibrateOptions,
) -> Calibration:
    """Walk the graphs again, describe their states, sample continuations, and compare.

    Raises:
        ConfigError: the method does not merge, or the reference is no choice with keys.
        GraphError: a graph that this configuration cannot have grown, or nothing to compare.
        ToolError: outages left every continuation unjudged.
    """
    method = build_method(config.method)
    if not isinstance(method, GraphPO) or method.merging.merge == "none":
        raise ConfigError(f"method.name is {config.method.name}: only graphpo merges states")
    if options.reference is not None and options.reference not in states:
        raise ConfigError(f"reference {options.reference!r} is none of {', '.join(states)}")
    choices = {name: StateChoice(*build_state(state)) for name, state in states.items()}
    grower, policy = build_grower(config), build_policy(config)
    with TaskBar(total=len(graphs), unit="graph") as bar:
        replays, seen = replay_graphs(grower, policy, graphs, tasks, choices, bar.update)
    merging = method.merging
    pairs = candidate_pairs(graphs, [~each.ended for each in replays], merging)
    if not len(pairs.i):
        raise GraphError("no two states of a graph could merge: nothing to calibrate")
    thresholds = sorted({*options.thresholds, merging.threshold})
    truth = _truth(options.reference, seen, pairs)
    merges = {name: merge_at(each, pairs, merging, thresholds) for name, each in seen.items()}
    rng = np.random.default_rng(config.seed)
    random_sample, samples = plan_samples(merges, pairs, options.pairs, rng)
    nodes = _nodes_of(pairs, [random_sample, *samples.values()], graphs)
    chains = sum(map(len, nodes)) * options.continuations
    with TaskBar(total=chains, unit="continuation") as bar:
        rewards = sample_rewards(
            grower,
            policy,
            replays,
            nodes,
            options.continuations,
            build_sampling(config.sampling),
            config.seed,
            bar.update,
        )
    _check_judged(rewards, chains)
    return calibrate_choices(
        graphs,
        merges,
        pairs,
        random_sample,
        samples,
        np.concatenate(rewards),
        credit=method.credit,
        truth=truth,
        options=options,
        rng=rng,
    )


def _check_judged(rewards: Sequence[FloatArray], chains: int) -> None:
    if all(np.isnan(of_graph).all() for of_graph in rewards):
        raise ToolError(
            f"none of the {chains:,} continuations was judged: see that the verifier and the tools "
            "answer, and that paths have room to end"
        )


def _truth(
    reference: str | None, seen: Mapping[str, Sequence[RolloutGraph]], pairs: CandidatePairs
) -> BoolArray | None:
    """[pairs] which have equal keys of the reference; ConfigError if none has."""
    if reference is None:
        return None
    truth = equal_keys(seen[reference], pairs)
    if not truth.any():
        raise ConfigError(
            f"reference {reference!r}: no two states have the same key; name a choice of kind key"
        )
    return truth


def _nodes_of(
    pairs: CandidatePairs, samples: Sequence[PairSample], graphs: Sequence[RolloutGraph]
) -> list[IntArray]:
    """Per graph the positions of all nodes that a sample holds."""
    places = np.concatenate([sample.places for sample in samples])
    wanted = np.unique([pairs.i[places], pairs.j[places]])
    starts = np.cumsum([0, *(graph.num_nodes for graph in graphs)])
    bounds = np.searchsorted(wanted, starts)
    return [wanted[a:b] - s for a, b, s in zip(bounds, bounds[1:], starts, strict=False)]


def _named_states(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, state as YAML) of every choice."""
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if equals:
            yield name, text
            continue
        for own, value in read_yaml(Path(argument)).items():
            yield str(own), to_yaml(value, braces=True)


def _check_directory(out: Path) -> None:
    if not out.name or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise RunError(f"output {out} exists already: name a new directory")
    check_above(out)
