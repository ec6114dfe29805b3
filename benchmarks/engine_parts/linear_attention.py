"""Linear attention layers: the update over graphs and over paths, and sampling."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from graphpo_agent.engines.local.forward import flat_passes
from graphpo_agent.engines.local.packing import PackedBatch

from . import sampling
from .machine import alternate, machine, table, write_result
from .models import SIZES, make_model
from .rows import Row, TokenData, path_rows, train_on_rows
from .update import (
    COMPUTE,
    PROMPT,
    SCHEDULES,
    gradient,
    packed_pass,
    random_graphs,
    token_data,
    train_on_batch,
)

__all__ = ["paths_pass", "run"]

SMALL = ("0.3M, delta nets", "0.3M, Mamba-2", "0.3M, convolutions")
LARGER = ("6M, delta nets",)
SEGMENTS = (8, 32, 128)
ROW_TOKENS = 8192
"""Of a packed row and of a micro-batch of paths."""
MOST_TOKENS = 80_000, 16_000
"""A case of more tokens over its paths is left out, with a small model and a larger one."""


def compare(name: str, schedule: str, segment: int) -> dict[str, Any] | None:
    """Seconds of one graph in every layout; None: it takes too long."""
    size = SIZES[name]
    model = make_model(size)
    samples = random_graphs(SCHEDULES[schedule], segment, PROMPT, 1, size.vocabulary)
    data, rows = token_data(samples), path_rows(samples)
    path_tokens = sum(len(row.source) - 1 for row in rows)
    if path_tokens > MOST_TOKENS[name in LARGER]:
        return None
    calls: dict[str, Callable[[], Any]] = {
        "packed": partial(packed_pass, model, samples, data, ROW_TOKENS),
        "paths": partial(paths_pass, model, rows, data),
        "transformers": partial(train_on_rows, model, rows, data, ROW_TOKENS),
    }
    gradients = {name: gradient(model, call) for name, call in calls.items()}
    times = alternate(calls, repeats=3)
    ratio = path_tokens / (len(samples[0].token_ids) - _leaves(SCHEDULES[schedule]))
    return {
        "model": name,
        "schedule": schedule,
        "segment": segment,
        "seconds": times,
        "packed": times["packed"],
        "tokens": ratio,
        "paths": times["paths"] / times["packed"],
        "reached": times["paths"] / times["packed"] / ratio,
        "transformers": times["transformers"] / times["packed"],
        "gradient error": max(
            float((g - gradients["packed"]).norm() / gradients["packed"].norm())
            for g in gradients.values()
        ),
    }


def _leaves(schedule: Sequence[int]) -> int:
    """Their last tokens predict nothing and are not computed."""
    return int(np.prod(schedule))


def paths_pass(model: PreTrainedModel, rows: Sequence[Row], data: TokenData) -> None:
    """Add the gradient over whole paths by the packed layout's code, nothing shared."""
    waiting = list(rows)
    with flat_passes(model, COMPUTE):
        while waiting:
            count = max(1, ROW_TOKENS // max(len(row.source) for row in waiting))
            train_on_batch(model, _unshared(waiting[:count], data), data)
            waiting = waiting[count:]


def _unshared(rows: Sequence[Row], data: TokenData) -> PackedBatch:
    """Rows one after another as a flat row of chains."""
    lengths = np.array([len(row.source) - 1 for row in rows])
    ends = np.cumsum(lengths)
    starts = np.repeat(ends - lengths, lengths)
    places = np.arange(ends[-1])
    trained = [np.flatnonzero(row.trained) for row in rows]
    source = np.concatenate([row.source[own] for row, own in zip(rows, trained, strict=True)])
    predictors = np.concatenate(
        [start + own - 1 for start, own in zip(ends - lengths, trained, strict=True)]
    )
    return PackedBatch(
        token_ids=data.token_ids[np.concatenate([row.source[:-1] for row in rows])],
        position_ids=places - starts,
        previous=np.where(places == starts, -1, places - 1),
        exits=np.repeat(ends, lengths),
        target_ids=data.token_ids[source],
        predictors=predictors,
        target_of=np.arange(len(source)),
        source=source,
    )


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-linear-attention``."""
    result: dict[str, Any] = {
        "command": command,
        "machine": machine(),
        "update": [],
        "sampling": [],
    }
    for name in SMALL[:1] if quick else (*SMALL, *LARGER):
        for schedule in SCHEDULES:
            for segment in SEGMENTS[:1] if quick else SEGMENTS:
                row = compare(name, schedule, segment)
                if row is not None:
                    print(f"{name} {schedule} {segment}: {row['paths']:.2f} x", flush=True)
                    result["update"].append(row)
    cases = [
        *(sampling.Case(name, (2, 5, 4, 2, 2), 16, 8, merges=False) for name in SMALL),
        *(sampling.Case(name, (6, 2, 1, 1), 24, 16, merges=False) for name in SMALL),
        *(sampling.Case(name, (6, 2, 1, 1), 24, 8, merges=False) for name in LARGER),
    ]
    with tempfile.TemporaryDirectory() as directory:
        for case in cases[:1] if quick else cases:
            row = sampling.measure(case, 1 if quick else 3, Path(directory))
            print(f"{row['model']} {row['schedule']}: {row['of flat']:.0%} of flat", flush=True)
            result["sampling"].append(row)
    write_result("linear-attention", result, _page(result), out)


def _page(result: dict[str, Any]) -> list[str]:
    update = {
        "model": "model",
        "schedule": "schedule",
        "segment": "segment",
        "packed": "packed (s)",
        "tokens": "paths: tokens ×",
        "paths": "seconds ×",
        "reached": "of the tokens' ratio",
        "transformers": "transformers' layers: seconds ×",
        "gradient error": "gradients differ by",
    }
    drawing = {
        "model": "model",
        "schedule": "schedule",
        "segment": "segment",
        "prompts": "prompts",
        "generated": "tokens",
        "graph": "graph",
        "flat": "flat",
        "of flat": "graph / flat",
        "transformers, flat": "transformers, flat",
        "transformers, graph": "transformers, graph",
        "prefilled": "prefilled",
        "unique": "unique",
    }
    return [
        "# Linear attention layers: every shared token once",
        "Random models in which three of four layers are no attention: gated delta nets (those of "
        "Qwen3.5), Mamba-2 (Granite 4) or short convolutions (LFM2). "
        "**Update**: forward and backward pass of one random graph behind a prompt of "
        f"{PROMPT} tokens, CPU seconds of one thread, medians of three runs in turn. *Packed*: "
        "every token once, states carried from run to run. *Paths*: every root-to-leaf path by the "
        "same code, nothing shared, each edge's loss once. *Transformers' layers*: these paths as "
        "padded rows of the stock model, whose layers compute in torch on a CPU (its fast kernels "
        f"are a GPU's). Micro-batches of {ROW_TOKENS:,} tokens. × is over packed.",
        "",
        *table(result["update"], update),
        "",
        "**Sampling**: generated tokens per second of wall time, medians of runs in turn; every "
        "length is known. *Graph*: segment mode through the project's grower and policy, nothing "
        "merged. *Flat*: the same policy, as many tokens in one batch of as many rows as the "
        "graphs have on average. *Transformers*: `generate`, left-padded, for the flat batch and "
        "for the tree layer by layer with whole prefixes.",
        "",
        *table(result["sampling"], drawing),
    ]
