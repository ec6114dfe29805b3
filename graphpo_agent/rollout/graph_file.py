"""The graphs of ``graphpo rollout``, kept as soon as each is finished."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graphpo_agent.graph.jsonl import graph_to_json
from graphpo_agent.partial_output import PartialOutput
from graphpo_agent.protocols import Tokenizer
from graphpo_agent.rollout.grow import Rollout
from graphpo_agent.rollout.outages import Outages, outages_of
from graphpo_agent.types import Task

__all__ = ["GraphFile"]


class GraphFile:
    """One graph per task; the next rollout of that name goes on with those that met no outage."""

    def __init__(self, partial: PartialOutput, tasks: Sequence[Task]) -> None:
        """Begin, or go on with what an interrupted rollout left.

        Args:
            partial: of this rollout.
            tasks: all of them.
        """
        self._partial = partial
        self._tasks = tasks
        self._rows: dict[str, dict[str, Any]] = {}
        for task, row in partial.rows.items():
            met = Outages(**row["outages"])
            if not met.left_out and not met.failed_calls:
                self._rows[task] = row

    @property
    def missing(self) -> list[Task]:
        """The tasks that have no graph yet."""
        return [task for task in self._tasks if task.id not in self._rows]

    @property
    def outages(self) -> Outages:
        """Those of all graphs that are there."""
        return sum((Outages(**row["outages"]) for row in self._rows.values()), Outages())

    def add(self, rollout: Rollout, tokenizer: Tokenizer) -> None:
        """Keep the graph of a task.

        Raises:
            OSError: it cannot be written; names the file.
        """
        met = asdict(outages_of([rollout], tokenizer.decode))
        graph = graph_to_json(rollout.graph, rollout.classes)
        row = {"task": rollout.task.id, "outages": met, "graph": graph}
        self._partial.add(row)
        self._rows[rollout.task.id] = row

    @property
    def lines(self) -> list[str]:
        """All graphs, in the order of the tasks; none is missing."""
        return [self._rows[task.id]["graph"] for task in self._tasks]
