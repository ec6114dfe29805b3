"""One rank of an FSDP engine of verl's with given rows; ``test_engine.py`` runs it as a program.

    python -m tests.engines.verl.engine_rank JOB.json RANK

What it finds is written beside the job.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import verl.utils.tensordict_utils as tu
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
)
from verl.workers.engine import EngineRegistry

from graphpo_agent.engines.verl.loss import LossTerms, graph_loss


def main(job_path: str, rank: str) -> None:
    job = json.loads(Path(job_path).read_text())
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{job_path}.store", rank=int(rank), world_size=job["ranks"]
    )
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=job["model"],
            load_tokenizer=False,
            external_lib="graphpo_agent.engines.verl.engine" if job["shares"] else None,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=job["checkpointing"],
            use_remove_padding=False,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision={"param_dtype": job["dtype"], "reduce_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    rows = job["rows"][int(rank)]

    def nested(name: str, kind: torch.dtype) -> torch.Tensor:
        values = [torch.tensor(row[name], dtype=kind) for row in rows]
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    numbers = ("old_log_probs", "token_weights", "advantages", "ref_log_prob")
    fields = {name: nested(name, torch.float32) for name in numbers}
    whole = ("input_ids", "position_ids", "prompts", "responses", "response_mask")
    fields |= {name: nested(name, torch.int64) for name in whole}
    fields["loss_mask"] = fields["response_mask"]
    data = TensorDict(fields, batch_size=len(rows))
    tu.assign_non_tensor(
        data,
        max_token_len_per_gpu=job["max_tokens"],
        use_dynamic_bsz=True,
        use_remove_padding=False,
        calculate_entropy=True,
        temperature=job["temperature"],
    )
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=8,
        clip_ratio_c=1e9,
    )
    loss = partial(graph_loss, actor, LossTerms(("advantages",), kl=0.1, entropy=0.01))
    with engine.eval_mode():
        said = engine.infer_batch(data.copy(), loss_function=None)["model_output"]
    with engine.train_mode():
        trained = engine.forward_backward_batch(data.copy(), loss)
        gradients = {
            f"gradient/{name}": weight.grad.full_tensor().numpy()
            for name, weight in engine.module.named_parameters()
        }
    found = {"micro_batches": np.array(len(trained["loss"])), "loss": np.array(sum(trained["loss"]))}
    for name in ("log_probs", "entropy"):
        found[name] = np.concatenate([one.float().numpy() for one in said[name].unbind()])
    np.savez(f"{job_path}.{rank}.npz", **found, **gradients)


if __name__ == "__main__":
    main(*sys.argv[1:])
