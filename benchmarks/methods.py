"""GraphPO, tree and GRPO under the same budget of generated tokens, on both toy worlds.

Builds each world and warm-starts one policy per world, then trains every method from it with
several seeds, each run a ``graphpo train`` process of its own. Finished runs are kept, so a
stopped benchmark goes on where it was. Writes a table, the learning curves with 95 % confidence
bands and the raw numbers to ``benchmarks/results/``.

    python benchmarks/methods.py                      # everything: about 40 minutes on 2 cores
    python benchmarks/methods.py --worlds kb --seeds 2
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphpo_agent.report.plots import Curve, confidence_half_width, curve_with_band

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GRAPHPO = [sys.executable, "-m", "graphpo_agent.cli"]
METHODS = {
    "graphpo": [],
    "tree": ["method={name: tree, schedule: SCHEDULE, singleton: inherit}"],
    "grpo": ["method={name: grpo, group_size: GROUP}"],
}
"""Overrides of ``configs/toy/<world>.yaml``, which trains GraphPO."""


@dataclass(frozen=True)
class World:
    """What differs between the worlds.

    ``group_size`` gives GRPO about as many generated tokens per prompt as the schedule;
    ``sft_steps`` stop the warm start early enough to leave something to learn.
    """

    schedule: str
    group_size: int
    token_budget: int
    sft_steps: int
    base: str = ""
    """The world whose configuration, tasks and policy these are; empty: its own name."""
    overrides: tuple[str, ...] = ()


WORLDS = {
    "kb": World(schedule="[6,2,1,1]", group_size=10, token_budget=200_000, sft_steps=500),
    "reach": World(schedule="[6,2,1,1]", group_size=10, token_budget=300_000, sft_steps=1200),
    # The same policy where chains starve: half of the prompts have no mixed rewards.
    "reach, 5 lines": World(
        schedule="[6,2,1,1]",
        group_size=10,
        token_budget=200_000,
        sft_steps=1200,
        base="reach",
        overrides=("mode.max_response_tokens=20",),
    ),
}


@dataclass(frozen=True)
class Run:
    """One finished training run."""

    world: str
    method: str
    seed: int
    tokens: np.ndarray
    accuracy: np.ndarray
    rows: list[dict[str, float]]

    @property
    def final(self) -> dict[str, float]:
        return self.rows[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "benchmark")
    options = parser.parse_args()
    for world in options.worlds:
        prepare(WORLDS[world].base or world, options.work)
    jobs = [
        (world, method, seed)
        for world in options.worlds
        for seed in range(options.seeds)
        for method in options.methods
    ]
    with ThreadPoolExecutor(options.workers) as pool:
        runs = list(pool.map(lambda job: train(*job, work=options.work), jobs))
    write_results(runs, options.worlds, options.methods)


def prepare(world: str, work: Path) -> None:
    """The world and its warm-started policy, once."""
    directory = work / world
    if (directory / "policy" / "config.json").exists():
        return
    call(["data", "toy", world, str(directory), "seed=0", "num_heads=4"])
    call(
        [
            "sft",
            f"configs/toy/{world}_sft.yaml",
            f"model.path={directory}/untrained",
            f"demonstrations={directory}/demonstrations.jsonl",
            f"output={directory}/policy",
            f"steps={WORLDS[world].sft_steps}",
        ]
    )


def train(world: str, method: str, seed: int, work: Path) -> Run:
    """One run, or what is left of one that was finished before."""
    settings = WORLDS[world]
    base = settings.base or world
    directory = work / base
    run = work / f"{slug(world)}-{method}-{seed}"
    overrides = [
        text.replace("SCHEDULE", settings.schedule).replace("GROUP", str(settings.group_size))
        for text in METHODS[method]
    ]
    overrides += [
        f"output={run}",
        f"seed={seed}",
        "threads=1",
        f"model.path={directory}/policy",
        f"tasks.train={directory}/train.jsonl",
        f"tasks.heldout={directory}/heldout.jsonl",
        "train.steps=null",
        f"train.token_budget={settings.token_budget}",
        "train.eval_tasks=400",
        *settings.overrides,
    ]
    if base == "kb":
        overrides.append(f"mode.tools.search.retriever.directory={directory}/index")
    if not (run / "report.html").exists():
        unfinished = (run / "config.yaml").exists() and any((run / "checkpoints").glob("step-*"))
        arguments = (
            ["--resume", str(run)] if unfinished else [f"configs/toy/{base}.yaml", *overrides]
        )
        call(["train", *arguments])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "eval/accuracy" in row]
    return Run(
        world,
        method,
        seed,
        np.array([row.get("tokens/total", 0) for row in evaluated]),
        np.array([row["eval/accuracy"] for row in evaluated]),
        rows,
    )


def slug(world: str) -> str:
    """A world's name in file names."""
    return world.replace(", ", "-").replace(" ", "")


