"""Sampling on a GPU: growing graphs against flat batch decoding and transformers' generate."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer

from . import sampling
from .gpu import DEVICE, KNOWN, MODELS, about, begin, free
from .machine import table, write_result
from .models import save_model

__all__ = ["run"]


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


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-gpu-sampling``, again after every case."""
    result = begin(quick, command)
    result["sampling"] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        size = MODELS["tiny" if quick else "0.5B"]
        save_model(directory, size, context=8192, known=KNOWN, device=DEVICE)
        free()
        for case in sampled_cases(quick):
            result["sampling"].append(sample(case, directory))
            write_result("gpu-sampling", result, _page(result), out)
            free()


def _page(result: Mapping[str, Any]) -> list[str]:
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
        "# Sampling on a GPU",
        about(result["machine"]),
        "",
        "Generated tokens per second of wall time. *Graph*: segment mode through the project's "
        "grower and policy, merging included. *Flat*: the same policy decodes as many tokens in "
        "one batch of as many rows as the graphs have on average. *Layers' sizes*: a flat batch "
        "for every layer. *Not recorded*: the graph without CUDA graphs. *Transformers*: "
        "`generate` of the flat batch under autocast.",
        "",
        *table(result["sampling"], columns),
    ]
