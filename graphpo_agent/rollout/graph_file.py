"""The graphs of ``graphpo rollout``, kept as soon as each is finished."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from graphpo_agent.atomic import write_atomically
from graphpo_agent.graph.jsonl import graph_to_json
from graphpo_agent.partial_output import PartialOutput
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.rollout.grow import Rollout
from graphpo_agent.rollout.outages import Outages, outages_of
from graphpo_agent.types import Task

__all__ = ["GraphFile", "outages_in"]


class GraphFile:
    """One graph per task; the next rollout of that name goes on with those that met no outage."""

    def __init__(self, partial: PartialOutput[Outages], tasks: Sequence[Task]) -> None:
        """Begin, or go on with what an interrupted rollout left.

        Args:
            partial: of this rollout; it keeps ``outages_in``.
            tasks: all of them.
        """
        self._partial = partial
        self._tasks = tasks
        self._outages = {
            task: met
            for task, met in partial.kept.items()
            if not met.left_out and not met.failed_calls
        }

    @property
    def missing(self) -> list[Task]:
        """The tasks that have no graph yet."""
        return [task for task in self._tasks if task.id not in self._outages]

    @property
    def outages(self) -> Outages:
        """Those of all graphs that are there."""
        return sum(self._outages.values(), Outages())

    def add(self, rollout: Rollout, tokenizer: Tokenizer) -> None:
        """Keep the graph of a task.

        Raises:
            OSError: it cannot be written; names the file.
        """
        met, task = outages_of([rollout], tokenizer.decode), rollout.task.id
        graph = graph_to_json(rollout.graph, rollout.classes)
        self._partial.add({"task": task, "outages": asdict(met), "graph": graph})
        self._outages[task] = met

    def complete(self) -> None:
        """Write all graphs, in the order of the tasks; none is missing.

        Raises:
            OSError: they cannot be written; names the file.
        """
        graphs = (self._partial.read(task.id)["graph"] for task in self._tasks)
        write_atomically(self._partial.output, (f"{graph}\n".encode() for graph in graphs))


def outages_in(row: Mapping[str, Any]) -> Outages:
    """Those of a graph as ``GraphFile`` adds it."""
    return Outages(**row["outages"])
