"""The update: forward and backward pass over graphs, packed and as plain rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from graphpo_agent.engines.local.flat_attention import FlatLayouts
from graphpo_agent.engines.local.forward import flat_passes, score_tokens
from graphpo_agent.engines.local.loss import Objective, clipped_objective
from graphpo_agent.engines.local.options import ComputeOptions
from graphpo_agent.engines.local.packing import PackedBatch, pack
from graphpo_agent.engines.local.token_weights import token_weights
from graphpo_agent.graph.samples import TrainingSample

from .machine import alternate, machine, table, write_result
from .models import SIZES, Size, make_model
from .rows import TokenData, edge_rows, path_rows, train_on_rows

__all__ = [
    "Case",
    "compare",
    "packed_pass",
    "random_graphs",
    "run",
    "token_data",
    "train_on_batch",
    "works",
]

SCHEDULES = {
    "{2,5,4,2,2}": (2, 5, 4, 2, 2),
    "{3,3,2,2}": (3, 3, 2, 2),
    "{6,2,1,1}": (6, 2, 1, 1),
    "8 chains": (8, 1, 1, 1),
}
SEGMENTS = (8, 32, 128, 512)
MODELS = ("0.2M", "5M", "41M")
PROMPT = 64
COMPUTE = ComputeOptions()
MAX_TOKENS = 4096
PACKED_TOKENS = (4096, 16384)
ROW_TOKENS = (2048, 8192)
"""Micro-batches of packed graphs and of rows, of which the fastest counts."""
REPEATED_FLOPS = 2.0e11
"""Cases whose paths take up to so many operations are measured three times, others once."""
LIMITS = {"paths": 8.0e11, "edges": 1.5e11}
"""A layout that takes more operations is left out; all cases together would take an hour."""
ALWAYS = ("41M", "{2,5,4,2,2}", 8)
"""The paper's schedule on the largest model, whatever it takes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the comparison: ``graphs`` graphs of a schedule, one optimiser minibatch."""

    model: str
    schedule: str
    segment: int
    graphs: int = 1


def random_graphs(
    schedule: Sequence[int], segment: int, prompt: int, count: int, vocabulary: int
) -> list[TrainingSample]:
    """Full trees of random tokens and advantages; every edge has ``segment`` trained tokens."""
    return [_random_graph(schedule, segment, prompt, vocabulary, seed) for seed in range(count)]


def _random_graph(
    schedule: Sequence[int], segment: int, prompt: int, vocabulary: int, seed: int
) -> TrainingSample:
    rng = np.random.default_rng(seed)
    parent, layer = [-1], [0]
    for branching in schedule:
        first = len(parent)
        parent += [u for u in layer for _ in range(branching)]
        layer = list(range(first, len(parent)))
    lengths = np.array([prompt] + [segment] * (len(parent) - 1))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    trained = np.arange(offsets[-1]) >= prompt
    advantages = rng.normal(size=(1, len(parent)))
    advantages[:, 0] = np.nan
    return TrainingSample(
        graph_id=f"graph {seed}",
        parent=np.array(parent),
        offsets=offsets,
        token_ids=rng.integers(0, vocabulary, offsets[-1]),
        loss_mask=trained,
        logprobs=np.where(trained, -np.log(vocabulary), np.nan).astype(np.float32),
        advantages=advantages,
    )


def token_data(samples: Sequence[TrainingSample]) -> TokenData:
    """What the objective needs, for all layouts the same."""
    loss = token_weights(samples, "edge_mean")
    return TokenData(
        np.concatenate([sample.token_ids for sample in samples]),
        loss.weights,
        loss.advantages[0],
        np.concatenate([sample.logprobs for sample in samples]).astype(np.float64),
    )


def packed_pass(
    model: PreTrainedModel,
    samples: Sequence[TrainingSample],
    data: TokenData,
    max_tokens: int = MAX_TOKENS,
    compute: ComputeOptions = COMPUTE,
) -> None:
    """Add the gradient over packed graphs."""
    with flat_passes(model, compute):
        for batch in pack(samples, max_tokens):
            train_on_batch(model, batch, data, compute)


def train_on_batch(
    model: PreTrainedModel, batch: PackedBatch, data: TokenData, compute: ComputeOptions = COMPUTE
) -> None:
    """Add the gradient over one flat row; call inside ``flat_passes(model, compute)``."""
    scores = score_tokens(model, batch, 1.0, compute)
    old, advantages, weights = (
        torch.from_numpy(values[batch.source]).to(model.device, torch.float32)
        for values in (data.old_logprobs, data.advantages, data.weights)
    )
    tokens = clipped_objective(
        scores.logprobs, old, advantages[None], scores.entropies, None, Objective()
    )
    (weights * tokens.loss).sum().backward()