def call(arguments: Sequence[str]) -> None:
    """Run ``graphpo``; its progress goes to this process's stderr only when it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*GRAPHPO, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"graphpo {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    print(done.stdout.strip().splitlines()[-2:], flush=True)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % confidence interval over seeds (Student's t)."""
    array = np.asarray(values, float)
    return float(array.mean()), float(confidence_half_width(array[:, None])[0])


def curve_mean(run: Run) -> float:
    """Mean held-out accuracy over the whole budget (area under the learning curve)."""
    budget = WORLDS[run.world].token_budget
    grid = np.linspace(0, budget, 61)
    return float(np.interp(grid, run.tokens, run.accuracy).mean())


def write_results(runs: Sequence[Run], worlds: Sequence[str], methods: Sequence[str]) -> None:
    """Table, curves and raw numbers."""
    RESULTS.mkdir(exist_ok=True)
    text = "\n".join(table(runs, worlds, methods))
    (RESULTS / "methods.md").write_text(text + "\n")
    (RESULTS / "methods.json").write_text(json.dumps([raw(run) for run in runs], indent=1) + "\n")
    for world in worlds:
        grid = np.linspace(0, WORLDS[world].token_budget, 61)
        curves = [
            Curve(
                method,
                grid,
                np.stack(
                    [
                        np.interp(grid, run.tokens, run.accuracy)
                        for run in runs
                        if (run.world, run.method) == (world, method)
                    ]
                ),
            )
            for method in methods
        ]
        curve_with_band(
            RESULTS / f"methods_{slug(world)}.svg",
            curves,
            title=f"{world}: held-out accuracy",
            x_label="generated tokens",
            y_label="accuracy",
        )
    print(text)


def table(runs: Sequence[Run], worlds: Sequence[str], methods: Sequence[str]) -> Iterator[str]:
    seeds = sorted({run.seed for run in runs})
    yield f"{len(seeds)} seeds, mean ± 95 % confidence interval over seeds; one thread per run."
    yield f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}."
    yield "Same warm-started policy, same generated tokens, 400 held-out tasks at temperature 1."
    for world in worlds:
        of_world = [run for run in runs if run.world == world]
        before = float(np.mean([run.accuracy[0] for run in of_world]))
        yield f"\n### {world}: {WORLDS[world].token_budget:,} tokens, {before:.1%} before\n"
        yield "| method | final accuracy | greedy | mean of the curve | response tokens | updates |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for method in methods:
            chosen = [run for run in of_world if run.method == method]
            yield (
                f"| {method} | {shown([run.accuracy[-1] for run in chosen])} "
                f"| {shown([run.final['eval/greedy_accuracy'] for run in chosen])} "
                f"| {shown([curve_mean(run) for run in chosen])} "
                f"| {interval([run.final['eval/response_tokens'] for run in chosen])[0]:.1f} "
                f"| {interval([run.final['step'] for run in chosen])[0]:.0f} |"
            )
        yield "\n| paired difference | final accuracy | mean of the curve |"
        yield "| --- | --- | --- |"
        for a, b in (("graphpo", "tree"), ("graphpo", "grpo"), ("tree", "grpo")):
            if a in methods and b in methods:
                yield paired(of_world, a, b)


def paired(runs: Sequence[Run], a: str, b: str) -> str:
    """Differences seed by seed."""
    by_seed = {(run.method, run.seed): run for run in runs}
    pairs = [(by_seed[a, seed], by_seed[b, seed]) for seed in sorted({run.seed for run in runs})]
    final = [float(x.accuracy[-1] - y.accuracy[-1]) for x, y in pairs]
    curve = [curve_mean(x) - curve_mean(y) for x, y in pairs]
    return f"| {a} − {b} | {shown(final, signed=True)} | {shown(curve, signed=True)} |"


def shown(values: Sequence[float], signed: bool = False) -> str:
    """Percent points: ``72.4 ± 1.9``."""
    mean, half = interval(values)
    return f"{100 * mean:{'+' if signed else ''}.1f} ± {100 * half:.1f}"


def raw(run: Run) -> dict[str, object]:
    return {
        "world": run.world,
        "method": run.method,
        "seed": run.seed,
        "tokens": run.tokens.tolist(),
        "accuracy": run.accuracy.round(4).tolist(),
        "final": {name: round(value, 5) for name, value in run.final.items()},
        "seconds": round(run.final["time/seconds"], 1),
    }


if __name__ == "__main__":
    main()
