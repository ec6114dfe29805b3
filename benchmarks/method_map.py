"""Every method on the toy worlds, tuned at equal tokens: a map of where each one wins.

Builds each world and warm-starts one policy for it. Then ``graphpo compare`` trains every method in
all its settings (``method_settings.py``) with a tuning seed, in the better two with further tuning
seeds, and in the best one with fresh seeds. Finished runs are kept, so a stopped benchmark goes on
where it was. Writes a page, a figure and the raw numbers per world and one map of all worlds to
``benchmarks/results/``.

    python benchmarks/method_map.py                      # everything: half a day on 2 cores
    python benchmarks/method_map.py --worlds kb --methods graphpo grpo --seeds 2
    python benchmarks/method_map.py --worlds reach-large hops-large --methods grpo plus   # 20 M
    python benchmarks/method_map.py --worlds reach --methods treepo --keep   # one row of a page
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engine_parts.machine import RESULTS, ROOT
from benchmarks.method_pages import Page, read_page, write_map, write_page
from benchmarks.method_prm import train_step_scorer
from benchmarks.method_settings import (
    FINALISTS,
    METHODS,
    TUNING_SEEDS,
    WORLDS,
    Setting,
    settings,
    structure,
)
from benchmarks.toy_worlds import WORK, call, prepare
from graphpo_agent.report.compare_stats import read_comparison

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
    parser.add_argument(
        "--keep", action="store_true", help="leave the page's other methods as they were measured"
    )
    options = parser.parse_args()
    for world in options.worlds:
        kept = read_page(world) if options.keep else None
        measure(world, options.methods, options.seeds, options.work, options.jobs, kept)
    print((RESULTS / "map.md").read_text())


def measure(
    world: str, methods: Sequence[str], seeds: int, work: Path, jobs: int, kept: Page | None = None
) -> None:
    """Tune and compare the methods on one world, and write what came out, with what is kept."""
    prepare(world, work)
    if "prm" in methods:
        prepare_step_scorer(world, work)
    tried = {name: list(settings(name, WORLDS[world])) for name in methods}
    best, tuning = tune(world, tried, work, jobs)
    compare(world, best, seeds, work, jobs)
    runs = work / "compare" / world
    found = read_comparison(runs, list(best), range(seeds), WORLDS[world].token_budget)
    page = Page({name: _told(world, setting) for name, setting in best.items()}, tuning, found)
    write_page(world, page if kept is None else kept.renewed(page))
    write_map()


def _told(world: str, setting: Setting) -> dict[str, Any]:
    """What the world's page tells of a setting."""
    return {
        "prompts": setting.prompts,
        "lr": setting.learning_rate,
        "structure": structure(setting.method, setting.responses, WORLDS[world].steps),
    }


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


if __name__ == "__main__":
    main()
