"""Training steps of verl's GRPO on the task that ``benchmarks/engine.py step`` lays down.

Runs in ``.venv-verl`` (``benchmarks/peers.sh verl``). Of this project it has only what makes verl
run on a CPU (``graphpo_agent/engines/verl/cpu*``).

    OMP_NUM_THREADS=1 .venv-verl/bin/python benchmarks/peers/verl_step.py TASK_DIR OUT.json
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CPU = "graphpo_agent.engines.verl.cpu"
TIMEOUT_S = 420
"""A worker that dies leaves verl waiting for ever."""
STEP = re.compile(r"timing_s/step:([0-9.]+)")
PARTS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The reward of the task: the share of digits among the characters."""
    return sum(c in "0123456789" for c in solution_str) / max(1, len(solution_str))


def overrides(task: dict[str, Any], directory: Path, data: Path, steps: int) -> list[str]:
    """One process for training and one for sampling, float32, one optimiser step per batch."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    float32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
    return [
        "trainer.device=cpu",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={data}/checkpoints",
        f"trainer.total_training_steps={steps}",
        "+ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=32",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/train.parquet",
        f"data.train_batch_size={task['prompts_per_step']}",
        "data.max_prompt_length=512",
        f"data.max_response_length={task['max_new_tokens']}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={directory}/model",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"{actor}.strategy=fsdp2",
        f"{actor}.optim.lr={task['learning_rate']}",
        f"{actor}.ppo_mini_batch_size={task['prompts_per_step']}",
        f"{actor}.ppo_micro_batch_size_per_gpu=32",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"+{actor}.fsdp_config.mixed_precision={float32}",
        f"{actor}.use_kl_loss=False",
        f"{rollout}.name=vllm",
        f"{rollout}.n={task['group_size']}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.dtype=float32",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.load_format=auto",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.max_model_len=1024",
        f"{rollout}.max_num_batched_tokens=2048",
        f"{rollout}.max_num_seqs=64",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=32",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=64",
        f"+{rollout}.engine_kwargs.vllm.worker_extension_cls={CPU}_vllm.CpuWorkerExtension",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={HERE}/verl_step.py",
    ]


def run(task: dict[str, Any], directory: Path, steps: int) -> dict[str, Any]:
    """Train in processes of verl's own and read the seconds of each step from what it prints."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'graphpo_agent/engines/verl/cpu_start'}:{ROOT}:{HERE}",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": f"{CPU},verl_patience",
        "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine itself runs on any device
        "VERL_ENGINE_VENDOR": "nvidia",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARN",
        "RAY_DEDUP_LOGS": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    with tempfile.TemporaryDirectory() as scratch:
        rows = [
            {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": question}],
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": i},
            }
            for i, question in enumerate(task["questions"])
        ]
        pd.DataFrame(rows).to_parquet(Path(scratch) / "train.parquet")
        arguments = overrides(task, directory, Path(scratch), steps)
        done = subprocess.run(
            ["timeout", str(TIMEOUT_S), sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
            env=environment,
            cwd=scratch,
            capture_output=True,
            text=True,
        )
    seconds = [float(found) for found in STEP.findall(done.stdout)]
    if len(seconds) < steps:
        sys.exit(
            f"verl ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-9000:]}"
        )
    return {"seconds": seconds} | {
        f"{part}_seconds": found
        for part in PARTS
        if (found := _numbers(f"timing_s/{part}", done.stdout))
    }


def _numbers(name: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{name}:([0-9.]+)", text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", type=Path, help="directory of model/ and task.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    task = json.loads((options.task / "task.json").read_text())
    result = run(task, options.task.resolve(), options.steps)
    options.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
