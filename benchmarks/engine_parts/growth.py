"""How time and peak memory grow with graph size, segment length, batch and model."""

import gc
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from graphpo_agent.engines.local.model import load_model
from graphpo_agent.engines.local.sampler import LocalPolicy
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.report.plots import COLORS, STYLE

from . import sampling
from .machine import alternate, machine, slope, table, write_result
from .models import SIZES, make_model, save_model
from .update import packed_pass, random_graphs, token_data, works

__all__ = ["Point", "run"]

PROMPT = 32
REPEATED_S = 3.0
"""A point that takes less is measured three times more, warm."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured: ``prompts`` graphs of schedule {``first``, 3, 2, 2}."""

    first: int = 3
    segment: int = 16
    prompts: int = 4
    model: str = "0.2M"

    @property
    def schedule(self) -> tuple[int, ...]:
        """Branching by layer."""
        return (self.first, 3, 2, 2)

    @property
    def tokens(self) -> int:
        """Tokens of all edges."""
        return self.prompts * 22 * self.first * self.segment


BASE = Point()
AXES: dict[str, tuple[Point, ...]] = {
    "graph size": tuple(replace(BASE, first=first) for first in (2, 8, 32, 128)),
    "segment length": tuple(replace(BASE, segment=length) for length in (8, 32, 128, 512)),
    "batch": tuple(replace(BASE, prompts=count) for count in (1, 4, 16, 64)),
    "model": tuple(replace(BASE, model=name) for name in SIZES),
}


def measure(kind: str, point: Point, directory: Path) -> dict[str, float]:
    """CPU seconds, and the peak of resident memory above that of the loaded model (MB).

    To be run in a process of its own: memory that a former point left behind would be reused.
    """
    torch.set_num_threads(1)
    call = _update(point) if kind == "update" else _sampling(point, directory)
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    started = process_time()
    call()
    seconds = process_time() - started
    peak = _status("VmHWM") - before
    if seconds < REPEATED_S:
        seconds = alternate({"it": call}, repeats=3)["it"]
    return {"seconds": seconds, "megabytes": peak}


def _update(point: Point) -> Callable[[], Any]:
    size = SIZES[point.model]
    model = make_model(size)
    samples = random_graphs(point.schedule, point.segment, PROMPT, point.prompts, size.vocabulary)
    data = token_data(samples)
    small = random_graphs((2,), 8, 8, 1, size.vocabulary)
    packed_pass(model, small, token_data(small))  # what is loaded at the first call
    model.zero_grad(set_to_none=True)
    return lambda: packed_pass(model, samples, data)


def _sampling(point: Point, directory: Path) -> Callable[[], Any]:
    path = str(directory / point.model)
    policy = LocalPolicy(load_model(path), HfTokenizer.load(path))
    small = sampling.workload(sampling.Case(point.model, (2,), 4, 1, merges=False))
    sampling.grow(small, policy)
    case = sampling.Case(point.model, point.schedule, point.segment, point.prompts, merges=False)
    work = sampling.workload(case)
    return lambda: sampling.grow(work, policy)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1000


def run(quick: bool, out: Path, command: str) -> None:
    """Measure and write ``engine-growth`` and its figure."""
    result: dict[str, Any] = {"command": command, "machine": machine(), "rows": []}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        for name, size in SIZES.items():
            save_model(Path(scratch) / name, size, context=4096)
        for axis, points in AXES.items():
            for point in points[:2] if quick else points:
                row = {"axis": axis} | _described(point, axis)
                for kind in ("update", "sampling"):
                    with context.Pool(1) as pool:
                        found = pool.apply(measure, (kind, point, Path(scratch)))
                    row |= {f"{kind} {name}": value for name, value in found.items()}
                result["rows"].append(row)
                print(row, flush=True)
    result["slopes"] = [_slopes(axis, _of(result["rows"], axis)) for axis in AXES]
    write_result("growth", result, _page(result), out)
    _plot(result["rows"], out / "engine-growth.png")


def _described(point: Point, axis: str) -> dict[str, Any]:
    size = SIZES[point.model]
    samples = random_graphs(point.schedule, point.segment, PROMPT, point.prompts, size.vocabulary)
    packed = works(size, samples)["packed"]
    x = {
        "graph size": 1 + 22 * point.first,
        "segment length": point.segment,
        "batch": point.prompts,
        "model": size.matrices + size.vocabulary * size.hidden,
    }
    return {
        "x": x[axis],
        "tokens": point.tokens,
        "operations": packed.flops,
        "attention share": packed.attention / packed.flops,
    }


