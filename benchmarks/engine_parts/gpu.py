"""A GPU, and models as large as people train on one: for the parts of the benchmark that need it.

Weights are float32 and products in bfloat16, as ``model.autocast`` has it.
"""

import gc
import sys
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from .machine import alternate, machine
from .models import Size

__all__ = ["DEVICE", "KNOWN", "MODELS", "about", "begin", "done", "free", "peak"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""A CPU for ``--quick`` only, to try the scripts out."""
MODELS = {
    "0.5B": Size("0.5B", 896, 24, 14, 151936, 4864, key_heads=2),
    "1.5B": Size("1.5B", 1536, 28, 12, 151936, 8960, key_heads=2),
    "tiny": Size("tiny", 64, 2, 4, 1000, 192, key_heads=2),
}
"""The shapes of Qwen2.5, random weights."""
KNOWN = 1000
"""Tokens that can be sampled; the others have probability 0, as the tokenizer knows no more."""


def begin(quick: bool, command: str) -> dict[str, Any]:
    """A result to be filled; ends the program where there is nothing to measure on."""
    if DEVICE == "cpu" and not quick:
        sys.exit("no GPU here; --quick tries the script out on a CPU")
    return {"command": command, "machine": machine() | _gpu()}


def about(m: dict[str, Any]) -> str:
    """The line of a page that says on what and with what was measured."""
    return (
        f"{m.get('gpu', 'no GPU')}, {m.get('teraflops', 0):.0f} TFLOP/s in a large product of "
        "random bfloat16 matrices. Models of Qwen2.5's shapes with random weights, in float32 with "
        "products in bfloat16."
    )


def done(call: Callable[[], Any]) -> None:
    """Call and wait until the GPU is done."""
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Give memory back and forget its peak."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> float:
    """GiB since ``free``; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0


def _gpu() -> dict[str, Any]:
    """The GPU, and what it reaches in a large product of random bfloat16 matrices."""
    if DEVICE == "cpu":
        return {}
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = partial(done, lambda: [a @ b for _ in range(10)])
    product()
    seconds = alternate({"product": product}, 3, perf_counter)["product"]
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return {
        "gpu": f"{torch.cuda.get_device_name()}, {memory:.0f} GiB",
        "teraflops": 10 * 2 * 8192**3 / seconds / 1e12,
    }
