"""What every node of a Ray cluster has to have. Ray is imported when needed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from graphpo_agent.errors import RunError, first_line

__all__ = ["check_nodes", "named_paths"]


def named_paths(settings: object) -> list[str]:
    """The files and directories that a configuration names and that are there.

    Args:
        settings: of a run, as JSON has them.
    """
    return [text for text in _texts(settings) if "/" in text and os.path.exists(text)]


def _texts(settings: object) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping):
        for value in cast(Mapping[str, object], settings).values():
            yield from _texts(value)
    elif isinstance(settings, Sequence):
        for value in cast(Sequence[object], settings):
            yield from _texts(value)


def check_nodes(paths: Sequence[str]) -> None:
    """Check that every node of the cluster has this package and sees the run's files.

    verl puts its processes anywhere: one that wants what is not there ends the run later, or reads
    and writes somewhere else.

    Args:
        paths: that are there on this machine.

    Raises:
        RunError: a node lacks one of them, or does not run this package.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look: Any = ray.remote(num_cpus=0, max_retries=0)(_missing)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    on_node = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    answers = [look.options(scheduling_strategy=place).remote(list(paths)) for place in on_node]
    for node, answer in zip(nodes, answers, strict=True):
        where = f"node {node['NodeManagerAddress']} of the Ray cluster"
        try:
            missing = ray.get(answer)
        except RayError as error:
            said = first_line(error).rstrip(".")
            raise RunError(
                f"{where} cannot run graphpo_agent: {said}; install the same packages on all nodes"
            ) from error
        if missing:
            raise RunError(
                f"{where} does not see {missing[0]}: all nodes need the model, data, index and run "
                "directory under the same path"
            )


def _missing(paths: list[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]
