"""On one GPU, with models as large as people train: the update, sampling, and a step beside TRL.

float32 weights whose products are in bfloat16, as ``model.autocast`` has it.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer

from . import sampling
from .machine import alternate, machine, table, write_result
from .models import Size, make_model, questions, save_model
from .rows import path_rows, train_on_rows
from .step import PEERS, SKIPPED, TRL_PYTHON, seconds_of
from .update import PROMPT, SCHEDULES, gradient, packed_pass, random_graphs, token_data, works

__all__ = ["run"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""A CPU for ``--quick`` only, to try the script out."""
MODELS = {
    "0.5B": Size("0.5B", 896, 24, 14, 151936, 4864, key_heads=2),
    "1.5B": Size("1.5B", 1536, 28, 12, 151936, 8960, key_heads=2),
    "tiny": Size("tiny", 64, 2, 4, 1000, 192, key_heads=2),
}
"""The shapes of Qwen2.5, random weights."""
MAX_TOKENS = {"0.5B": 16384, "1.5B": 8192, "tiny": 4096}
"""Tokens of a pass, of packed graphs and of rows alike: about what the memory allows."""
COMPARED = 97
"""Every so many-th number of the gradients is kept to be compared."""
KNOWN = 1000
"""Tokens that can be sampled; the others have probability 0, as the tokenizer knows no more."""


@dataclass(frozen=True, slots=True)
class Case:
    """One graph of a schedule, as one optimiser minibatch."""

    model: str
    schedule: str
    segment: int


def update_cases(quick: bool) -> list[Case]:
    """From the schedule that shares most to the one that shares least."""
    if quick:
        return [Case("tiny", "{3,3,2,2}", 8)]
    return [
        Case("0.5B", "{2,5,4,2,2}", 128),
        Case("0.5B", "{3,3,2,2}", 512),
        Case("0.5B", "8 chains", 512),
        Case("1.5B", "{2,5,4,2,2}", 128),
    ]


def update(case: Case, model: PreTrainedModel) -> dict[str, Any]:
    """Seconds of a forward and backward pass in every layout, and the peak of memory."""
    size, limit = MODELS[case.model], MAX_TOKENS[case.model]
    samples = random_graphs(SCHEDULES[case.schedule], case.segment, PROMPT, 1, size.vocabulary)
    data, rows, work = token_data(samples), path_rows(samples), works(size, samples)
    packed = partial(packed_pass, model, samples, data, limit)
    how = ComputeOptions(autocast=True)
    calls: dict[str, Callable[[], Any]] = {
        "packed": partial(packed, how),
        "paths": partial(_on_rows, model, rows, data, limit),
        "all logits": partial(_on_rows, model, rows, data, limit, every_position=True),
        "compiled": partial(packed, replace(how, compile_layers=True)),
    }
    gradients: dict[str, Tensor] = {}
    peaks: dict[str, float] = {}
    for name, call in calls.items():
        _free()
        gradients[name] = gradient(model, call)[::COMPARED].clone()
        peaks[name] = _peak()
    seconds = alternate(
        {name: partial(_done, call) for name, call in calls.items()}, 3, perf_counter
    )
    model.zero_grad(set_to_none=True)
    tokens = work["paths"].tokens / work["packed"].tokens
    flops = work["paths"].flops / work["packed"].flops
    return {
        "model": case.model,
        "schedule": case.schedule,
        "segment": case.segment,
        "tokens": work["packed"].tokens,
        "tokens ×": tokens,
        "operations ×": flops,
        "seconds": seconds,
        "peaks": peaks,
        "packed s": seconds["packed"],
        "paths ×": seconds["paths"] / seconds["packed"],
        "of operations": seconds["paths"] / seconds["packed"] / flops,
        "all logits ×": seconds["all logits"] / seconds["packed"],
        "of tokens": seconds["all logits"] / seconds["packed"] / tokens,
        "compiled s": seconds["compiled"],
        "teraflops": work["packed"].flops / seconds["packed"] / 1e12,
        "packed GiB": peaks["packed"],
        "compiled GiB": peaks["compiled"],
        "paths GiB": peaks["paths"],
        "differ": {
            name: float((g - gradients["packed"]).norm() / gradients["packed"].norm())
            for name, g in gradients.items()
        },
    }


