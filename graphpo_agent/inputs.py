"""What a command reads, as a name that is another one where it reads something else."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphpo_agent.config import RunConfig, SftConfig
from graphpo_agent.engines.local.adapter_files import under_adapters

__all__ = ["inputs_name", "output_name"]

_SAMPLES, _SAMPLE_BYTES = 64, 2**14
"""Of a file of weights: other training changes nearly all of them."""


def output_name(
    verb: str,
    config: RunConfig | SftConfig,
    unused: Collection[str],
    files: Mapping[str, Sequence[Path]],
    **flags: int,
) -> dict[str, Any]:
    """What decides the output of a verb; two that agree in it are one.

    The policy goes by its path and by samples of what is in its files.

    Args:
        verb: which.
        config: with which settings.
        unused: those of its sections that change nothing.
        files: which it reads, by the section that names them; their contents decide.
        flags: of the command line.
    """
    settings = config.model_dump(mode="json", exclude=set(unused))
    return settings | inputs_name(config.model.path, files) | {"verb": verb} | flags


def inputs_name(model: str, files: Mapping[str, Sequence[Path]]) -> dict[str, Any]:
    """What is read, by name: digests of ``weights`` and files.

    Args:
        model: the policy's directory or name; of adapters what they belong to counts as well.
        files: by a name of theirs.

    Raises:
        ModelError: what adapters belong to is not there.
    """
    digests = {
        name: [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        for name, paths in files.items()
    }
    whole, adapters = under_adapters(model)
    return digests | {"weights": _sampled_digest([Path(each) for each in (whole, *adapters)])}


def _sampled_digest(directories: Sequence[Path]) -> str:
    """Of the names and sizes of their files, and of what is in each at places all over it."""
    digest = hashlib.sha256()
    files = (path for each in directories for path in sorted(each.glob("*")) if path.is_file())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}/{size}/".encode())
        with path.open("rb") as file:
            for k in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * k // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
