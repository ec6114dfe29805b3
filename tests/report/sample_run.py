"""A run directory that looks like a real one, made from seeds: for tests and for looking at.

``python tests/report/sample_run.py DIR`` writes one.
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

STATUSES = ("ok", "answered", "invalid_action", "out_of_turns")

CONFIG = """\
output: runs/kb-graphpo
seed: 0
threads: null
model:
  path: worlds/kb/policy-sft
  dtype: float32
tasks:
  train: worlds/kb/train.jsonl
  heldout: worlds/kb/heldout.jsonl
mode:
  kind: agent
  dialect: search_r1
  tools:
    search:
      tool: tools.search:SearchTool
      options: {index: worlds/kb/index, topk: 3}
  max_turns: 5
state:
  kind: key
  function: graphpo_agent.rollout.summarize:documents_key
reward: graphpo_agent.rewards.qa:exact_match
method:
  name: graphpo
  schedule: [6, 2, 2, 1, 1]
  merge_threshold: 0.92
  pool_weight: 0.7
  efficiency_weight: 0.2
train:
  prompts_per_step: 16
  steps: 120
"""

MANIFEST = {
    "command": ["graphpo", "train", "configs/kb.yaml"],
    "seed": 0,
    "versions": {"graphpo-agent": "0.1.0", "torch": "2.13.0", "numpy": "2.3.5"},
    "python": "3.11.9",
    "machine": {"system": "Linux", "cpus": 2},
    "git_commit": None,
}


def metric_rows(steps: int, seed: int = 0) -> list[dict[str, float]]:
    """Rows of metrics.jsonl: step 0 is the evaluation before training."""
    draw = random.Random(seed)
    rows: list[dict[str, float]] = [
        {"step": 0, "progress": 0.0, "eval/accuracy": 0.21, "eval/standard_error": 0.029,
         "eval/greedy_accuracy": 0.24, "eval/response_tokens": 96.0}
    ]  # fmt: skip
    for step in range(1, steps + 1):
        skill = 0.21 + 0.45 * (1 - math.exp(-3 * step / max(steps, 20)))
        status = {"ok": 0.58, "answered": 0.36 + 0.04 * skill, "invalid_action": 0.05 * (1 - skill)}
        row: dict[str, float] = {
            "step": step,
            "progress": step / steps,
            "time/seconds": 12 + 3.6 * step,
            "time/rollout": 2.1 + draw.uniform(-0.3, 0.3),
            "time/update": 1.2 + draw.uniform(-0.1, 0.1),
            "reward/mean": min(1.0, max(0.0, skill + draw.gauss(0, 0.05))),
            "reward/mixed_prompts": min(1.0, 0.55 + draw.gauss(0, 0.08)),
            "rollout/response_tokens": 140 - 40 * skill + draw.gauss(0, 4),
            "rollout/turns": 3.9 - skill + draw.gauss(0, 0.1),
            "rollout/nodes": 34 + draw.gauss(0, 2),
            "rollout/merge_rate": min(1.0, 0.31 + 0.1 * skill + draw.gauss(0, 0.03)),
            **{f"rollout/status/{name}": share for name, share in status.items()},
            "tokens/generated": 16 * 900 + draw.randint(-900, 900),
            "tokens/total": 16 * 900 * step,
            "tokens/prefilled": 3100,
            "tokens/summary": 0,
            "tokens/per_second": 4100 + draw.gauss(0, 160),
            "tokens/tool_calls": 320 + draw.randint(-20, 20),
            "budget/saved": 41 + draw.randint(-6, 6),
            "budget/reallocated": 33 + draw.randint(-6, 6),
            "credit/nonzero": 0.52 + draw.gauss(0, 0.04),
            "credit/unscored": 0.02,
            "credit/efficiency_nonzero": 0.21 + draw.gauss(0, 0.03),
            "update/loss": draw.gauss(0, 0.01),
            "update/entropy": 0.62 * math.exp(-step / 150) + draw.gauss(0, 0.01),
            "update/clip_fraction": abs(draw.gauss(0.01, 0.004)),
            "update/grad_norm": abs(draw.gauss(0.8, 0.2)),
            "update/mismatch": 2e-6,
            "update/learning_rate": 3e-4,
        }
        if step % 10 == 0 or step == steps:
            accuracy = skill + draw.gauss(0, 0.015)
            row |= {"eval/accuracy": accuracy, "eval/standard_error": 0.033, "time/eval": 2.4}
        if step == steps:
            row["eval/greedy_accuracy"] = skill + 0.03
        rows.append(row)
    return rows


def kb_graph(
    graph_id: str, seed: int, schedule: tuple[int, ...] = (6, 2, 2, 1, 1)
) -> dict[str, Any]:
    """A ``graphpo.graph/1`` object in which a state is the set of documents found so far.

    Two documents of nine are needed; a search finds one or two that the path has not seen. Equal
    keys are one class: found sets only grow, so no class can be its own ancestor.
    """
    draw = random.Random(seed)
    question = "In which year was the mentor of Karo Venn born?"
    nodes: list[dict[str, Any]] = [
        {"id": 0, "parent": None, "terminal": False, "reward": None, "key": f"{question} | []",
         "state": question, "num_tokens": 41}
    ]  # fmt: skip
    active = [(0, frozenset[int]())]
    for layer, branching in enumerate(schedule, start=1):
        following: list[tuple[int, frozenset[int]]] = []
        for parent, found in active:
            for _ in range(branching):
                node = {"id": len(nodes), "parent": parent, "num_tokens": draw.randint(14, 60)}
                if (
                    found >= {0, 1}
                    or layer == len(schedule)
                    or (len(found) > 2 and draw.random() < 0.4)
                ):
                    right = found >= {0, 1} and draw.random() < 0.85
                    answer = "1987" if right else str(draw.choice([1944, 1961, 2003]))
                    node |= {
                        "terminal": True,
                        "reward": float(right),
                        "key": f"{question} | {sorted(found)} | {answer}",
                    }
                else:
                    fresh = [d for d in range(9) if d not in found]
                    more = found | set(draw.sample(fresh, draw.choice([1, 1, 1, 2])))
                    node |= {
                        "terminal": False,
                        "reward": None,
                        "key": f"{question} | {sorted(more)}",
                        "state": "found: " + ", ".join(f"kb-{d:04d}" for d in sorted(more)),
                    }
                    following.append((len(nodes), more))
                nodes.append(node)
        active = following
    first: dict[str, int] = {}
    for node in nodes:
        node["class"] = first.setdefault(node["key"], node["id"])
    return {"schema": "graphpo.graph/1", "id": graph_id, "nodes": nodes}


def write_sample_run(directory: Path, steps: int = 120, num_graphs: int = 12) -> Path:
    """Fill a run directory with everything but the report."""
    directory.mkdir(parents=True, exist_ok=True)
    write_lines(directory / "metrics.jsonl", metric_rows(steps))
    graphs = [kb_graph(f"kb-{i:04d}", seed=i) for i in range(num_graphs)]
    write_lines(directory / "graphs.jsonl", graphs)
    (directory / "config.yaml").write_text(CONFIG)
    (directory / "manifest.json").write_text(json.dumps(MANIFEST, indent=2))
    return directory


def write_lines(path: Path, rows: list[Any]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_sample_run(Path(sys.argv[1]))
