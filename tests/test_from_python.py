"""Growing and crediting from Python, as docs/architecture.md shows it."""

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worlds import ROOT


def test_the_documented_lines_run_where_an_event_loop_goes_on(
    kb: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("## From Python")[2]
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "worlds").mkdir()
    (tmp_path / "worlds/kb").symlink_to(kb)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    async def notebook() -> None:
        exec(example, names)

    asyncio.run(notebook())
    assert capsys.readouterr().out.strip()
    for graph, credit in zip(names["graphs"], names["credits"], strict=True):
        assert np.isfinite(credit.advantages[:, 1:]).all() and graph.num_nodes > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configs", "worlds"]
