"""The configurations of search agents: all can be read, and the small one trains for real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphpo_agent.build import build_expander
from graphpo_agent.cli import main
from graphpo_agent.config import RunConfig
from graphpo_agent.config_file import load_config
from graphpo_agent.errors import ConfigError
from tests.worlds import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*/*.yaml"))


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if "sft" not in path.name], ids=lambda path: path.stem
)
def test_every_configuration_names_what_is_there(path: Path, capsys) -> None:
    assert main(["train", str(path), "--dry-run"]) == 0
    assert "mode:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("mode.dialect=asearcher", "calls tools that are not configured: access"),
        ("mode.dialect={kind: hermes, system_prompt: Be brief.}", "has {tools}"),
        ("mode.prompt_template=Answer.", "has no {question}"),
        (
            'mode.tools.python={class: "tools.python:PythonTool"}',
            "the dialect cannot call python: it calls search",
        ),
        (
            "mode={kind: segment, segment_length: 8, max_response_tokens: 64, prompt_template: x}",
            "{question}",
        ),
    ],
)
def test_a_prompt_or_dialect_that_cannot_work_is_found_by_a_dry_run(
    override: str, says: str, capsys
) -> None:
    config = str(ROOT / "configs/search/qwen2.5-7b-local.yaml")
    assert main(["train", config, override, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("graphpo: ") and says in said.err


ACCESS = """\
mode:
  dialect: asearcher
  tools:
    access:
      class: tools.visit:VisitTool
      reader: {class: "retrievers.remote:RemotePages", urls: "http://127.0.0.1:8000"}
"""
EXTRACTOR = """\
      extractor:
        class: tools.extract:EvidenceExtractor
        chat: {class: "graphpo_agent.net.chat:OpenAIChat", base_url: "http://h/v1", model: m}
"""


def test_asearcher_cannot_say_what_an_extractor_needs(tmp_path: Path, capsys) -> None:
    config, access = str(ROOT / "configs/search/qwen2.5-7b-local.yaml"), tmp_path / "access.yaml"
    access.write_text(ACCESS)
    assert main(["train", config, str(access), "--dry-run"]) == 0
    access.write_text(ACCESS + EXTRACTOR)
    assert main(["train", config, str(access), "--dry-run"]) == 2
    assert "mode.tools.access: an extractor needs a goal" in capsys.readouterr().err
    run = load_config(RunConfig, config, [str(access)])
    with pytest.raises(ConfigError, match="an extractor needs a goal"):
        build_expander(run.mode)
    hermes = [str(access), "mode.dialect=hermes"]
    assert main(["train", config, *hermes, "--dry-run"]) == 0


@pytest.mark.slow
@pytest.mark.lucene
def test_a_search_agent_trains_against_a_lucene_server(tmp_path: Path) -> None:
    environment = os.environ | {
        "GRAPHPO": str(Path(sys.executable).parent / "graphpo"),
        "WORLD": str(tmp_path / "world"),
        "RUN": str(tmp_path / "run"),
        "KNOBS": "num_train=200 num_heldout=16 num_demonstrations=1500 num_chains=1 hops=1",
        "SFT": "steps=200",
    }

    def script(*overrides: str) -> str:
        done = subprocess.run(
            ["bash", "scripts/search_agent.sh", "train.eval_tasks=16", *overrides],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    script("train.steps=2")
    made = [tmp_path / "world" / name for name in ("train.jsonl", "lucene", "policy")]
    before = [path.stat().st_mtime_ns for path in made]
    told = script("train.steps=5")
    assert [path.stat().st_mtime_ns for path in made] == before
    for part in ("world is there", "index is there", "policy is there", "run goes on"):
        assert f"{part} " in told
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = rows[1:]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5]
    # It searches the server, reads what that found, and is sometimes right.
    assert sum(row["tokens/tool_calls"] for row in steps) > 50
    assert all(row.get("rollout/status/tool_outage", 0) == 0 for row in steps)
    assert any(row["reward/mean"] > 0 for row in steps)
    assert any(row["rollout/merge_rate"] > 0 for row in steps)
