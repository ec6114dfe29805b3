"""Media libraries for CUDA beside a torch for CPUs must not break the imports of transformers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import graphpo_agent, importlib.util as util
print(*[name for name in ("torchvision", "torchaudio", "torchcodec", "triton")
        if util.find_spec(name) is None])
"""


def install(place: Path, name: str, version: str) -> None:
    """A distribution of this name whose import fails, ahead of any real one."""
    (place / name).mkdir()
    (place / name / "__init__.py").write_text("raise RuntimeError('built for another torch')")
    info = place / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("torch", "torchvision", "hidden"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cu130", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0", "0.28.0", False),
        ("2.13.0+cu130", "0.28.0", False),
    ],
)
def test_only_what_does_not_fit_a_cpu_build_is_hidden(
    torch: str, torchvision: str, hidden: bool, tmp_path: Path
) -> None:
    install(tmp_path, "torch", torch)
    install(tmp_path, "torchvision", torchvision)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("torchvision" in done.stdout.split()) == hidden
