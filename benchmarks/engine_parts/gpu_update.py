"""The update on a GPU: packed graphs against paths, with models as large as people train."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphpo_agent.engines.local.options import ComputeOptions

from .gpu import DEVICE, MODELS, about, begin, done, free, peak
from .machine import alternate, table, write_result
from .models import make_model
from .rows import path_rows, train_on_rows
from .update import PROMPT, SCHEDULES, gradient, packed_pass, random_graphs, token_data, works

__all__ = ["run"]

MAX_TOKENS = {"0.5B": 16384, "1.5B": 8192, "tiny": 4096}
"""Tokens of a pass, of packed graphs and of rows alike: about what the memory allows."""
COMPARED = 97
"""Every so many-th number of the gradients is kept to be compared."""


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
        free()
        gradients[name] = gradient(model, call)[::COMPARED].clone()
        peaks[name] = peak()
    seconds = alternate(
        {name: partial(done, call) for name, call in calls.items()}, 3, perf_counter
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


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-gpu-update``, again after every case."""
    result = begin(quick, command)
    result["update"] = []
    for name in dict.fromkeys(case.model for case in update_cases(quick)):
        model = make_model(MODELS[name], device=DEVICE)
        for case in update_cases(quick):
            if case.model == name:
                result["update"].append(update(case, model))
                write_result("gpu-update", result, _page(result), out)
        del model
        free()


def _page(result: Mapping[str, Any]) -> list[str]:
    updates = result["update"]
    worst = max(value for row in updates for value in row["differ"].values())
    compiled = max(row["differ"]["compiled"] for row in updates)
    reached = np.array([row["of operations"] for row in updates])
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
    return [
        "# The update on a GPU",
        about(result["machine"]),
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
    ]
