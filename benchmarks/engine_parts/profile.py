"""Where the time of a training step goes: the kb world at the quickstart's size.

A timer interrupts the run a thousand times a second of CPU; the time since the last interruption
goes to what is running then. Nothing else slows the run down, so Python is not made to look dearer
than it is, as it is by a tracing profiler.
"""

import json
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from graphpo_agent import commands
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import dump_config, load_config
from graphpo_agent.report.console import RunConsole
from graphpo_agent.report.run_dir import RunDirectory
from graphpo_agent.train import prepare, train

from .machine import ROOT, machine, table, write_result

__all__ = ["StackTimer", "run"]

STEPS, SFT_STEPS = 12, 500
INTERVAL = 0.001

RULES = (
    ("tools and retrieval", "/tools/"),
    ("tools and retrieval", "/retrievers/"),
    ("tokenizer", "/engines/tokenizer.py"),
    ("reward and state keys", "/graphpo_agent/rewards/"),
    ("graph core: merging, budget, credit", "/graphpo_agent/graph/"),
    ("graph core: merging, budget, credit", "/graphpo_agent/methods/"),
    ("checkpoints", "/engines/local/checkpoint.py"),
    ("optimiser", "/engines/local/optimizer.py"),
    ("index building", "/engines/local/packing.py"),
    ("index building", "/engines/local/parts.py"),
    ("index building", "/engines/local/pieces.py"),
    ("index building", "/engines/local/shared_tokens.py"),
    ("drawing tokens", "/engines/local/drawing.py"),
    ("keys and values moved", "/engines/local/cache.py"),
    ("weights copied for sampling", "/engines/local/sampling_weights.py"),
)
"""The innermost of the run's own files that has a rule decides, model code below it aside."""

MODEL = ("/site-packages/transformers/", "/torch/nn/modules/module.py")
"""What torch calls of transformers is a forward pass."""
PASSES = ("/engines/local/forward.py", "/engines/local/head.py", "/torch/autograd/")
"""What is the model's work beside its layers."""
BOOKKEEPING = (
    ("bookkeeping: sampler", "/engines/local/"),
    ("bookkeeping: growing, agents", "/graphpo_agent/rollout/"),
    ("bookkeeping: growing, agents", "/asyncio/"),
    ("bookkeeping: metrics and files", "/graphpo_agent/"),
)


class StackTimer:
    """Adds up CPU seconds by category while started.

    Attributes:
        seconds: by category.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        """Begin to count, from now."""
        self._last = time.thread_time()
        signal.signal(signal.SIGPROF, self._tick)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)

    def stop(self) -> None:
        """Count no more."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)

    def _tick(self, _: int, frame: FrameType | None) -> None:
        now = time.thread_time()
        self.seconds[category(_files(frame))] += now - self._last
        self._last = now


def category(files: list[str]) -> str:
    """What a stack of file names, innermost first, is doing."""
    own = [i for i, file in enumerate(files) if _matches(file, RULES)]
    called, caller = MODEL
    in_model = any(called in inner and caller in outer for inner, outer in pairwise(files))
    rule = _matches(files[own[0]], RULES) if own else None
    if in_model and rule in (None, "keys and values moved"):
        return f"model: {_phase(files)}"
    if rule is not None:
        return rule
    if any(part in file for file in files for part in PASSES):
        return f"model: {_phase(files)}"
    for file in files:
        if (found := _matches(file, BOOKKEEPING)) is not None:
            return "update: objective" if file.endswith(("/loss.py", "local/engine.py")) else found
    return "bookkeeping: metrics and files"


def _phase(files: list[str]) -> str:
    return "sampling" if any("/local/sampler.py" in file for file in files) else "update"


def _matches(file: str, rules: tuple[tuple[str, str], ...]) -> str | None:
    return next((name for name, part in rules if part in file), None)


def _files(frame: FrameType | None) -> list[str]:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files


class _Console(RunConsole):
    """Starts the timer after the first step, in which everything is called for the first time."""

    def __init__(self, timer: StackTimer) -> None:
        super().__init__()
        self._timer = timer

    def step(self, metrics: Mapping[str, float]) -> None:
        if metrics["step"] == 1:
            self._timer.start()


def world(quick: bool, scratch: Path) -> Path:
    """The quickstart's world and policy: those it left, or new ones."""
    left = ROOT / "worlds" / "kb-0"
    if (left / "policy" / "config.json").exists():
        return left
    made = scratch / "kb"
    commands.toy("kb", str(made), ["seed=0"])
    overrides = [
        f"demonstrations={made}/demonstrations.jsonl",
        f"model.path={made}/untrained",
        f"output={made}/policy",
        f"steps={50 if quick else SFT_STEPS}",
    ]
    commands.sft(str(ROOT / "configs" / "toy" / "kb_sft.yaml"), overrides)
    return made


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-profile``."""
    described = machine()
    timer = StackTimer()
    with tempfile.TemporaryDirectory() as scratch:
        directory = world(quick, Path(scratch))
        overrides = [
            f"output={scratch}/run",
            f"model.path={directory}/policy",
            f"tasks.train={directory}/train.jsonl",
            "tasks.heldout=null",
            f"mode.tools.search.retriever.directory={directory}/index",
            f"train.steps={3 if quick else STEPS}",
        ]
        config = load_config(RunConfig, ROOT / "configs" / "toy" / "kb.yaml", overrides)
        setup = prepare(config)
        directory = RunDirectory.create(Path(config.output), dump_config(config), 0, [command])
        train(config, setup, directory, _Console(timer), resume=False)
        timer.stop()
        steps = [json.loads(line) for line in directory.metrics_path.read_text().splitlines()]
    total = sum(timer.seconds.values())
    rows = [
        {"what": name, "seconds": seconds / (len(steps) - 1), "share": f"{seconds / total:.1%}"}
        for name, seconds in sorted(timer.seconds.items(), key=lambda each: -each[1])
    ]
    result = {
        "command": command,
        "machine": described,
        "steps": len(steps) - 1,
        "seconds": dict(timer.seconds),
        "bookkeeping": _bookkeeping(timer.seconds),
        "step_seconds": statistics.median(
            row["time/rollout"] + row["time/update"] for row in steps[1:]
        ),
        "prefilled": sum(row["tokens/prefill_computed"] for row in steps),
        "unique": sum(row["tokens/prefilled"] for row in steps),
        "rows": rows,
    }
    write_result("profile", result, _page(result), out)


def _bookkeeping(seconds: Mapping[str, float]) -> float:
    kept = sum(value for name, value in seconds.items() if name.startswith("bookkeeping"))
    return kept / sum(seconds.values())


def _page(result: dict[str, Any]) -> list[str]:
    names = {"what": "", "seconds": "CPU seconds a step", "share": "share"}
    return [
        "# Where the time of a training step goes",
        f"`configs/toy/kb.yaml` as the quickstart runs it, evaluation left out; {result['steps']} "
        "steps after the first, a checkpoint at each. CPU time of the main thread, by what it was "
        "doing at a thousand interruptions a second. *Model*: forward and backward passes, "
        "attention and output head included.",
        "",
        f"Rollout and update of a step: {result['step_seconds']:.2f} s (median, wall). Python "
        f"bookkeeping: **{result['bookkeeping']:.1%}**. Prompt and observation tokens prefilled: "
        f"{result['prefilled']:,}; those the graphs hold: {result['unique']:,.0f}.",
        "",
        *table(result["rows"], names),
    ]
