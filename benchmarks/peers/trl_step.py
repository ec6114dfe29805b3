"""Training steps of TRL's GRPOTrainer on the task that ``benchmarks/engine.py step`` lays down.

Runs in ``.venv-trl`` (``benchmarks/peers.sh trl``); it imports nothing of this project.

    OMP_NUM_THREADS=1 .venv-trl/bin/python benchmarks/peers/trl_step.py TASK_DIR OUT.json
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def digit_share(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The reward of the task: the share of digits among the characters."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c in "0123456789" for c in text) / max(1, len(text)) for text in texts]


class Clock(TrainerCallback):
    """Seconds of every step, its generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def run(task: dict[str, Any], directory: Path, micro_batch: int, steps: int) -> dict[str, Any]:
    """Train and time; ``micro_batch`` rows per forward pass, all rows per optimiser step."""
    rows = [{"prompt": [{"role": "user", "content": q}]} for q in task["questions"]]
    batch = task["prompts_per_step"] * task["group_size"]
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=task["device"] == "cpu",
            bf16=task["device"] == "cuda",
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
            gradient_checkpointing=False,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=batch // micro_batch,
            num_generations=task["group_size"],
            max_completion_length=task["max_new_tokens"],
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=task["learning_rate"],
            lr_scheduler_type="constant",
            max_steps=steps,
            logging_steps=steps,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model=str(directory / "model"),
            reward_funcs=digit_share,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        )
        trainer.train()
    lengths = [h for h in trainer.state.log_history if "completions/mean_length" in h]
    return {
        "seconds": clock.seconds,
        "mean_length": lengths[-1]["completions/mean_length"],
        "reward": lengths[-1]["reward"],
        "micro_batch": micro_batch,
        "threads": torch.get_num_threads(),
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", type=Path, help="directory of model/ and task.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=64)
    options = parser.parse_args()
    task = json.loads((options.task / "task.json").read_text())
    result = run(task, options.task, options.micro_batch, options.steps)
    options.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
