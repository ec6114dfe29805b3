"""A method of one's own, as docs/methods.md shows it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from graphpo_agent.cli import main
from tests.worlds import ROOT, run_arguments


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = (ROOT / "docs/methods.md").read_text().partition("## Your own")[2]
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "graphpo_docs_mine.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


OWN = "method={name: own, object: {class: graphpo_docs_mine:Median, group_size: 4}}"


def test_the_documented_example_trains(kb: Path, mine: Path) -> None:
    run = mine / "run"
    assert main(["train", *run_arguments(kb, run), OWN]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["update/loss"] for row in rows if "update/loss" in row]
    assert losses and np.isfinite(losses).all()
    assert any(row["credit/nonzero"] > 0 for row in rows[1:])
    assert main(["train", "--resume", str(run)]) == 0


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("def plan(self, growth):\n        return None", "plan returned None, want a Plan"),
        (
            "def assign_credit(self, graphs, classes):\n        return []",
            "assign_credit returned 0 credits for",
        ),
    ],
)
def test_a_method_that_breaks_its_contract_is_one_line(
    kb: Path, mine: Path, broken: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"from graphpo_docs_mine import Median\n\n\nclass Broken(Median):\n    {broken}\n"
    module = f"graphpo_docs_{broken.split('(')[0].removeprefix('def ')}"  # each imported anew
    (mine / f"{module}.py").write_text(text)
    method = OWN.replace("graphpo_docs_mine:Median", f"{module}:Broken")
    assert main(["train", *run_arguments(kb, mine / "run"), method]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("{name: own}", "method.object: is missing"),
        (OWN[7:].replace("Median", "Mean"), "method.object: cannot find"),
        (OWN[7:].replace("group_size", "groups"), "method.object: graphpo_docs_mine:Median"),
        (OWN[7:].replace("group_size: 4", "whiten: step"), "whiten is 'step', want none or batch"),
        (OWN[7:].replace("group_size: 4", "merging: null"), "object: merging is None, want Merge"),
        (
            "{name: own, object: {class: 'graphpo_agent.types:SamplingParams'}}",
            "method.object: graphpo_agent.types:SamplingParams has no name, merging, needs_states",
        ),
    ],
)
def test_what_cannot_be_a_method(
    kb: Path, mine: Path, method: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *run_arguments(kb, mine / "run"), f"method={method}", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
