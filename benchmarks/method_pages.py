"""What ``method_map.py`` writes: a page of each world, and one map of all worlds."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.engine_parts.machine import RESULTS
from benchmarks.method_settings import FINALISTS, METHODS, TUNING_SEEDS, WORLDS
from graphpo_agent.report.compare_page import (
    comparison_record,
    comparison_tables,
    draw_curves,
    machine_line,
    points,
)
from graphpo_agent.report.compare_stats import MEASURES, Comparison, Interval, Outcome

__all__ = ["Page", "read_page", "write_map", "write_page"]


@dataclass(frozen=True, slots=True)
class Page:
    """What was measured on one world.

    Attributes:
        settings: by method: prompts of an update, learning rate and the method's own sizes.
        tuning: by a setting's label: the learning curve's mean with each tuning seed.
        found: the runs with fresh seeds.
        note: what has to be said of the runs.
    """

    settings: Mapping[str, Mapping[str, Any]]
    tuning: Mapping[str, Sequence[float]]
    found: Comparison
    note: str | None = None

    def renewed(self, newer: "Page") -> "Page":
        """This page with the methods of ``newer`` in the place of its own.

        Ends this program where they were not trained with the same seeds from the same policy:
        with a seed, a policy's accuracy before training is the same for every method.
        """
        if _untrained(self.found) != _untrained(newer.found):
            sys.exit("the page's runs had other seeds or another policy: measure all its methods")
        outcomes = {**self.found.outcomes, **newer.found.outcomes}
        return replace(
            self,
            settings={**self.settings, **newer.settings},
            tuning={**self.tuning, **newer.tuning},
            found=replace(self.found, outcomes=outcomes),
        )


def _untrained(found: Comparison) -> dict[int, float]:
    """Accuracy before training, by seed."""
    runs = next(iter(found.outcomes.values()))
    return {seed: outcome.before for seed, outcome in runs.items()}


def read_page(world: str) -> Page:
    """A page that was written before.

    Raises:
        OSError: there is none.
    """
    record = json.loads((RESULTS / f"map-{world}.json").read_text())
    outcomes = {
        each["method"]: {run["seed"]: _outcome(run) for run in each["runs"]}
        for each in record["methods"]
    }
    found = Comparison(outcomes, WORLDS[world].token_budget)
    return Page(record["settings"], record["tuning"], found, record.get("note"))


def _outcome(run: Mapping[str, Any]) -> Outcome:
    """A run as a record has it."""
    curve = run["curve"]
    return Outcome(
        np.array(curve["tokens"], dtype=np.float64),
        np.array(curve["accuracy"]),
        {
            name: math.nan if run[name] is None else run[name]
            for name in MEASURES
            if name != "curve_accuracy"
        },
    )


def write_page(world: str, page: Page) -> None:
    """The page, the figures and the raw numbers of one world."""
    RESULTS.mkdir(exist_ok=True)
    for pattern in (f"map-{world}.*", f"map-{world}-[0-9]*.svg"):
        for old in RESULTS.glob(pattern):
            old.unlink()
    figures = draw_curves(RESULTS / f"map-{world}.svg", f"{world}: held-out accuracy", page.found)
    lines = [f"# {world}", "", f"{machine_line()} One thread per run.", ""]
    lines += comparison_tables(page.found)
    lines += ["", *(f"![held-out accuracy by tokens]({path.name})" for path in figures)]
    record = {"world": world, "settings": page.settings, "tuning": page.tuning}
    record |= comparison_record(page.found)
    record |= {} if page.note is None else {"note": page.note}
    (RESULTS / f"map-{world}.md").write_text("\n".join(lines) + "\n")
    (RESULTS / f"map-{world}.json").write_text(json.dumps(record, indent=1) + "\n")


def write_map() -> None:
    """One table of all worlds that were measured: final accuracy, and the setting it took.

    What has to be said of a world's runs stands in its record as ``note``.
    """
    files = [RESULTS / f"map-{world}.json" for world in WORLDS]
    records = [json.loads(path.read_text()) for path in files if path.is_file()]
    of_world = [{each["method"]: each for each in record["methods"]} for record in records]
    names = [name for name in METHODS if any(name in methods for methods in of_world)]
    beyond = max(
        run["tokens"] / record["budget"] - 1
        for record in records
        for each in record["methods"]
        for run in each["runs"]
    )
    lines = [
        "# Where each method wins",
        "",
        "Held-out accuracy at the end in percent, mean over fresh seeds ± 95 % confidence",
        "interval; in brackets prompts per update and learning rate, chosen for each method by the",
        f"mean of the learning curve: of four settings with seed {TUNING_SEEDS[0]}, of the better",
        f"{FINALISTS} with seeds {TUNING_SEEDS[0]} to {TUNING_SEEDS[-1]}.",
        "Bold: the highest mean of a world. Same warm-started policy, same generated tokens: a run",
        "ends with the update that reaches them (*dapo*'s replace prompts and go beyond, here by",
        f"up to {100 * beyond:.1f} %). A run asks for no task twice; *pros* has a quarter as many,",
        "so that each comes back. *waves* is *plus* that spends half of the budget on uncertain",
        "states. *graphpo* has the paper's settings but `singleton: inherit`; without it a state",
        "that is sampled once gives its edge no credit. The policies of *reach-large* and",
        "*hops-large* have 20 M parameters, and all methods one setting there.",
        "",
        f"| method | {' | '.join(_head(record) for record in records)} |",
        f"|{' --- |' * (len(records) + 1)}",
    ]
    for name in names:
        cells = [
            _cell(name, record, methods) for record, methods in zip(records, of_world, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    worlds = [record["world"] for record in records]
    lines += ["", "How each grows there; chains from the prompt spend what that leaves over.", ""]
    lines += [f"| method | {' | '.join(worlds)} |", f"|{' --- |' * (len(records) + 1)}"]
    for name in names:
        cells = [_growth(name, record) for record in records]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for note in dict.fromkeys(record["note"] for record in records if "note" in record):
        lines += ["", note]
    (RESULTS / "map.md").write_text("\n".join(lines) + "\n")


def _head(record: Mapping[str, Any]) -> str:
    page = f"[{record['world']}](map-{record['world']}.md)"
    seeds = len(record["methods"][0]["runs"])
    return f"{page}, {record['budget']:,.0f} tokens, {seeds} seeds"


def _cell(name: str, record: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    if name not in methods:
        return "–"
    found, chosen = methods[name]["final_accuracy"], record["settings"][name]
    half_width = math.nan if found["half_width"] is None else found["half_width"]
    text = points(Interval(found["mean"], half_width), signs=False)
    if found["mean"] == max(each["final_accuracy"]["mean"] for each in methods.values()):
        text = f"**{text}**"
    return f"{text} ({chosen['prompts']}, {chosen['lr']:g})"


def _growth(name: str, record: Mapping[str, Any]) -> str:
    if name not in record["settings"]:
        return "–"
    grown = record["settings"][name]["structure"]
    return ", ".join(f"{key} {_text(value)}" for key, value in grown.items())


def _text(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