def _of(rows: Sequence[dict[str, Any]], axis: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["axis"] == axis]


QUANTITIES = ("operations", "update seconds", "update megabytes", "sampling seconds")
QUANTITIES += ("sampling megabytes",)


def _slopes(axis: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Exponents between the two smallest and between the two largest points of an axis."""
    x = [row["x"] for row in rows]

    def between(name: str) -> str:
        y = [row[name] for row in rows]
        return f"{slope(x[:2], y[:2]):.2f} → {slope(x[-2:], y[-2:]):.2f}"

    return {"axis": axis} | {name: between(name) for name in QUANTITIES}


def _page(result: dict[str, Any]) -> list[str]:
    names = {
        "x": "value",
        "tokens": "edge tokens",
        "attention share": "attention's share of operations",
        "update seconds": "update (s)",
        "update megabytes": "update peak (MB)",
        "sampling seconds": "sampling (s)",
        "sampling megabytes": "sampling peak (MB)",
    }
    headings = {
        "graph size": "Graph size: nodes of each graph",
        "segment length": "Segment length: tokens of an edge",
        "batch": "Batch: graphs",
        "model": "Model: parameters",
    }
    tables = [
        line
        for axis in AXES
        for line in ("", f"## {headings[axis]}", "", *table(_of(result["rows"], axis), names))
    ]
    return [
        "# How time and memory grow",
        f"{BASE.prompts} graphs of schedule {{3,3,2,2}}, segments of {BASE.segment} tokens, model "
        f"{BASE.model}, one of them varied. *Update*: forward and backward pass of packed graphs, "
        "rows of 4,096 tokens. *Sampling*: growing the graphs. CPU seconds of one thread, medians "
        f"of three, or once from {REPEATED_S:.0f} s on; memory is the peak resident size above "
        "that of the loaded model, every point in a process of its own.",
        *tables,
        "",
        "## Exponents",
        "",
        "y ∝ xᵖ between the two smallest and between the two largest points. 1 is linear; below 1 "
        "the cost of each call, the same for few tokens as for many, still counts.",
        "",
        *table(result["slopes"], {"axis": "", **{name: name for name in QUANTITIES}}),
        "",
        *EXPLANATION,
        "",
        "![Time and memory](engine-growth.png)",
    ]


EXPLANATION = (
    "Where it is not linear, and why:",
    "",
    "* *Small problems* grow slower than linearly: a pass over few tokens takes its hundreds of "
    "small kernel calls whatever the number of tokens. In sampling this reaches further, because "
    "a layer of a graph has as many steps as a segment has tokens, each a forward pass over one "
    "token of every running row.",
    "* *Segment length* is the only axis with a quadratic term: every token attends to its path, "
    "so attention's share of the operations grows with the length of the paths and the exponent "
    "goes from 1 towards 2.",
    "* *Graph size and batch* are linear in time once passes are full; the update's memory stops "
    "growing there, because a row of 4,096 tokens bounds what one pass keeps. Sampling keeps the "
    "keys and values of every token of all graphs, so its memory stays linear.",
    "* *Model*: in the parameters about linear from a few million on; below that the cost of "
    "calls, which grows with the layers only. Memory of the update is its activations, which "
    "grow with width times layers, and the gradients.",
)


def _plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time above memory, one column for each axis, both scales logarithmic."""
    with mpl.rc_context(rc=STYLE):
        figure = Figure(figsize=(12, 6), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(2, len(AXES), squeeze=False)
        for column, axis in enumerate(AXES):
            points = _of(rows, axis)
            x = [point["x"] for point in points]
            for line, unit in enumerate(("seconds", "megabytes")):
                axes = grid[line][column]
                for color, kind in zip(COLORS, ("update", "sampling"), strict=False):
                    y = [point[f"{kind} {unit}"] for point in points]
                    axes.loglog(x, y, marker="o", color=color, linewidth=2, label=kind)
                first = points[0][f"update {unit}"]
                linear = [first * value / x[0] for value in x]
                axes.loglog(x, linear, color="#7a7972", linestyle=":", label="linear")
                axes.set_xticks(x, [EngFormatter(sep="", places=0)(value) for value in x])
                axes.yaxis.set_major_formatter(EngFormatter(sep=""))
                for either in (axes.xaxis, axes.yaxis):
                    either.set_minor_formatter(NullFormatter())
                axes.set_xlabel(axis)
                axes.set_ylabel({"seconds": "CPU seconds", "megabytes": "peak MB"}[unit])
        grid[0][0].legend(frameon=False)
        figure.savefig(path, dpi=130)
