"""The update of real graphs: tokens without an advantage, and edges that begin alike."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.method_map import arguments, write_setting
from benchmarks.method_settings import WORLDS, settings
from benchmarks.toy_worlds import WORK, prepare
from graphpo_agent import train
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.packing import pack
from graphpo_agent.engines.local.token_weights import moving_tokens
from graphpo_agent.graph.samples import TrainingSample
from graphpo_agent.methods.method import credits_of, training_sample
from graphpo_agent.methods.whiten import whitened

from .machine import alternate, machine, table, write_result

__all__ = ["run"]

METHOD_NAMES = ("graphpo", "plus", "tree", "treerl", "grpo")
NEGLIGIBLE = 1e-9
"""An advantage that moves nothing, and yet its token has to be computed."""


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-credit``."""
    result: dict[str, Any] = {"command": command, "machine": machine(), "rows": []}
    for world in ("reach",) if quick else ("reach", "hops", "trace", "kb"):
        prepare(world, WORK)
        for method in METHOD_NAMES[:1] if quick else METHOD_NAMES:
            row = measure(world, method, repeats=1 if quick else 5)
            print(row, flush=True)
            result["rows"].append(row)
    write_result("credit", result, _page(result), out)


def measure(world: str, method: str, repeats: int) -> dict[str, Any]:
    """The update of one step with all that can be left out, with half of it, and with nothing."""
    engine, samples = first_step(world, method)
    apart = [_apart(sample, seed, engine) for seed, sample in enumerate(samples)]
    given = {"all": [_moving(sample) for sample in apart], "apart": apart, "own": samples}
    calls = {name: partial(engine.update, chosen, 0) for name, chosen in given.items()}
    alternate(calls, repeats=1)  # warms up
    seconds = alternate(calls, repeats)
    tokens = {name: _computed(chosen) for name, chosen in given.items()}
    return {
        "world": world,
        "method": method,
        "graphs": len(samples),
        "tokens": tokens,
        "seconds": seconds,
        "by advantage": seconds["all"] / seconds["apart"],
        "by text": seconds["apart"] / seconds["own"],
        "both": seconds["all"] / seconds["own"],
    }


def first_step(world: str, method: str) -> tuple[LocalEngine, list[TrainingSample]]:
    """A run's engine, which learns nothing, and the samples of its first step."""
    setting = next(iter(settings(method, WORLDS[world])))
    config_file, *shared = arguments(world, WORK)
    with tempfile.TemporaryDirectory() as scratch:
        laid_over = write_setting(Path(scratch) / "setting.yaml", world, setting, WORK)
        overrides = [*shared, str(laid_over), "update.learning_rate=1e-12"]
        config = load_config(RunConfig, config_file, overrides)
    setup = train.prepare(config)
    tasks = setup.tasks[: config.train.prompts_per_step]
    rollouts = setup.grower.grow(
        setup.engine.policy, tasks, setup.method, setup.sampling, (0, 1), setup.budget
    )
    graphs = [rollout.graph for rollout in rollouts]
    credits = credits_of(setup.method, graphs, [rollout.classes for rollout in rollouts])
    pairs = [pair for pair in zip(graphs, credits, strict=True) if pair[1].has_signal]
    graphs, credits = [graph for graph, _ in pairs], [credit for _, credit in pairs]
    if setup.method.whiten == "batch":
        credits = whitened(graphs, credits)
    assert isinstance(setup.engine, LocalEngine)
    return setup.engine, [training_sample(*pair) for pair in zip(graphs, credits, strict=True)]


def _apart(sample: TrainingSample, seed: int, engine: LocalEngine) -> TrainingSample:
    """The same graph with random tokens, so that hardly any two edges begin alike."""
    rng = np.random.default_rng(seed)
    vocabulary = engine.model.config.vocab_size
    return replace(sample, token_ids=rng.integers(0, vocabulary, len(sample.token_ids)))


def _moving(sample: TrainingSample) -> TrainingSample:
    """The same graph with an advantage everywhere."""
    of_rows = sample.row_advantages
    return replace(
        sample,
        advantages=np.where(sample.advantages == 0.0, NEGLIGIBLE, sample.advantages),
        row_advantages=None if of_rows is None else np.where(of_rows == 0.0, NEGLIGIBLE, of_rows),
    )


def _computed(samples: Sequence[TrainingSample]) -> int:
    moving = [replace(sample, loss_mask=moving_tokens(sample)) for sample in samples]
    return sum(len(batch.token_ids) for batch in pack(moving, 2**20))


def _page(result: dict[str, Any]) -> list[str]:
    names = {
        "world": "world",
        "method": "method",
        "graphs": "graphs",
        "all": "tokens to compute",
        "with": "that lead to an advantage",
        "distinct": "of different text",
        "all s": "all (s)",
        "apart s": "with an advantage (s)",
        "own s": "update (s)",
        "by advantage": "× by advantages",
        "by text": "× by text",
        "both": "× in all",
    }
    shown = [
        row
        | {f"{name} s": seconds for name, seconds in row["seconds"].items()}
        | {
            "all": row["tokens"]["all"],
            "with": f"{row['tokens']['apart'] / row['tokens']['all']:.0%}",
            "distinct": f"{row['tokens']['own'] / row['tokens']['all']:.0%}",
        }
        for row in result["rows"]
    ]
    return [
        "# The update of real graphs: what is not computed",
        "One update from the graphs of a run's first step, grown, merged and credited as "
        "`benchmarks/method_map.py` trains with them (warm-started policies of 0.2 M parameters; "
        "graphs without any advantage are no part of it): CPU seconds of one thread, medians of "
        "five runs in turn. A token is computed if one with an advantage follows it, and once for "
        "all edges that have it behind the same text. *All*: the same update of graphs of the same "
        "shape with random tokens and an advantage everywhere, so that neither leaves anything "
        "out. *With an advantage*: random tokens, the method's advantages.",
        "",
        *table(shown, names),
    ]
