"""GraphPO, tree and GRPO under the same budget of generated tokens, on both toy worlds.

Builds each world and warm-starts one policy per world, then lets ``graphpo compare`` train every
method from it with several seeds. Finished runs are kept, so a stopped benchmark goes on where it
was. Writes a table, the learning curves with 95 % confidence bands and the raw numbers to
``benchmarks/results/``.

    python benchmarks/methods.py                      # everything: about 40 minutes on 2 cores
    python benchmarks/methods.py --worlds kb --seeds 2
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphpo_agent.report.compare_page import (
    comparison_record,
    comparison_tables,
    draw_curves,
    machine_line,
)
from graphpo_agent.report.compare_stats import Comparison, read_comparison

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GRAPHPO = [sys.executable, "-m", "graphpo_agent.cli"]
METHODS = ("graphpo", "tree", "grpo")


@dataclass(frozen=True)
class World:
    """What differs between the worlds.

    ``group_size`` gives GRPO about as many generated tokens per prompt as the schedule;
    ``sft_steps`` stop the warm start early enough to leave something to learn.
    """

    schedule: tuple[int, ...]
    group_size: int
    token_budget: int
    sft_steps: int
    base: str = ""
    """The world whose configuration, tasks and policy these are; empty: its own name."""
    overrides: tuple[str, ...] = ()

    def method(self, name: str) -> dict[str, Any]:
        """The settings of one of ``METHODS``; merging is as the world's configuration has it."""
        if name == "grpo":
            return {"name": name, "group_size": self.group_size}
        return {"name": name, "schedule": list(self.schedule), "singleton": "inherit"}


WORLDS = {
    "kb": World((6, 2, 1, 1), group_size=10, token_budget=200_000, sft_steps=500),
    "reach": World((6, 2, 1, 1), group_size=10, token_budget=300_000, sft_steps=1200),
    # The same policy where chains starve: half of the prompts have no mixed rewards.
    "reach, 5 lines": World(
        (6, 2, 1, 1),
        group_size=10,
        token_budget=200_000,
        sft_steps=1200,
        base="reach",
        overrides=("mode.max_response_tokens=20",),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="worlds at a time, one thread each")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "benchmark")
    options = parser.parse_args()
    for world in options.worlds:
        prepare(WORLDS[world].base or world, options.work)
    with ThreadPoolExecutor(options.workers) as pool:
        jobs = [
            pool.submit(compare, world, options.methods, options.seeds, options.work)
            for world in options.worlds
        ]
        done = [job.result() for job in jobs]
    write_results(dict(zip(options.worlds, done, strict=True)))


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


def compare(world: str, methods: Sequence[str], seeds: int, work: Path) -> Comparison:
    """The finished runs of one world."""
    settings = WORLDS[world]
    out = work / "compare" / slug(world)
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{name}.yaml" for name in methods]
    for name, file in zip(methods, files, strict=True):
        file.write_text(yaml.safe_dump({"method": settings.method(name)}))
    config, overrides = arguments(world, work)
    options = ["--methods", *map(str, files), "--seeds", str(seeds), "--out", str(out)]
    call(["compare", config, *overrides, *options])
    return read_comparison(out, methods, range(seeds), settings.token_budget)


def arguments(world: str, work: Path) -> tuple[str, list[str]]:
    """Configuration and overrides that all methods share in a world."""
    settings = WORLDS[world]
    base = settings.base or world
    directory = work / base
    overrides = [
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
    return f"configs/toy/{base}.yaml", overrides


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


def write_results(worlds: Mapping[str, Comparison]) -> None:
    """Table, curves and raw numbers."""
    RESULTS.mkdir(exist_ok=True)
    lines = [
        f"{machine_line()} One thread per run.",
        "Same warm-started policy, same generated tokens, 400 held-out tasks at temperature 1.",
    ]
    for world, comparison in worlds.items():
        lines += ["", f"### {world}", "", *comparison_tables(comparison)]
        figure = RESULTS / f"methods_{slug(world)}.svg"
        draw_curves(figure, f"{world}: held-out accuracy", comparison)
    records = [{"world": world, **comparison_record(found)} for world, found in worlds.items()]
    (RESULTS / "methods.md").write_text("\n".join(lines) + "\n")
    (RESULTS / "methods.json").write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
