"""A whole GRPO step on a GPU, beside TRL's."""

import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .gpu import DEVICE, KNOWN, MODELS, about, begin, free
from .machine import write_result
from .models import questions, save_model
from .step import PEERS, SKIPPED, TRL_PYTHON, seconds_of

__all__ = ["run"]

TRL_ROWS = (64, 32, 16)
"""At once; the fastest of those that fit counts."""


def step(directory: Path, quick: bool) -> dict[str, Any]:
    """Seconds of a GRPO step of this project and of TRL, one after the other."""
    task = {
        "questions": questions(64, 0 if quick else 300),
        "prompts_per_step": 8,
        "group_size": 8,
        "max_new_tokens": 16 if quick else 128,
        "learning_rate": 1e-6,
        "device": DEVICE,
        "max_tokens_per_batch": 4096 if quick else 16384,
    }
    (directory / "task.json").write_text(json.dumps(task))
    python = sys.executable if find_spec("trl") else str(TRL_PYTHON)
    steps = SKIPPED + (1 if quick else 3)
    own = seconds_of([sys.executable, str(PEERS / "graphpo_step.py")], directory, steps)
    result = {"seconds": own["seconds"], "runs": {"graphpo": own}} | {
        name: own[name]
        for name in ("prompt_tokens", "rollout_seconds", "update_seconds", "peak_bytes")
    }
    tried = []
    if find_spec("trl") or TRL_PYTHON.exists():
        for rows in (16,) if quick else TRL_ROWS:
            trl = [python, str(PEERS / "trl_step.py"), "--micro-batch", str(rows)]
            try:
                tried.append(seconds_of(trl, directory, steps))
            except SystemExit as error:  # more rows than fit
                print(error, flush=True)
    if tried:
        result["runs"]["trl"] = best = min(tried, key=lambda run: run["seconds"])
        result["trl ×"] = best["seconds"] / own["seconds"]
    return result


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-gpu-step``."""
    result = begin(quick, command)
    size = MODELS["tiny" if quick else "0.5B"]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        save_model(directory / "model", size, context=8192, known=KNOWN, device=DEVICE)
        free()
        result["step"] = {"model": size.name, **step(directory, quick)}
    write_result("gpu-step", result, _page(result), out)


def _page(result: Mapping[str, Any]) -> list[str]:
    one = result["step"]
    trl = one["runs"].get("trl")
    peak = (one["peak_bytes"] or 0) / 2**30
    expected = one["runs"]["graphpo"]["expected_bytes"] / 2**30
    return [
        "# A whole step on a GPU",
        about(result["machine"]),
        "",
        f"GRPO, 8 prompts of {one['prompt_tokens']:.0f} tokens × 8 completions × "
        f"{one['runs']['graphpo']['mean_length']:.0f} tokens, model "
        f"{one['model']}: **{one['seconds']:.2f} s** (rollout {one['rollout_seconds']:.2f}, "
        f"update {one['update_seconds']:.2f}); "
        + (
            f"TRL {trl['versions']['trl']} with bf16 and {trl['micro_batch']} rows at once, the "
            f"fastest of {', '.join(map(str, TRL_ROWS))} that fit, {trl['seconds']:.2f} s, "
            f"**{one['trl ×']:.1f} ×**."
            if trl
            else "TRL was not measured."
        ),
        "",
        f"Peak of memory {peak:.1f} GiB; announced before the run: {expected:.1f} GiB.",
    ]
