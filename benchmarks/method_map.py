"""Every method on the toy worlds, tuned at equal tokens: a map of where each one wins.

Builds each world and warm-starts one policy for it. Then ``graphpo compare`` trains every method in
all its settings (``method_settings.py``) with a tuning seed, in the better two with further tuning
seeds, and in the best one with fresh seeds. Finished runs are kept, so a stopped benchmark goes on
where it was. Writes a page, a figure and the raw numbers per world and one map of all worlds to
``benchmarks/results/``.

    python benchmarks/method_map.py                      # everything: half a day on 2 cores
    python benchmarks/method_map.py --worlds kb --methods graphpo grpo --seeds 2
    python benchmarks/method_map.py --worlds reach-large hops-large --methods grpo plus   # 20 M
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engine_parts.machine import RESULTS, ROOT
from benchmarks.method_prm import train_step_scorer
from benchmarks.method_settings import METHODS, WORLDS, Setting, settings, structure
from benchmarks.toy_worlds import WORK, call, prepare
from graphpo_agent.report.compare_page import (
    comparison_record,
    comparison_tables,
    draw_curves,
    machine_line,
    points,
)
from graphpo_agent.report.compare_stats import Interval, read_comparison

TUNING_SEEDS = range(100, 103)
FINALISTS = 2
"""Settings of a method that are tried with more than the first tuning seed."""
SMALL = [name for name, world in WORLDS.items() if not world.large]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=SMALL)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    for world in options.worlds:
        measure(world, options.methods, options.seeds, options.work, options.jobs)
    print((RESULTS / "map.md").read_text())


def measure(world: str, methods: Sequence[str], seeds: int, work: Path, jobs: int) -> None:
    """Tune and compare the methods on one world, and write what came out."""
    prepare(world, work)
    if "prm" in methods:
        prepare_step_scorer(world, work)
    tried = {name: list(settings(name, WORLDS[world])) for name in methods}
    best, tuning = tune(world, tried, work, jobs)
    compare(world, best, seeds, work, jobs)
    write_world(world, best, tuning, seeds, work)
    write_map()


def prepare_step_scorer(world: str, work: Path) -> None:
    """The world's process reward model, once."""
    directory = work / world
    graphs, out = directory / "answers.jsonl", directory / "step_scorer"
    if out.exists():
        return
    method = "method={name: grpo, group_size: 8}"
    tasks = f"tasks.train={directory}/train.jsonl"
    count = ["--count", "500", "--out", str(graphs)]
    call(["rollout", *arguments(world, work), method, tasks, *count])
    loss = train_step_scorer(directory / "policy", directory / "train.jsonl", graphs, out)
    print(f"{world}: a process reward model with cross-entropy {loss:.3f}", flush=True)


def tune(
    world: str, tried: Mapping[str, Sequence[Setting]], work: Path, jobs: int
) -> tuple[dict[str, Setting], dict[str, list[float]]]:
    """Every method's setting with the highest mean of the learning curve, and what was tried.

    Returns:
        The settings by method; by label the curve's mean with each tuning seed.
    """
    if all(len(choices) == 1 for choices in tried.values()):
        return {name: choices[0] for name, choices in tried.items()}, {}
    first = curve_means(world, tried, TUNING_SEEDS[:1], work, jobs)
    finalists = {
        name: sorted(choices, key=lambda each: -first[each.label][0])[:FINALISTS]
        for name, choices in tried.items()
    }
    last = curve_means(world, finalists, TUNING_SEEDS, work, jobs)
    best = {
        name: max(choices, key=lambda each: sum(last[each.label]))
        for name, choices in finalists.items()
    }
    return best, first | last


def curve_means(
    world: str, tried: Mapping[str, Sequence[Setting]], seeds: range, work: Path, jobs: int
) -> dict[str, list[float]]:
    """Train in all settings: by label the mean of the learning curve with each seed."""
    out = work / "tuning" / world
    every = [setting for choices in tried.values() for setting in choices]
    files = [write_setting(out / f"{each.label}.yaml", world, each, work) for each in every]
    call(["compare", *arguments(world, work), *comparing(files, seeds, out, jobs)])
    labels = [each.label for each in every]
    found = read_comparison(out, labels, seeds, WORLDS[world].token_budget)
    means = {label: found.values(label, "curve_accuracy").values() for label in labels}
    return {label: [round(mean, 6) for mean in values] for label, values in means.items()}


