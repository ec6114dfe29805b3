"""Training steps of this project on the task that ``benchmarks/engine.py step`` lays down.

The whole of ``graphpo train`` (rollout, credit, update, metrics and graphs written), without
checkpoints and evaluation.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/peers/graphpo_step.py TASK_DIR OUT.json
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from graphpo_agent.commands import train
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.memory import memory_of
from graphpo_agent.types import Outcome, Task


def digit_share(task: Task, outcome: Outcome) -> float:
    """The reward of the task: the share of digits among the characters."""
    text = outcome.response
    return sum(c in "0123456789" for c in text) / max(1, len(text))


def configuration(
    task: dict[str, Any], directory: Path, scratch: Path, steps: int
) -> dict[str, Any]:
    """GRPO with one optimiser step per batch and no KL."""
    tasks = scratch / "tasks.jsonl"
    tasks.write_text(
        "".join(
            json.dumps({"id": f"q{i}", "question": question, "answers": []}) + "\n"
            for i, question in enumerate(task["questions"])
        )
    )
    return {
        "output": str(scratch / "run"),
        "threads": 1,
        "model": {
            "path": str(directory / "model"),
            "device": task["device"],
            "autocast": task["device"] == "cuda",
        },
        "tasks": {"train": str(tasks)},
        "mode": {
            "kind": "segment",
            "segment_length": task["max_new_tokens"],
            "max_response_tokens": task["max_new_tokens"],
        },
        "state": {"kind": "key", "function": "graphpo_agent.rewards.toy:reach_key"},
        "reward": "graphpo_step:digit_share",
        "method": {"name": "grpo", "group_size": task["group_size"]},
        "update": {
            "learning_rate": task["learning_rate"],
            "weight_decay": 0.0,
            "minibatch_graphs": task["prompts_per_step"],
            "loss_aggregation": "token_mean",
            "max_tokens_per_batch": task["max_tokens_per_batch"],
        },
        "train": {
            "prompts_per_step": task["prompts_per_step"],
            "steps": steps,
            "max_resample": 0,
            "checkpoint_every": steps + 1,
        },
    }


def run(task: dict[str, Any], directory: Path, steps: int) -> dict[str, Any]:
    """``graphpo train``; a step's seconds are the difference of the run's clock after two steps."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "run.yaml"
        written = configuration(task, directory, Path(scratch), steps)
        file.write_text(yaml.safe_dump(written))
        train([str(file)], resume=None, dry_run=False)
        on_gpu = task["device"] == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        lines = (Path(scratch) / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        prompt_tokens = rows[-1]["tokens/prefilled"] / task["prompts_per_step"]
        expected = memory_of(load_config(RunConfig, file, []), round(prompt_tokens)).total
    return {
        "seconds": np.diff([row["time/seconds"] for row in rows], prepend=0.0).tolist(),
        "rollout_seconds": [row["time/rollout"] for row in rows],
        "update_seconds": [row["time/update"] for row in rows],
        "prompt_tokens": prompt_tokens,
        "mean_length": rows[-1]["rollout/response_tokens"],
        "reward": rows[-1]["reward/mean"],
        "threads": torch.get_num_threads(),
        "peak_bytes": peak,
        "expected_bytes": expected,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", type=Path, help="directory of model/ and task.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    task = json.loads((options.task / "task.json").read_text())
    result = run(task, options.task, options.steps)
    options.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
