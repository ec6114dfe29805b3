"""What the tests of whole runs share: reading what a run left, and outages."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.rollout.grow import Grower
from tests.worlds import Storm


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(run: Path) -> list[dict[str, Any]]:
    timed = ("time/", "tokens/per_second")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows(run)]


def weights(run: Path) -> bytes:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return (newest / "model.safetensors").read_bytes()


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def let_it_storm(module: Any, monkeypatch: pytest.MonkeyPatch, met: Callable[[str], bool]) -> None:
    build = module.build_grower

    def stormy(config: Any) -> Grower:
        grower = build(config)
        return replace(grower, expander=Storm(grower.expander, met))

    monkeypatch.setattr(module, "build_grower", stormy)
