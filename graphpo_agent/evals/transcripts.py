"""The transcripts of an evaluation, kept by task: an interruption costs those being sampled."""

from collections.abc import Mapping, Sequence
from typing import Any

from graphpo_agent.data.jsonl import write_rows
from graphpo_agent.evals.heldout import Judged, judged_paths, leaves
from graphpo_agent.partial_output import PartialOutput
from graphpo_agent.protocols import Expander
from graphpo_agent.rollout.grow import Rollout
from graphpo_agent.rollout.outages import Outages
from graphpo_agent.types import Task

__all__ = ["TranscriptFile", "Transcripts", "counted_in"]

_Rows = list[dict[str, Any]]
_COUNTED = ("reward", "outages", "tool_calls", "generated_tokens", "edges")


class Transcripts:
    """The trajectories of an evaluation, as one JSON row each.

    A row has ``id`` (task/node), ``task``, ``question``, ``gold`` and ``metadata`` of the task;
    ``response`` (the policy's words), ``turns`` (the same by turn; empty in segment mode),
    ``answer``, ``reward`` (null: left out for an outage), ``outages``, ``tool_calls``,
    ``generated_tokens`` (the policy's own) and ``edges``.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        """Args: all tasks."""
        self._tasks = {task.id: task for task in tasks}
        self._rows: dict[str, _Rows] = {}  # what is counted of them

    @property
    def missing(self) -> list[Task]:
        """The tasks that have no trajectories yet."""
        return [task for name, task in self._tasks.items() if name not in self._rows]

    @property
    def trajectories(self) -> list[Judged]:
        """What is there, as an evaluation counts it."""
        return [
            Judged(self._tasks[task], row["reward"], row["generated_tokens"], row["edges"])
            for task, rows in self._rows.items()
            for row in rows
        ]

    @property
    def outages(self) -> Outages:
        """What those met that were there before the sampling: none."""
        rows = [row for rows in self._rows.values() for row in rows]
        return Outages(len(rows), tool_calls=sum(row["tool_calls"] for row in rows))

    def add(self, rollout: Rollout, expander: Expander) -> None:
        """Count the trajectories of a task."""
        row = {"task": rollout.task.id, "rows": _rows(rollout, expander)}
        self._write(row)
        self._rows[rollout.task.id] = counted_in(row)

    def _write(self, row: dict[str, Any]) -> None:
        """They are kept nowhere."""

    def complete(self) -> None:
        """All tasks are there."""


class TranscriptFile(Transcripts):
    """Those of ``graphpo eval --out``, which are kept as soon as those of a task are there.

    The next evaluation of that name goes on with the tasks whose trajectories all count and met no
    outage.
    """

    def __init__(self, partial: PartialOutput[_Rows], tasks: Sequence[Task]) -> None:
        """Begin, or go on with what an interrupted evaluation left.

        Args:
            partial: of this evaluation; it keeps ``counted_in``.
            tasks: all of them.
        """
        super().__init__(tasks)
        self._partial = partial
        for task, rows in partial.kept.items():
            if all(row["reward"] is not None and not row["outages"] for row in rows):
                self._rows[task] = rows

    def _write(self, row: dict[str, Any]) -> None:
        """Keep the trajectories of a task.

        Raises:
            OSError: they cannot be written; names the file.
        """
        self._partial.add(row)

    def complete(self) -> None:
        """Write all rows, in the order of the tasks.

        Raises:
            DataError: they cannot be written.
        """
        rows = (row for task in self._tasks for row in self._partial.read(task)["rows"])
        write_rows(self._partial.output, rows)


def counted_in(row: Mapping[str, Any]) -> _Rows:
    """Of the trajectories of a task, as ``TranscriptFile`` keeps them, what is held in memory."""
    return [{name: each[name] for name in _COUNTED} for each in row["rows"]]


def _rows(rollout: Rollout, expander: Expander) -> _Rows:
    task = rollout.task
    rows: _Rows = []
    for (leaf, reward), judged in zip(leaves(rollout), judged_paths([rollout]), strict=True):
        state = rollout.states[leaf]
        outcome = expander.outcome(state)
        rows.append(
            {
                "id": f"{task.id}/{leaf}",
                "task": task.id,
                "question": task.question,
                "response": state.response,
                "turns": list(outcome.turns),
                "answer": state.answer,
                "gold": list(task.answers),
                "reward": reward,
                "outages": state.outages,
                "tool_calls": outcome.tool_calls,
                "generated_tokens": judged.generated_tokens,
                "edges": judged.turns,
                "metadata": dict(task.metadata),
            }
        )
    return rows
