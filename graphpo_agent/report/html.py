"""The report of a run: one HTML file with its curves, its settings and one drawn graph."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup

from graphpo_agent import __version__
from graphpo_agent.atomic import write_atomically
from graphpo_agent.errors import RunError
from graphpo_agent.graph.jsonl import count_lines, read_graphs
from graphpo_agent.graph.rollout_graph import RolloutGraph
from graphpo_agent.methods.method import Credit
from graphpo_agent.plain_text import plain_text
from graphpo_agent.report.charts import MAX_POINTS, Line, line_chart
from graphpo_agent.report.drawing import LONG_FACTS, MAX_NODES, draw_graph, node_facts
from graphpo_agent.report.numbers import UNDEFINED, compact, duration, percent, signed
from graphpo_agent.report.panels import PANELS, Panel
from graphpo_agent.report.render import render
from graphpo_agent.report.run_files import Metrics, flatten, read_run
from graphpo_agent.rollout.tally import num_merged

__all__ = ["choose_graph", "write_report"]

_NEWEST_GRAPHS = 64
"""Of a long run's, among which the drawn one is chosen: each may take megabytes."""

NORMAL_95 = 1.96
"""Half-widths of a 95 % interval, in standard errors."""
MAX_TABLE_ROWS = 60


@dataclass(frozen=True, slots=True)
class _Tile:
    name: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class _Card:
    title: str
    hint: str
    latest: str
    legend: tuple[str, ...]
    """One name per line; empty for a single line."""
    chart: Markup


def write_report(
    run_dir: Path,
    credit_of: Callable[[RolloutGraph], Credit],
    decode: Callable[[Sequence[int]], str] | None = None,
    whitens: bool = False,
) -> Path:
    """Write ``report.html`` of a run directory: whole or not at all, readable offline.

    Args:
        run_dir: with metrics.jsonl, graphs.jsonl, config.yaml and manifest.json; what is missing
            or empty is left out of the page.
        credit_of: the credit of a graph by the run's method.
        decode: token ids to text, to show what the edges of the drawn graph say; None leaves
            that out.
        whitens: the run trains with these advantages whitened over a step's graphs, of which the
            file keeps one; the page says so.

    Returns:
        The path of the report.

    Raises:
        RunError: no run directory, a file that cannot be parsed (file and line), or a report that
            cannot be written.
        GraphError: a malformed line in graphs.jsonl.
    """
    run = read_run(run_dir)
    graphs = run_dir / "graphs.jsonl"
    choice = choose_graph(graphs) if graphs.is_file() else None
    page = render(
        "report.html",
        name=run.name,
        version=__version__,
        subtitle=_subtitle(run.config),
        tiles=_tiles(run.metrics),
        num_steps=len(run.metrics.steps),
        max_points=MAX_POINTS,
        sections=_sections(run.metrics),
        graph=None if choice is None else _graph_section(*choice, credit_of, decode),
        whitens=whitens,
        config=_grouped(run.config),
        manifest=flatten(run.manifest),
        table=_numbers(run.metrics),
    )
    path = run_dir / "report.html"
    try:
        write_atomically(path, plain_text(page))  # names may hold half characters
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None
    return path


def choose_graph(path: Path) -> tuple[RolloutGraph, int] | None:
    """Of the newest graphs of a run's file the one that shows most; and how many there are in all.

    None without any.

    Best is one that can be drawn whole, then one whose terminals have different rewards, then the
    one with the most nodes that share an equivalence class, then the largest, then the latest.
    """
    best: RolloutGraph | None = None
    best_rank: tuple[bool, bool, int, int] = (False, False, 0, 0)
    count = count_lines(path)
    for graph in read_graphs(path, log=True, skip=max(0, count - _NEWEST_GRAPHS)):
        rank = _rank(graph)
        if best is None or rank >= best_rank:
            best, best_rank = graph, rank
    return None if best is None else (best, count)


def _rank(graph: RolloutGraph) -> tuple[bool, bool, int, int]:
    rewards = graph.reward[graph.terminal]
    mixed = bool(len(rewards) and rewards.min() < rewards.max())
    merged = 0 if graph.given_classes is None else num_merged(graph.given_classes)
    return graph.num_nodes <= MAX_NODES, mixed, merged, graph.num_nodes


def _graph_section(
    graph: RolloutGraph,
    num_graphs: int,
    credit_of: Callable[[RolloutGraph], Credit],
    decode: Callable[[Sequence[int]], str] | None,
) -> dict[str, object]:
    credit = credit_of(graph)
    facts = [dict(node_facts(graph, credit, v, decode)) for v in range(graph.num_nodes)]
    _, counts = np.unique(credit.classes, return_counts=True)
    rewards = graph.reward[graph.terminal]
    names = dict.fromkeys(name for row in facts for name in row)
    return {
        "id": graph.id,
        "svg": draw_graph(graph, credit, decode),
        "num_graphs": min(num_graphs, _NEWEST_GRAPHS),
        "are_newest": num_graphs > _NEWEST_GRAPHS,
        "num_nodes": graph.num_nodes,
        "num_drawn": min(graph.num_nodes, MAX_NODES),
        "num_classes": int((counts > 1).sum()),
        "num_merged": num_merged(credit.classes),
        "num_right": int((rewards == 1).sum()),
        "num_terminals": len(rewards),
        "fact_names": [name for name in names if name not in LONG_FACTS],
        "long_fact_names": [name for name in names if name in LONG_FACTS],
        "facts": facts,
    }


