"""What a budget of tokens costs a method: within the budget, and with all paths ended.

Within ``budget.tokens`` paths end one after another, so that the last ones are cut off and not the
long ones. This trains methods of one structure each on the hops world, all in one setting, with
what eight answers of a prompt cost and without a limit, at equal tokens of the whole run.

    python benchmarks/whole_paths.py          # some 20 minutes on 2 cores
"""

import argparse
from pathlib import Path

import yaml

from benchmarks.engine_parts.machine import RESULTS
from benchmarks.method_map import arguments, comparing, laid_over
from benchmarks.method_settings import WORLDS, Setting
from benchmarks.toy_worlds import WORK, call, prepare

WORLD = "hops"
STRUCTURES = {
    "grpo": ("grpo", {}),
    "chains": ("plus", {"schedule": [8, 1]}),
    "plus": ("plus", {}),
    "graphpo": ("graphpo", {}),
    "tree": ("tree", {}),
}
"""By label: method and what its structure is, where it is not the map's."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    prepare(WORLD, options.work)
    out = options.work / "whole_paths"
    files = [file for label in STRUCTURES for file in write_files(label, out, options.work)]
    call(
        [
            "compare",
            *arguments(WORLD, options.work),
            *comparing(files, range(options.seeds), out, options.jobs),
        ]
    )
    for made in out.glob("compare*"):  # the page, its figures and the raw numbers
        name = made.name.replace("compare", "whole-paths")
        (RESULTS / name).write_text(made.read_text().replace("](compare", "](whole-paths"))
    print((RESULTS / "whole-paths.md").read_text())


def write_files(label: str, out: Path, work: Path) -> list[Path]:
    """The files laid over the world's configuration: within the budget, and without one."""
    method, structure = STRUCTURES[label]
    world = WORLDS[WORLD]
    setting = Setting(method, world.prompts, world.responses, world.tokens, learning_rate=5e-4)
    limited = laid_over(WORLD, setting, work)
    limited["method"] |= structure
    out.mkdir(parents=True, exist_ok=True)
    within, whole = out / f"{label}.yaml", out / f"{label}-unlimited.yaml"
    within.write_text(yaml.safe_dump(limited))
    whole.write_text(yaml.safe_dump(limited | {"budget": {"tokens": None}}))
    return [within, whole]


if __name__ == "__main__":
    main()
