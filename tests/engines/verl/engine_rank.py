"""One rank of an FSDP engine of verl's with given rows; ``test_engine.py`` runs it as a program.

    python -m tests.engines.verl.engine_rank JOB.json RANK

What it finds is written beside the job.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine_parts.verl import make_engine, make_loss, row_batch


def main(job_path: str, rank: str) -> None:
    job = json.loads(Path(job_path).read_text())
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{job_path}.store", rank=int(rank), world_size=job["ranks"]
    )
    engine = make_engine(job["model"], job["shares"], checkpointing=job["checkpointing"])
    data = row_batch(
        job["rows"][int(rank)],
        max_token_len_per_gpu=job["max_tokens"],
        calculate_entropy=True,
        temperature=0.7,
    )
    loss = make_loss(kl=0.1, entropy=0.01)
    with engine.eval_mode():
        said = engine.infer_batch(data.copy(), loss_function=None)["model_output"]
    with engine.train_mode():
        trained = engine.forward_backward_batch(data.copy(), loss)
        found = {
            f"gradient/{name}": weight.grad.full_tensor().numpy()
            for name, weight in engine.module.named_parameters()
            if weight.grad is not None
        }
    found |= {
        "micro_batches": np.array(len(trained["loss"])),
        "loss": np.array(sum(trained["loss"])),
    }
    for name in ("log_probs", "entropy"):
        found[name] = np.concatenate([one.float().numpy() for one in said[name].unbind()])
    np.savez(f"{job_path}.{rank}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