def _subtitle(config: Mapping[str, object]) -> list[tuple[str, str]]:
    """What was trained on what, by which method, as far as the configuration says it."""
    shown = flatten(config)
    tasks = config.get("tasks")
    files = tasks.get("train") if isinstance(tasks, Mapping) else None
    if isinstance(files, list):
        shown["tasks.train"] = ", ".join(map(str, files))
    named = (
        ("method", "method.name"),
        ("model", "model.path"),
        ("tasks", "tasks.train"),
        ("mode", "mode.kind"),
        ("seed", "seed"),
    )
    return [(name, shown[key]) for name, key in named if key in shown]


def _tiles(metrics: Metrics) -> list[_Tile]:
    return [
        *_accuracy_tile(metrics),
        _Tile("Reward in training", percent(metrics.last("reward/mean")), "latest step"),
        _Tile(
            "Merge rate",
            percent(metrics.last("rollout/merge_rate")),
            "of nodes share their state with another",
        ),
        _Tile("Tokens generated", compact(metrics.last("tokens/total")), "by the policy"),
        _Tile(
            "Time",
            duration(metrics.last("time/seconds")),
            _count_steps(metrics),
        ),
    ]


def _count_steps(metrics: Metrics) -> str:
    if not len(metrics.steps):
        return "no step yet"
    last = int(metrics.steps[-1])
    return "1 step" if last == 1 else f"{last} steps"


def _accuracy_tile(metrics: Metrics) -> list[_Tile]:
    """Held-out accuracy before and after; only one of them where the other was not measured."""
    steps, accuracy = metrics.defined("eval/accuracy")
    if not len(accuracy):
        return [_Tile("Held-out accuracy", UNDEFINED, "not measured")]
    if len(accuracy) == 1:
        return [_Tile("Held-out accuracy", percent(float(accuracy[0])), "measured once")]
    first, last = float(accuracy[0]), float(accuracy[-1])
    error = NORMAL_95 * metrics.beside("eval/accuracy", "eval/standard_error")
    # Tasks that all go alike do not say how others would: a width of 0 is none.
    interval = f"; last value ±{100 * error:.1f} (95%)" if error > 0 else ""
    if steps[0] > 0:
        known = f"before training unknown{interval}"
        return [_Tile("Held-out accuracy", percent(last), known)]
    return [
        _Tile(
            "Held-out accuracy",
            f"{percent(first)} → {percent(last)}",
            f"{signed(100 * (last - first), 1)} points{interval}",
        )
    ]


def _sections(metrics: Metrics) -> list[tuple[str, list[_Card]]]:
    cards = [(panel.section, card) for panel in PANELS for card in _card(panel, metrics)]
    names = dict.fromkeys(section for section, _ in cards)
    return [(name, [card for section, card in cards if section == name]) for name in names]


def _card(panel: Panel, metrics: Metrics) -> list[_Card]:
    """The panel's chart; nothing where none of its metrics was ever recorded."""
    lines = [line for name, label in panel.metrics for line in _line(panel, metrics, name, label)]
    if not lines:
        return []
    return [
        _Card(
            panel.title,
            panel.hint,
            panel.write(float(lines[0].y[-1])) if len(lines) == 1 else "",
            tuple(line.label for line in lines) if len(lines) > 1 else (),
            line_chart(panel.title, lines, panel.write),
        )
    ]


_STATUS = "rollout/status/"


def _line(panel: Panel, metrics: Metrics, name: str, label: str) -> list[Line]:
    x, y = metrics.defined(name)
    if not len(x):
        return []
    if name.startswith(_STATUS):  # where no edge ended so, a step's row has the other ones only
        shares = [values for key, values in metrics.columns.items() if key.startswith(_STATUS)]
        grown = np.isfinite(shares).any(axis=0)
        x, y = metrics.steps[grown], np.nan_to_num(metrics.columns[name][grown])
    half_width = None
    if name == panel.band_of and panel.standard_error in metrics.columns:
        errors = metrics.columns[panel.standard_error]
        half_width = NORMAL_95 * errors[np.isin(metrics.steps, x)]
    return [Line(label, x, y, panel.noisy, half_width)]


def _grouped(config: Mapping[str, object]) -> list[tuple[str, dict[str, str]]]:
    """Settings by section; the ones outside any section come first."""
    plain = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    nested = [(key, flatten(v)) for key, v in config.items() if isinstance(v, Mapping)]
    return ([("run", flatten(plain))] if plain else []) + nested


def _numbers(metrics: Metrics) -> tuple[list[str], list[list[str]]]:
    """Names and written values of at most ``MAX_TABLE_ROWS`` steps, the last one included."""
    names = ["step", *(name for name in metrics.columns if name != "step")]
    count = len(metrics.steps)
    rows = np.unique(np.linspace(0, count - 1, min(count, MAX_TABLE_ROWS)).round().astype(int))
    return names, [
        [f"{metrics.steps[i]:.0f}", *(compact(float(metrics.columns[n][i])) for n in names[1:])]
        for i in rows.tolist()
    ]
