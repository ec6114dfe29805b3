"""Training against a search server that is killed and restarted again and again.

A policy of the kb world trains against `graphpo serve` for some minutes. Meanwhile the server is
killed (SIGKILL) every half a minute and restarted a few seconds later on the same port. Every step
must be there, and none of its searches may have met an outage.

    bash scripts/quickstart.sh               # makes worlds/kb-0, if it is not there
    python benchmarks/soak.py                # about six minutes
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine_parts.machine import RESULTS, ROOT, machine, table

GRAPHPO = [sys.executable, "-m", "graphpo_agent.cli"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=Path, default=ROOT / "worlds" / "kb-0")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kill-every", type=float, default=30.0, help="seconds")
    parser.add_argument("--away", type=float, default=4.0, help="seconds until the restart")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        kills, rows = soak(options, Path(name))
    write(options, kills, rows)


def soak(options: argparse.Namespace, place: Path) -> tuple[int, list[dict[str, float]]]:
    """How often the server was killed, and the run's metrics, a row a step."""
    server, address = start_server(options.world, place / "address", 0)
    run = place / "run"
    trainer = subprocess.Popen([*GRAPHPO, "train", *arguments(options.world, run, address)])
    ends = time.monotonic() + 60 * options.minutes
    kills = 0
    try:
        while time.monotonic() < ends and trainer.poll() is None:
            time.sleep(options.kill_every)
            server.kill()
            server.wait()
            kills += 1
            time.sleep(options.away)
            port = int(address.rpartition(":")[2])
            server, address = start_server(options.world, place / "address", port)
        trainer.send_signal(signal.SIGINT)
        trainer.wait()
    finally:
        server.terminate()
        server.wait()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return kills, [row for row in map(json.loads, lines) if row["step"] > 0]


def start_server(world: Path, ready: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    ready.unlink(missing_ok=True)
    places = ["--port", str(port), "--ready-file", str(ready)]
    server = subprocess.Popen([*GRAPHPO, "serve", str(world / "index"), *places], cwd=ROOT)
    while not ready.exists():
        if server.poll() is not None:
            sys.exit("soak: the server did not start")
        time.sleep(0.1)
    return server, ready.read_text()


def arguments(world: Path, run: Path, address: str) -> list[str]:
    retriever = f"{{class: retrievers.remote:RemoteRetriever, urls: '{address}'}}"
    return [
        str(ROOT / "configs/toy/kb.yaml"),
        f"output={run}",
        f"model.path={world / 'policy'}",
        f"tasks.train={world / 'train.jsonl'}",
        "tasks.heldout=null",
        f"mode.tools.search.retriever={retriever}",
        "overlap=true",
        "train.steps=100000",
    ]


def write(options: argparse.Namespace, kills: int, rows: list[dict[str, float]]) -> None:
    """The result, or exit status 1 where a step is missing or met an outage."""
    steps = [int(row["step"]) for row in rows]
    outages = sum(row.get("rollout/status/tool_outage", 0.0) > 0 for row in rows)
    seconds = [row["time/rollout"] for row in rows]
    result = {
        "minutes": options.minutes,
        "kills": kills,
        "steps": len(steps),
        "missing steps": steps[-1] - len(steps),
        "steps with an outage": outages,
        "tool calls": sum(row["tokens/tool_calls"] for row in rows),
        "median rollout, s": sorted(seconds)[len(seconds) // 2],
        "longest rollout, s": max(seconds),
    }
    where = machine()
    text = [
        "# A search server that is killed and restarted while a policy trains",
        "",
        f"Made by `python benchmarks/soak.py`: {options.minutes:.0f} minutes; the server is killed "
        f"every {options.kill_every:.0f} s and restarted {options.away:.0f} s later on the same "
        f"port. {where['cpu']}, {where['cores']} cores.",
        "",
        *table([result], {name: name for name in result}),
        "",
    ]
    (RESULTS / "soak.json").write_text(json.dumps(result | {"machine": where}, indent=1) + "\n")
    (RESULTS / "soak.md").write_text("\n".join(text))
    print("\n".join(text))
    if result["missing steps"] or outages:
        sys.exit("soak: a step was lost")


if __name__ == "__main__":
    main()
