"""Attention of the sampler's rows: read in the pool, or copied to shelves as on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphpo_agent.engines.local.cache import KVPool, KVShape
from graphpo_agent.engines.local.kv_layers import KVLayer
from graphpo_agent.engines.local.paged_rows import PagedRows
from graphpo_agent.engines.local.running_rows import RunningRows
from graphpo_agent.engines.local.scoring import Scoring
from graphpo_agent.engines.local.shelves import Shelves
from graphpo_agent.graph.arrays import IntArray

from .machine import alternate, machine, table, write_result
from .models import SIZES

__all__ = ["run"]

PROMPT = 64


@dataclass(frozen=True, slots=True)
class Case:
    """``prompts`` trees of a schedule; a schedule of one number is a flat batch."""

    model: str
    schedule: tuple[int, ...]
    segment: int
    prompts: int


class Growth:
    """Grows the rows of a case without a model: random queries, keys and values."""

    def __init__(self, case: Case, in_pool: bool) -> None:
        size = SIZES[case.model]
        dim = size.hidden // size.heads
        self.kv = KVLayer(size.key_heads or size.heads, dim, dim)
        layers = tuple(range(size.layers))
        self.shape = KVShape((self.kv,) * size.layers, layers, torch.float32, torch.device("cpu"))
        self.num_heads = size.heads
        self.pool = KVPool(self.shape, by_layer=in_pool)
        rows = PagedRows(self.pool) if in_pool else Shelves(self.shape, self.pool, 2**40)
        self.rows: RunningRows = rows
        self.case = case
        self.paths: list[IntArray] = [self.pool.allocate(PROMPT) for _ in range(case.prompts)]
        for branching in case.schedule[:-1]:
            self.paths = self.layer(branching)

    def layer(self, branching: int) -> list[IntArray]:
        """One layer, token by token; returns the pool slots of its paths."""
        prefixes = [path for path in self.paths for _ in range(branching)]
        members = np.arange(len(prefixes))
        new = self.case.segment + 1  # the last token drawn is not computed
        columns = np.array([self.rows.columns(len(path), new) for path in prefixes])
        self.rows.add(members, prefixes, columns)
        made = torch.randn(len(prefixes), self.num_heads, self.kv.key_dim)
        tokens = made[:, : self.kv.num_heads]
        scoring = Scoring(self.kv.key_dim**-0.5)
        for _ in range(self.case.segment):
            self.rows.begin()
            self.rows.look()
            for layer in self.shape.source:
                self.rows.attend(layer, made, tokens, tokens, scoring)
        own = self.rows.end(np.ones(len(prefixes), np.bool_))
        return [np.concatenate(both) for both in zip(prefixes, own, strict=True)]

    def last_layer(self) -> None:
        """The last layer, whose slots are free again afterwards: every time it is the same."""
        used = self.pool._used
        self.layer(self.case.schedule[-1])
        self.pool._used = used


@torch.inference_mode()
def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Microseconds a token of the last layer, its rows begun and ended included."""
    grown = {"pool": Growth(case, in_pool=True), "shelves": Growth(case, in_pool=False)}
    calls = {name: growth.last_layer for name, growth in grown.items()}
    for call in calls.values():  # compiles, and gets the memory
        call()
    seconds = alternate(calls, repeats)
    rows = len(grown["pool"].paths) * case.schedule[-1]
    tokens = rows * case.segment
    return {
        "model": case.model,
        "schedule": "{" + ",".join(map(str, case.schedule)) + "}",
        "segment": case.segment,
        "rows": rows,
        "path": PROMPT + case.segment * len(case.schedule),
        **{name: 1e6 * value / tokens for name, value in seconds.items()},
        "times": seconds["shelves"] / seconds["pool"],
    }


def cases(quick: bool) -> Sequence[Case]:
    """Layers of graphs and, with as many rows and as long paths, flat batches."""
    if quick:
        return [Case("0.2M", (2, 3), 8, 2)]
    paper = (2, 5, 4, 2, 2)
    graphs = [("0.2M", 6), ("5M", 1)]
    return [
        case
        for model, prompts in graphs
        for case in (
            Case(model, paper, 16, prompts),
            Case(model, paper, 64, prompts),
            Case(model, (6, 2, 1, 1), 24, 16 if model == "0.2M" else 4),
            Case(model, (1,), 80, 960 if model == "0.2M" else 160),
            Case(model, (1,), 80, 64),
        )
    ]


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-rows-attention``."""
    result: dict[str, Any] = {"command": command, "machine": machine(), "rows": []}
    for case in cases(quick):
        row = measure(case, 1 if quick else 3)
        print(
            f"{row['model']} {row['schedule']} {row['segment']}: {row['times']:.2f} ×", flush=True
        )
        result["rows"].append(row)
    write_result("rows-attention", result, _page(result), out)


def _page(result: dict[str, Any]) -> list[str]:
    names = {
        "model": "model",
        "schedule": "schedule",
        "segment": "segment",
        "rows": "rows",
        "path": "path",
        "pool": "read in the pool (µs a token)",
        "shelves": "copied to shelves (µs a token)",
        "times": "×",
    }
    return [
        "# The rows of the sampler: read where they lie, or copied",
        "The last layer of a schedule, token by token, without a model: random queries, keys and "
        f"values of the model's layers and heads behind prompts of {PROMPT} tokens, float32; rows "
        "begun, written and ended included. CPU microseconds a token of all layers, medians of "
        "runs in turn. *Read in the pool*: `PagedRows`, what the local engine does on a CPU. "
        "*Copied to shelves*: `Shelves`, padded rows in torch's attention kernel, what it does on "
        "a GPU and in 16 bits. {1} is a flat batch, whose rows share nothing.",
        "",
        *table(result["rows"], names),
    ]