def compare(world: str, best: Mapping[str, Setting], seeds: int, work: Path, jobs: int) -> None:
    """Every method in its best setting, with seeds that had no part in choosing it."""
    out = work / "compare" / world
    files = [write_setting(out / f"{name}.yaml", world, best[name], work) for name in best]
    call(["compare", *arguments(world, work), *comparing(files, range(seeds), out, jobs)])


def write_setting(path: Path, world: str, setting: Setting, work: Path) -> Path:
    """The file that ``graphpo compare`` lays over the world's configuration."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(laid_over(world, setting, work)))
    return path


def laid_over(world: str, setting: Setting, work: Path) -> dict[str, Any]:
    """What that file holds."""
    preset = yaml.safe_load(
        (ROOT / "configs" / "methods" / f"{METHODS[setting.method]}.yaml").read_text()
    )
    directory, tasks = work / world, setting.tasks(WORLDS[world])
    train = directory / "train.jsonl"
    if tasks is not None:
        train, every = directory / f"train-{tasks}.jsonl", train
        if not train.exists():
            train.write_text("".join(every.read_text().splitlines(keepends=True)[:tasks]))
    scorer = str(directory / "step_scorer")
    return setting.configuration(WORLDS[world], preset, str(train), scorer)


def comparing(files: Sequence[Path], seeds: range, out: Path, jobs: int) -> list[str]:
    options = ["--seeds", f"{seeds[0]}-{seeds[-1]}", "--out", str(out), "--jobs", str(jobs)]
    return ["--methods", *map(str, files), *options]


def arguments(world: str, work: Path) -> list[str]:
    """Configuration and overrides that all methods share in a world."""
    directory, sizes = work / world, WORLDS[world]
    overrides = [
        "threads=1",
        f"model.path={directory}/policy",
        f"tasks.heldout={directory}/heldout.jsonl",
        "train.steps=null",
        f"train.token_budget={sizes.token_budget}",
        "train.eval_tasks=400",
        f"train.eval_every={sizes.updates // 4}",
        f"train.checkpoint_every={sizes.updates // 4}",
        "train.keep_checkpoints=1",
        *sizes.run,
    ]
    if sizes.toy == "kb":
        overrides.append(f"mode.tools.search.retriever.directory={directory}/index")
    if sizes.toy == "hops":
        overrides.append(f"mode.tools.search.retriever.corpus={directory}/corpus.jsonl")
    return [f"configs/toy/{sizes.toy}.yaml", *overrides]


def write_world(
    world: str,
    best: Mapping[str, Setting],
    tuning: Mapping[str, Sequence[float]],
    seeds: int,
    work: Path,
) -> None:
    """The page, the figures and the raw numbers of one world."""
    found = read_comparison(
        work / "compare" / world, list(best), range(seeds), WORLDS[world].token_budget
    )
    chosen = {
        name: {
            "prompts": setting.prompts,
            "lr": setting.learning_rate,
            "structure": structure(name, setting.responses, WORLDS[world].steps),
        }
        for name, setting in best.items()
    }
    RESULTS.mkdir(exist_ok=True)
    for pattern in (f"map-{world}.*", f"map-{world}-[0-9]*.svg"):
        for old in RESULTS.glob(pattern):
            old.unlink()
    figures = draw_curves(RESULTS / f"map-{world}.svg", f"{world}: held-out accuracy", found)
    lines = [f"# {world}", "", f"{machine_line()} One thread per run.", ""]
    lines += comparison_tables(found)
    lines += ["", *(f"![held-out accuracy by tokens]({path.name})" for path in figures)]
    record: dict[str, Any] = {"world": world, "settings": chosen, "tuning": tuning}
    record |= comparison_record(found)
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
    return f"[{record['world']}](map-{record['world']}.md), {record['budget']:,.0f} tokens"


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


if __name__ == "__main__":
    main()
