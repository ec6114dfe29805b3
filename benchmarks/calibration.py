"""Which description of states, and which merge threshold, merges equal states on the kb world?

Grows graphs with the base policy of ``benchmarks/methods.py`` (prepared when missing) and runs
``graphpo calibrate`` on them with every choice of ``benchmarks/states_kb.yaml``. The exact key of
the world, the run's own, is the reference.

    python benchmarks/calibration.py                  # about 10 minutes on one core
    python benchmarks/calibration.py --graphs 12 --continuations 8
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path

import methods as comparison

ABOUT = """\
# State descriptions and merge thresholds on kb

`python benchmarks/calibration.py`; {machine}.

The policy is the base of methods.md. The run's own `state` is the exact key of the world: the facts
of the question that were found, and the answer; it is the reference. The other choices are in
`benchmarks/states_kb.yaml`.

![merged states, right merges, spread and error over the threshold](calibration-kb.png)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=48)
    parser.add_argument("--continuations", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=10_000, help="per choice")
    parser.add_argument("--work", type=Path, default=comparison.ROOT / "runs" / "benchmark")
    options = parser.parse_args()
    comparison.prepare("kb", options.work)
    with tempfile.TemporaryDirectory() as directory:
        found = calibrate(options, Path(directory))
        results = comparison.RESULTS / "calibration-kb"
        machine = f"{platform.platform()}, {os.cpu_count()} CPUs, one thread"
        about = ABOUT.format(machine=machine)
        results.with_suffix(".md").write_text(about + "\n" + (found / "calibration.md").read_text())
        text = (found / "calibration.json").read_text()
        numbers = json.loads(text.replace(f"{options.work}/", "worlds/"))
        del numbers["command"]  # of temporary files
        results.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
        shutil.copyfile(found / "calibration.png", results.with_suffix(".png"))


def calibrate(options: argparse.Namespace, directory: Path) -> Path:
    """Graphs, and the directory of their calibration."""
    world, config = options.work / "kb", "configs/toy/kb.yaml"
    overrides = [
        f"model.path={world / 'policy'}",
        f"tasks.train={world / 'train.jsonl'}",
        f"tasks.heldout={world / 'heldout.jsonl'}",
        f"mode.tools.search.retriever.directory={world / 'index'}",
    ]
    graphs, states, out = directory / "graphs.jsonl", directory / "states.yaml", directory / "out"
    choices = (comparison.ROOT / "benchmarks/states_kb.yaml").read_text()
    states.write_text(choices.replace("worlds/kb", str(world)))
    count = ["--count", str(options.graphs), "--tasks", str(world / "heldout.jsonl")]
    comparison.call(["rollout", config, *overrides, *count, "--out", str(graphs)])
    measured = ["--continuations", str(options.continuations), "--pairs", str(options.pairs)]
    chosen = ["--states", str(states), "--reference", "run", *measured, "--out", str(out)]
    comparison.call(["calibrate", config, str(graphs), *overrides, *chosen])
    return out


if __name__ == "__main__":
    main()
