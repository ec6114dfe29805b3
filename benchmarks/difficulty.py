"""How hard are the worlds? The share of prompts whose plain samples have mixed rewards, per knob.

A prompt teaches a chain method something only if some of its samples are right and some wrong.
Each setting generates a world, warm-starts a policy on it (reach: that of the default world, which
knows all distances), and samples 8 independent trajectories of each held-out task at temperature 1.

    python benchmarks/difficulty.py          # about 10 minutes on one core
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine_parts.machine import RESULTS, ROOT
from benchmarks.toy_worlds import WORK, call, prepare
from graphpo_agent.build import build_engine, build_grower
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.evals.heldout import judged_paths, measured, sample
from graphpo_agent.toy import make_toy
from graphpo_agent.types import SamplingParams

SAMPLES = 8


FEW = ("num_train=60", "num_heldout=60")
"""There are few questions at large distances."""
FAR = ("min_distance=5", "max_distance=7", "num_train=2000", "num_heldout=200")
THREE_HOPS = ("hops=3", "max_turns=10")


@dataclass(frozen=True)
class Setting:
    """Knobs of the generated world, and of the environment that the policy meets in it.

    Settings with the same knobs share world and policy.
    """

    name: str
    knobs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


SETTINGS = {
    "reach": [
        Setting("distance 2 to 3", ("min_distance=2", "max_distance=3")),
        Setting("distance 4 to 6 (default)"),
        Setting("distance 4 to 6, 6 lines at most", (), ("mode.max_response_tokens=24",)),
        Setting("distance 4 to 6, 5 lines at most", (), ("mode.max_response_tokens=20",)),
        Setting("distance 4 to 6, 4 lines at most", (), ("mode.max_response_tokens=16",)),
        Setting("distance 7 to 8", ("min_distance=7", "max_distance=8", *FEW)),
        Setting("distance 5 to 7, 5 lines at most", FAR, ("mode.max_response_tokens=20",)),
    ],
    "kb": [
        Setting("2 hops (default)"),
        Setting("2 hops, 6 turns at most", (), ("mode.max_turns=6",)),
        Setting("2 hops, 5 turns at most", (), ("mode.max_turns=5",)),
        Setting("3 hops, 10 turns at most", THREE_HOPS, ("mode.max_turns=10",)),
        Setting("3 hops, 8 turns at most", THREE_HOPS, ("mode.max_turns=8",)),
        Setting("3 hops, 7 turns at most", THREE_HOPS, ("mode.max_turns=7",)),
        Setting("3 hops, 7 turns, noise 0.45", (*THREE_HOPS, "noise=0.45"), ("mode.max_turns=7",)),
    ],
    "trace": [Setting("default")],
    "hops": [Setting("default")],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for world in options.worlds:
        rows += [
            measure(world, setting, options.tasks, options.work) for setting in SETTINGS[world]
        ]
    write(rows)


def measure(world: str, setting: Setting, num_tasks: int, work: Path) -> dict[str, str | float]:
    """Sample one setting."""
    place, policy = place_and_policy(world, setting, work)
    overrides = [f"model.path={policy}", *setting.overrides]
    if world == "kb":
        overrides.append(f"mode.tools.search.retriever.directory={place / 'index'}")
    if world == "hops":
        overrides.append(f"mode.tools.search.retriever.corpus={place / 'corpus.jsonl'}")
    path = ROOT / f"configs/toy/{world}.yaml"
    config = load_config(RunConfig, path, overrides)
    tasks = load_tasks(place / "heldout.jsonl")[:num_tasks]
    rollouts = sample(
        build_grower(config), build_engine(config).policy, tasks, SAMPLES, SamplingParams(), seed=0
    )
    evaluation = measured(judged_paths(rollouts))
    solved = np.array([np.nansum(rollout.graph.reward) for rollout in rollouts])
    row = {
        "world": world,
        "setting": setting.name,
        "accuracy": evaluation.accuracy,
        "mixed prompts": float(np.mean((solved > 0) & (solved < SAMPLES))),
        "response tokens": evaluation.response_tokens,
    }
    print(row, flush=True)
    return row


def place_and_policy(world: str, setting: Setting, work: Path) -> tuple[Path, Path]:
    """Where the world of a setting lies, and its warm-started policy; both made once."""
    own = "-".join(["difficulty", world, *setting.knobs])
    place = work / (own if world == "kb" or setting.knobs else world)
    if world != "kb":
        prepare(world, work)
    if not (place / "heldout.jsonl").exists():
        make_toy(world, place, ["seed=0", *setting.knobs])
    if world != "kb":
        return place, work / world / "policy"
    policy = place / "policy"
    if not policy.exists():
        model = [f"model.path={place}/untrained", f"output={policy}"]
        demonstrations = f"demonstrations={place}/demonstrations.jsonl"
        call(["sft", f"configs/toy/{world}_sft.yaml", *model, demonstrations])
    return place, policy


def write(rows: Sequence[dict[str, str | float]]) -> None:
    """Table and raw numbers."""
    lines = [
        f"Share of prompts with mixed rewards among {SAMPLES} plain samples at temperature 1, for",
        "a warm-started policy.",
        "",
        "| world | setting | accuracy | mixed prompts | response tokens |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['world']} | {row['setting']} | {row['accuracy']:.1%} "
        f"| {row['mixed prompts']:.0%} | {row['response tokens']:.1f} |"
        for row in rows
    ]
    (RESULTS / "difficulty.md").write_text("\n".join(lines) + "\n")
    (RESULTS / "difficulty.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
