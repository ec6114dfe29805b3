"""``scripts/quickstart.sh`` with three seeds: what it gains and how long it takes.

Each seed has a world, a warm start and a training run of its own. The installation is done before
the clock starts.

    python benchmarks/quickstart.py          # about 12 minutes on two cores
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    subprocess.run(["bash", "scripts/setup.sh"], cwd=ROOT, check=True)
    machine = (
        f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, one "
        "thread"
    )
    how = "scripts/quickstart.sh, one seed after the other."
    rows = [run(seed) for seed in range(options.seeds)]
    write({"machine": machine, "how": how, "rows": rows})


def run(seed: int) -> dict[str, float]:
    """One quickstart from nothing."""
    for leftover in (f"worlds/kb-{seed}", f"runs/quickstart-{seed}"):
        shutil.rmtree(ROOT / leftover, ignore_errors=True)
    started = time.monotonic()
    subprocess.run(
        ["bash", "scripts/quickstart.sh"],
        cwd=ROOT,
        env=os.environ | {"SEED": str(seed)},
        check=True,
    )
    seconds = time.monotonic() - started
    metrics = ROOT / f"runs/quickstart-{seed}" / "metrics.jsonl"
    before, *_, after = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "seed": seed,
        "before": before["eval/accuracy"],
        "after": after["eval/accuracy"],
        "greedy before": before["eval/greedy_accuracy"],
        "greedy after": after["eval/greedy_accuracy"],
        "generated tokens": after["tokens/total"],
        "training seconds": round(after["time/seconds"]),
        "all seconds": round(seconds),
    }


def page(result: dict[str, Any]) -> str:
    """The page of what ``quickstart.json`` holds; "–" where the whole was not timed."""
    lines = [
        f"{result['machine']}. {result['how']}",
        "Held-out accuracy over 200 tasks at temperature 1; training: rollouts, updates and",
        "evaluations; all: without installation.",
        "",
        "| seed | before | after | greedy before | greedy after | tokens | training | all |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['seed']} | {row['before']:.1%} | {row['after']:.1%} "
        f"| {row['greedy before']:.1%} | {row['greedy after']:.1%} "
        f"| {row['generated tokens']:,} | {row['training seconds']} s "
        f"| {_seconds(row.get('all seconds'))} |"
        for row in result["rows"]
    ]
    return "\n".join(lines) + "\n"


def _seconds(number: float | None) -> str:
    return "–" if number is None else f"{number} s"


def write(result: dict[str, Any]) -> None:
    (RESULTS / "quickstart.md").write_text(page(result))
    (RESULTS / "quickstart.json").write_text(json.dumps(result, indent=1) + "\n")
    print(page(result))


if __name__ == "__main__":
    main()
