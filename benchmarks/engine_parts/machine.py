"""What every part shares: the clock, the machine's description, tables and files."""

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

__all__ = ["RESULTS", "ROOT", "alternate", "machine", "number", "slope", "table", "write_result"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Clock = Callable[[], float]


def alternate(
    calls: Mapping[str, Callable[[], Any]], repeats: int, clock: Clock = time.process_time
) -> dict[str, float]:
    """Median seconds of each call, run in turn (A B A B …) so that all see the same machine.

    Args:
        calls: by name.
        repeats: runs of each.
        clock: CPU seconds of this process unless told otherwise.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            gc.collect()
            started = clock()
            call()
            seconds[name].append(clock() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load": os.getloadavg()[0],
        "gflops": _gflops(),
    }


def _gflops() -> float:
    """Billions of float32 operations a second of one large matrix product."""
    a, b = torch.randn(2048, 512), torch.randn(512, 2048)
    times = alternate({"product": lambda: [a @ b for _ in range(10)]}, repeats=5)
    return 10 * 2 * 2048 * 512 * 2048 / times["product"] / 1e9


def table(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[str]:
    """A Markdown table; ``names`` maps the rows' keys to headings, in order."""
    lines = ["| " + " | ".join(names.values()) + " |", "|" + " --- |" * len(names)]
    for row in rows:
        lines.append("| " + " | ".join(number(row.get(name)) for name in names) + " |")
    return lines


def number(value: float | int | str | None) -> str:
    """Three digits, thousands with commas; a dash where there is nothing."""
    if value is None or isinstance(value, str):
        return value or "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of the power law y ∝ x^p that fits best."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def write_result(name: str, result: Mapping[str, Any], text: Sequence[str], out: Path) -> None:
    """Write ``engine-<name>.json`` and ``.md`` and print the latter."""
    m = result["machine"]
    head = [
        f"Made by `{result['command']}`. {m['cpu']}, {m['cores']} cores, {m['threads']} thread, "
        f"{m['gflops']:.0f} GFLOP/s in a large float32 matrix product, Python {m['python']}, "
        f"torch {m['torch']}, transformers {m['transformers']}; load average {m['load']:.1f} at "
        "the start.",
        "",
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / f"engine-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    page = "\n".join([text[0], "", *head, *text[1:]]) + "\n"
    (out / f"engine-{name}.md").write_text(page)
    print(page, flush=True)
