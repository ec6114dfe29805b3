"""The toy worlds and their warm-started policies, as several measurements share them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine_parts.machine import ROOT
from benchmarks.method_settings import WORLDS

__all__ = ["WORK", "call", "prepare"]

WORK = ROOT / "runs" / "benchmark"
"""Where worlds, policies and runs are kept unless told otherwise."""
_GRAPHPO = [sys.executable, "-m", "graphpo_agent.cli"]


def prepare(world: str, work: Path) -> None:
    """The world and its policy in ``work/<world>``, once."""
    directory, sizes = work / world, WORLDS[world]
    if (directory / "policy" / "config.json").exists():
        return
    call(["data", "toy", sizes.toy, str(directory), "seed=0", *sizes.knobs])
    call(
        [
            "sft",
            f"configs/toy/{sizes.toy}_sft.yaml",
            f"model.path={directory}/untrained",
            f"demonstrations={directory}/demonstrations.jsonl",
            f"output={directory}/policy",
            f"steps={sizes.sft_steps}",
            *sizes.sft,
        ]
    )


def call(arguments: Sequence[str]) -> None:
    """Run ``graphpo``; ends this program with the end of its output when it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*_GRAPHPO, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"graphpo {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    print(done.stdout.strip().splitlines()[-2:], flush=True)