def _build_indices(
    model: PreTrainedModel, samples: Sequence[TrainingSample], max_tokens: int
) -> None:
    """What a packed pass does before the model runs."""
    for batch in pack(samples, max_tokens):
        FlatLayouts(model.config, batch, model.dtype, model.device)


def gradient(model: PreTrainedModel, call: Callable[[], Any]) -> Tensor:
    """[parameters] the gradient that ``call`` adds, on its own."""
    model.zero_grad(set_to_none=True)
    call()
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)


def compare(case: Case) -> dict[str, Any]:
    """Measure one case in all layouts that fit the limit; seconds are CPU seconds of one pass."""
    size = SIZES[case.model]
    model = make_model(size)
    samples = _samples(case.schedule, case.segment, case.graphs, case.model)
    data = token_data(samples)
    work = works(size, samples)
    trials = {str(n): partial(packed_pass, model, samples, data, n) for n in PACKED_TOKENS}
    row_tokens = _fastest(trials)
    calls: dict[str, Callable[[], Any]] = {
        "packed": partial(packed_pass, model, samples, data, row_tokens)
    }
    for name, rows in (("paths", path_rows(samples)), ("edges", edge_rows(samples))):
        if name == "paths" or work[name].flops <= LIMITS[name]:
            limits = {str(n): partial(train_on_rows, model, rows, data, n) for n in ROW_TOKENS}
            limit = _fastest(limits)
            calls[name] = partial(train_on_rows, model, rows, data, limit)
            if name == "paths":
                calls["paths, all logits"] = partial(
                    train_on_rows, model, rows, data, limit, every_position=True
                )
    gradients = {name: gradient(model, call) for name, call in calls.items()}
    small = work["paths"].flops <= REPEATED_FLOPS
    times = alternate(calls, repeats=3 if small else 1)
    indexing = alternate({"": partial(_build_indices, model, samples, row_tokens)}, repeats=3)[""]
    return {
        "model": case.model,
        "schedule": case.schedule,
        "segment": case.segment,
        "graphs": case.graphs,
        "tokens": work["packed"].tokens,
        "seconds": times,
        "index share": indexing / times["packed"],
        "gflops": work["packed"].flops / times["packed"] / 1e9,
        **_ratios(work, times),
        "gradient error": max(
            float((g - gradients["packed"]).norm() / gradients["packed"].norm())
            for g in gradients.values()
        ),
    }


@dataclass(frozen=True, slots=True)
class Work:
    """What one pass over a layout computes: tokens, and operations in all and in attention."""

    tokens: int
    flops: float
    attention: float


