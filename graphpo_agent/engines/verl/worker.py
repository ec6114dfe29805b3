"""What a rollout worker of verl is given to grow graphs with. Nothing here imports verl."""

import json
from dataclasses import asdict, dataclass, field
from typing import Protocol

from graphpo_agent.engines.local.drawing import StopFinder
from graphpo_agent.engines.verl.rows import WeightedRow
from graphpo_agent.protocols import Policy, Tokenizer
from graphpo_agent.rollout.outages import Outages
from graphpo_agent.rollout.tally import Tally
from graphpo_agent.types import Task

__all__ = ["GraphWorker", "GrownGraph", "task_from_line", "task_line"]


@dataclass(frozen=True, slots=True)
class GrownGraph:
    """What becomes of one task.

    Attributes:
        rows: what is trained; at least one row, also of a graph that is not trained.
        total: see ``WeightedRows``; 0: the graph is not trained.
        tally: of the graph; a step's metrics come from the sum.
        counts: what the worker's parts have counted since its last graph; summed over a step.
        outages: what they met of its calls and paths.
        line: the graph as a line of ``graphs.jsonl``; None for most.
    """

    rows: list[WeightedRow]
    total: float
    tally: Tally = field(default_factory=Tally)
    counts: dict[str, int] = field(default_factory=dict[str, int])
    outages: Outages = field(default_factory=Outages)
    line: str | None = None


class GraphWorker(Protocol):
    """Grows and credits graphs; many threads use it at once."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's own."""
        ...

    @property
    def stops(self) -> StopFinder:
        """Of the same tokenizer."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Tokens a context may hold."""
        ...

    def grow(self, policy: Policy, task: Task, step: int) -> GrownGraph:
        """The graph of one task of a training step."""
        ...

    def answer(
        self, policy: Policy, task: Task, number: int
    ) -> tuple[WeightedRow, float | None, Outages]:
        """One trajectory of a held-out task, its reward (None: it does not count), outages met."""
        ...


def task_line(task: Task) -> str:
    """A task as it travels to a worker."""
    return json.dumps(asdict(task))


def task_from_line(line: str) -> Task:
    """What ``task_line`` wrote."""
    row = json.loads(line)
    return Task(row["id"], row["question"], tuple(row["answers"]), row["metadata"])