def _on_rows(*arguments: Any, **options: Any) -> None:
    """``train_on_rows`` with products in bfloat16."""
    with torch.autocast(DEVICE, torch.bfloat16):
        train_on_rows(*arguments, **options)


def _done(call: Callable[[], Any]) -> None:
    call()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak() -> float:
    """GiB since ``_free``; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0


def sampled_cases(quick: bool) -> list[sampling.Case]:
    """The paper's schedule as a tree and as a graph, and a schedule of agents."""
    if quick:
        return [sampling.Case("tiny", (3, 2), 8, 4, merges=True)]
    paper = (2, 5, 4, 2, 2)
    return [
        sampling.Case("0.5B", paper, 32, 2, merges=False),
        sampling.Case("0.5B", paper, 32, 2, merges=True),
        sampling.Case("0.5B", (6, 2, 1, 1), 48, 16, merges=True),
    ]


def sample(case: sampling.Case, directory: Path) -> dict[str, Any]:
    """Tokens per second of the policy and of transformers' ``generate``."""
    model = load_model(str(directory), device=DEVICE)
    policy = LocalPolicy(model, HfTokenizer.load(str(directory)), 8 * 2**30, autocast=True)
    trial = sampling.Trial.of(case, policy)
    calls = trial.calls(policy)
    rates = sampling.tokens_per_second(calls, 2)
    recorded, policy._recorded = policy._recorded, None
    rates |= sampling.tokens_per_second({"not recorded": calls["graph"]}, 1)
    policy._recorded = recorded
    with torch.autocast(DEVICE, torch.bfloat16):
        theirs = {"transformers, flat": partial(trial.generate, model)}
        rates |= sampling.tokens_per_second(theirs, 1)
    ratio = rates["graph"] / rates["not recorded"]
    return trial.row(policy, rates) | {"recorded ×": ratio}


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
    commands = {
        "graphpo": [sys.executable, str(PEERS / "graphpo_step.py")],
        "trl": [python, str(PEERS / "trl_step.py"), "--micro-batch", "16"],
    }
    if not find_spec("trl") and not TRL_PYTHON.exists():
        del commands["trl"]
    steps = SKIPPED + (1 if quick else 3)
    found = {}
    for name, command in commands.items():
        try:
            found[name] = seconds_of(command, directory, steps)
        except SystemExit as error:
            if name == "graphpo":
                raise
            print(error, flush=True)
    own = found["graphpo"]
    ratio = found["trl"]["seconds"] / own["seconds"] if "trl" in found else None
    return {"seconds": own["seconds"], "trl ×": ratio, "runs": found} | {
        name: own[name]
        for name in ("prompt_tokens", "rollout_seconds", "update_seconds", "peak_bytes")
    }


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-gpu``."""
    if DEVICE == "cpu" and not quick:
        sys.exit("no GPU here; --quick tries the script out on a CPU")
    result: dict[str, Any] = {"command": command, "machine": machine() | _gpu()}
    with tempfile.TemporaryDirectory() as scratch:
        directory, size = Path(scratch), MODELS["tiny" if quick else "0.5B"]
        save_model(directory / "model", size, context=8192, known=KNOWN, device=DEVICE)
        _free()
        result["step"] = step(directory, quick)
        print(result["step"], flush=True)
        result["sampling"] = []
        for case in sampled_cases(quick):
            result["sampling"].append(sample(case, directory / "model"))
            print(result["sampling"][-1], flush=True)
            _free()
    result["update"] = []
    for name in dict.fromkeys(case.model for case in update_cases(quick)):
        model = make_model(MODELS[name], device=DEVICE)
        for case in update_cases(quick):
            if case.model == name:
                result["update"].append(update(case, model))
                print(result["update"][-1], flush=True)
        del model
        _free()
    write_result("gpu", result, _page(result), out)


def _gpu() -> dict[str, Any]:
    """The GPU, and what it reaches in a large product of random bfloat16 matrices."""
    if DEVICE == "cpu":
        return {}
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = partial(_done, lambda: [a @ b for _ in range(10)])
    product()
    seconds = alternate({"product": product}, 3, perf_counter)["product"]
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return {
        "gpu": f"{torch.cuda.get_device_name()}, {memory:.0f} GiB",
        "teraflops": 10 * 2 * 8192**3 / seconds / 1e12,
    }


def _page(result: Mapping[str, Any]) -> list[str]:
    updates, sampled, one = result["update"], result["sampling"], result["step"]
    m = result["machine"]
    worst = max(value for row in updates for value in row["differ"].values())
    compiled = max(row["differ"]["compiled"] for row in updates)
    reached = np.array([row["of operations"] for row in updates])
    trl = one["runs"].get("trl")
    peak = (one["peak_bytes"] or 0) / 2**30
    expected = one["runs"]["graphpo"]["expected_bytes"] / 2**30
    names = {
        "model": "model",
        "schedule": "schedule",
        "segment": "segment",
        "tokens": "tokens",
        "packed s": "packed (s)",
        "operations ×": "paths: operations ×",
        "paths ×": "seconds ×",
        "of operations": "of the operations' ratio",
        "tokens ×": "all logits: tokens ×",
        "all logits ×": "seconds ×",
        "of tokens": "of the tokens' ratio",
        "compiled s": "packed, compiled (s)",
        "teraflops": "TFLOP/s",
        "packed GiB": "packed (GiB)",
        "compiled GiB": "compiled (GiB)",
        "paths GiB": "paths (GiB)",
    }
    columns = {
        "model": "model",
        "schedule": "schedule",
        "method": "method",
        "prompts": "prompts",
        "generated": "tokens",
        "rows": "mean batch",
        "graph": "graph",
        "flat": "flat",
        "of flat": "graph / flat",
        "same sizes": "flat, layers' sizes",
        "of same sizes": "graph / that",
        "not recorded": "graph, not recorded",
        "recorded ×": "recorded ×",
        "transformers, flat": "transformers, flat",
        "prefilled": "prefilled",
        "unique": "unique",
    }
    return [
        "# The engine on a GPU",
        f"{m.get('gpu', 'no GPU')}, {m.get('teraflops', 0):.0f} TFLOP/s in a large product of "
        "random bfloat16 matrices. Models of Qwen2.5's shapes with random weights, in float32 with "
        "products in bfloat16.",
        "",
        "## The update",
        "",
        "Forward and backward pass of one graph, wall seconds, medians of three in turn after a "
        "first one, rows of at most "
        f"{', '.join(f'{MAX_TOKENS[n]:,} tokens ({n})' for n in {r['model']: 0 for r in updates})}"
        ". *Packed*: every token once, index building included. *Paths*: every root-to-leaf path "
        "a row of stock sdpa attention, padded rows of similar length together; only trained "
        "positions reach the output head, whose work is the same in both. *All logits*: every "
        "response token of every row does. The head's code is the same in all. *Compiled*: "
        "`update.compile_layers: true`. Memory: the peak of what torch allocated.",
        "",
        f"Share of the operations' ratio: median {np.median(reached):.0%}, least "
        f"{reached.min():.0%}. With products in bfloat16 the gradients differ from the packed "
        f"one's by at most {worst:.1%} of its norm, those of compiled layers by {compiled:.1%}.",
        "",
        *table(updates, names),
        "",
        "## Sampling",
        "",
        "Generated tokens per second of wall time. *Graph*: segment mode through the project's "
        "grower and policy, merging included. *Flat*: the same policy decodes as many tokens in "
        "one batch of as many rows as the graphs have on average. *Layers' sizes*: a flat batch "
        "for every layer. *Not recorded*: the graph without CUDA graphs. *Transformers*: "
        "`generate` of the flat batch under autocast.",
        "",
        *table(sampled, columns),
        "",
        "## A whole step",
        "",
        f"GRPO, 8 prompts of {one['prompt_tokens']:.0f} tokens × 8 completions × "
        f"{one['runs']['graphpo']['mean_length']:.0f} tokens, model "
        f"{sampled[0]['model']}: **{one['seconds']:.2f} s** (rollout {one['rollout_seconds']:.2f}, "
        f"update {one['update_seconds']:.2f}); "
        + (
            f"TRL {trl['versions']['trl']} with bf16 and 16 rows at once {trl['seconds']:.2f} s, "
            f"**{one['trl ×']:.1f} ×**."
            if trl
            else "TRL was not measured."
        ),
        "",
        f"Peak of memory {peak:.1f} GiB; announced before the run: {expected:.1f} GiB.",
    ]
