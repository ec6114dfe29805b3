"""The transcripts of an evaluation, kept by task: an interruption costs those being sampled."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphpo_agent.config import RunConfig
from graphpo_agent.data.jsonl import append_line, read_rows, write_rows
from graphpo_agent.errors import ConfigError
from graphpo_agent.evals.heldout import Judged, judged_paths, leaves
from graphpo_agent.protocols import Expander
from graphpo_agent.rollout.grow import Rollout
from graphpo_agent.rollout.outages import Outages
from graphpo_agent.types import Task

__all__ = ["TranscriptFile", "Transcripts", "evaluation_name"]

_NOT_EVALUATED = ("output", "threads", "budget", "outage_limit", "update", "train")


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
        self._rows: dict[str, list[dict[str, Any]]] = {}

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
        """Keep the trajectories of a task."""
        self._rows[rollout.task.id] = _rows(rollout, expander)

    def complete(self) -> None:
        """All tasks are there."""


class TranscriptFile(Transcripts):
    """Those of ``graphpo eval --out``, in a file.

    Until it is complete it is named ``<path>.partial``, with what evaluation it is of in its first
    line. The next evaluation of that name goes on with the tasks whose trajectories all count and
    met no outage.
    """

    def __init__(self, path: Path, name: Mapping[str, Any], tasks: Sequence[Task], samples: int):
        """Begin, or go on with what an interrupted evaluation left.

        Args:
            path: of the complete file.
            name: what is evaluated; JSON.
            tasks: all of them.
            samples: trajectories of a task.

        Raises:
            ConfigError: the partial file is of another evaluation.
            DataError: it cannot be read or written.
        """
        super().__init__(tasks)
        self._path = path
        if self.partial.exists():
            for task, rows in _left_by(self.partial, name).items():
                undisturbed = all(row["reward"] is not None and not row["outages"] for row in rows)
                if undisturbed and len(rows) == samples:
                    self._rows[task] = rows
        kept = [row for rows in self._rows.values() for row in rows]
        write_rows(self.partial, [name, *kept])

    @property
    def partial(self) -> Path:
        """Where the rows are until all are there."""
        return self._path.with_name(f"{self._path.name}.partial")

    def add(self, rollout: Rollout, expander: Expander) -> None:
        """Append the trajectories of a task.

        Raises:
            OSError: they cannot be written; names the file.
        """
        super().add(rollout, expander)
        rows = self._rows[rollout.task.id]
        lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
        append_line(self.partial, "\n".join(lines))

    def complete(self) -> None:
        """Write all rows, in the order of the tasks, where they belong.

        Raises:
            DataError: they cannot be written.
        """
        write_rows(self._path, (row for task in self._tasks for row in self._rows[task]))
        self.partial.unlink(missing_ok=True)  # another that is the same may have ended


def evaluation_name(
    config: RunConfig, tasks: Path, samples: int, greedy: bool
) -> dict[str, Mapping[str, Any]]:
    """What decides an evaluation's trajectories, as JSON; two that agree in it are one.

    The policy goes by its path and by when its files were last written.
    """
    model = Path(config.model.path)
    written = [file.stat().st_mtime_ns for file in model.glob("*") if file.is_file()]
    settings = config.model_dump(mode="json", exclude=set(_NOT_EVALUATED))
    digest = hashlib.sha256(tasks.read_bytes()).hexdigest()
    flags = {"samples": samples, "greedy": greedy}
    return {"evaluation": settings | flags | {"tasks": digest, "weights": max(written, default=0)}}


def _rows(rollout: Rollout, expander: Expander) -> list[dict[str, Any]]:
    task = rollout.task
    rows: list[dict[str, Any]] = []
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


def _left_by(partial: Path, name: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each task in a partial file; a last line that was cut off is left out."""
    found = [row for _, row in read_rows(partial, log=True)]
    if not found:
        return {}
    (begun, *rows) = found
    if begun != json.loads(json.dumps(name)):
        own, other = name["evaluation"], begun.get("evaluation", {})
        differ = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
        raise ConfigError(
            f"{partial} holds an interrupted evaluation with other {', '.join(differ)}: remove it, "
            "or name another --out"
        )
    of_task: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_task.setdefault(row["task"], []).append(row)
    return of_task