def works(size: Size, samples: Sequence[TrainingSample]) -> dict[str, Work]:
    """By layout; only trained positions go to the output head in all of them."""
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    lengths = {
        "paths": np.array([len(row.source) - 1 for row in path_rows(samples)]),
        "edges": np.array([len(row.source) - 1 for row in edge_rows(samples)]),
    }
    counts = {name: (int(n.sum()), int((n * (n + 1) // 2).sum())) for name, n in lengths.items()}
    positions = [batch.position_ids for batch in pack(samples, max(PACKED_TOKENS))]
    counts["packed"] = sum(map(len, positions)), sum(int((p + 1).sum()) for p in positions)
    found = {}
    for name, (tokens, pairs) in counts.items():
        attending = 12.0 * size.layers * size.hidden * pairs
        others = 6.0 * (size.matrices * tokens + size.vocabulary * size.hidden * trained)
        found[name] = Work(tokens, others + attending, attending)
    return found


def _fastest(trials: Mapping[str, Callable[[], Any]]) -> int:
    """The fastest micro-batch of those tried, by name.

    The trials warm up, too: in its first pass a layout maps its buffers, up to a quarter longer.
    """
    times = alternate(trials, repeats=1)
    return int(min(times, key=lambda name: times[name]))


def _ratios(work: Mapping[str, Work], times: Mapping[str, float]) -> dict[str, float]:
    """Rows over packed: in tokens, in operations, in seconds."""
    ratios: dict[str, float] = {}
    for name in ("paths", "edges"):
        ratios[f"{name}: tokens"] = work[name].tokens / work["packed"].tokens
        ratios[f"{name}: operations"] = work[name].flops / work["packed"].flops
    for name in times:
        if name != "packed":
            ratios[f"{name}: seconds"] = times[name] / times["packed"]
    ratios["reached"] = ratios["paths: seconds"] / ratios["paths: tokens"]
    if "paths, all logits" in times:
        usual = ratios["paths, all logits: seconds"]
        ratios["reached, all logits"] = usual / ratios["paths: tokens"]
    return ratios


def cases(quick: bool) -> Iterator[tuple[Case, bool]]:
    """All points and whether they are measured; small ones in minibatches of several graphs."""
    models, segments = (("0.2M",), (8, 32)) if quick else (MODELS, SEGMENTS)
    for model in models:
        for schedule in SCHEDULES:
            for segment in segments:
                graphs = 4 if model == "0.2M" and segment <= 32 and not quick else 1
                flops = works(SIZES[model], _samples(schedule, segment, graphs, model))
                measured = flops["paths"].flops <= LIMITS["paths"]
                case = Case(model, schedule, segment, graphs)
                yield case, measured or (model, schedule, segment) == ALWAYS


def _samples(schedule: str, segment: int, graphs: int, model: str) -> list[TrainingSample]:
    vocabulary = SIZES[model].vocabulary
    return random_graphs(SCHEDULES[schedule], segment, PROMPT, graphs, vocabulary)


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-update``."""
    result: dict[str, Any] = {"command": command, "machine": machine(), "rows": [], "left_out": []}
    for case, measured in cases(quick):
        if not measured:
            result["left_out"].append(f"{case.model} {case.schedule} {case.segment}")
            continue
        row = compare(case)
        print(f"{case}: {row['paths: seconds']:.2f} x", flush=True)
        result["rows"].append(row)
    write_result("update", result, _page(result), out)


def _page(result: dict[str, Any]) -> list[str]:
    rows = result["rows"]
    reached = np.array([row["reached"] for row in rows])
    possible = np.array([row["paths: seconds"] / row["paths: operations"] for row in rows])
    largest = np.array([row["reached"] for row in rows if row["model"] == rows[-1]["model"]])
    usual = np.array([row["reached, all logits"] for row in rows if "reached, all logits" in row])
    names = {
        "model": "model",
        "schedule": "schedule",
        "segment": "segment",
        "graphs": "graphs",
        "tokens": "tokens",
        "packed s": "packed (s)",
        "paths: tokens": "paths: tokens ×",
        "paths: operations": "operations ×",
        "paths: seconds": "seconds ×",
        "reached": "of the tokens' ratio",
        "paths, all logits: seconds": "all logits: seconds ×",
        "reached, all logits": "of the tokens' ratio",
        "edges: tokens": "edges: tokens ×",
        "edges: seconds": "seconds ×",
        "index share": "index building",
        "gflops": "GFLOP/s",
        "gradient error": "gradients differ by",
    }
    shown = [row | {"packed s": row["seconds"]["packed"]} for row in rows]
    left_out = "; ".join(result["left_out"]) or "nothing"
    return [
        "# The update: every shared token once, against plain rows",
        "Forward and backward pass of one minibatch of random graphs, CPU seconds of one thread, "
        "each layout warmed up, medians of three runs in turn (one run where a pass over the paths "
        f"takes more than {REPEATED_FLOPS:.0e} operations). *Packed*: `pack`, its index building "
        "included, and the flat attention. *Paths*: every root-to-leaf path one row, each edge's "
        "loss once, stock sdpa attention, rows sorted and micro-batched (the fastest of "
        f"{', '.join(map(str, ROW_TOKENS))} tokens; packed likewise of "
        f"{', '.join(map(str, PACKED_TOKENS))}); *edges*: one row for each edge. In these "
        "three only trained positions reach the output head, whose work is thus the same and "
        "bounds what packing can gain (*operations ×*). *All logits*: paths whose every response "
        "token reaches the head, as trainers of plain rows do it. × is rows over packed. "
        "The 41M model has the proportions of Qwen2.5-7B, whose head takes 8 % of a token's "
        "products with weights; in the smaller models it takes 38 %.",
        "",
        f"Share of the operations' ratio: median {np.median(possible):.0%}, least "
        f"{possible.min():.0%}. Share of the token ratio: median {np.median(reached):.0%}, least "
        f"{reached.min():.0%}; of the largest model median {np.median(largest):.0%} "
        f"(all logits: median {np.median(usual):.0%}, least {usual.min():.0%}); packing is "
        f"slower than paths in {sum(row['paths: seconds'] < 1 for row in rows)} of {len(rows)} "
        f"cases; gradients agree to {max(row['gradient error'] for row in rows):.0e}. "
        f"Left out, more than {LIMITS['paths']:.1e} operations over the paths: {left_out}. "
        f"A dash: not measured, for edges' rows above {LIMITS['edges']:.1e} operations.",
        "",
        *table(shown, names),
    ]
