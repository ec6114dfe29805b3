"""One rank of an FSDP engine of verl's with given rows; ``test_engine.py`` runs it as a program.

    python -m tests.engines.verl.engine_rank JOB.json RANK

What it finds is written beside the job.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import distribute_tensor

from benchmarks.engine_parts.verl import make_engine, make_loss, row_batch


def main(job_path: str, rank: str) -> None:
    job = json.loads(Path(job_path).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group(
        "gloo", f"file://{job_path}.store", rank=int(rank), world_size=job["ranks"]
    )
    rank_of_adapters = job.get("lora_rank", 0)
    precision = job.get("precision", "fp32")
    engine = make_engine(
        job["model"], job["shares"], job["checkpointing"], rank_of_adapters, precision
    )
    if rank_of_adapters:
        move_adapters(engine.module)
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
    if job["shares"]:
        found |= {f"served/{name}": w.numpy() for name, w in engine.get_per_tensor_param()[0]}
    if rank_of_adapters:
        found |= adapters_of(engine.module)
        engine.save_checkpoint(f"{job_path}.saved")
        with engine.eval_mode(), engine.disable_adapter():
            bare = engine.infer_batch(data.copy(), loss_function=None)["model_output"]
        found["bare"] = np.concatenate([one.float().numpy() for one in bare["log_probs"].unbind()])
        move_adapters(engine.module)  # elsewhere
        engine.load_checkpoint(f"{job_path}.saved")
        again = adapters_of(engine.module)
        assert all(np.array_equal(found[name], again[name]) for name in again)
    np.savez(f"{job_path}.{rank}.npz", **found)


def move_adapters(module: torch.nn.Module) -> None:
    """Give adapters other values, the same on every rank."""
    for name, weight in module.named_parameters():
        if ".lora_" in name:
            values = 0.1 * torch.randn(weight.shape)
            weight.data.copy_(distribute_tensor(values, weight.device_mesh, weight.placements))


def adapters_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """The adapters' values."""
    return {
        f"value/{name}": weight.data.full_tensor().numpy()
        for name, weight in module.named_parameters()
        if ".lora_" in name
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
