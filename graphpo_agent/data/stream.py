"""The order in which a run meets its tasks."""

from collections.abc import Sequence

import numpy as np

from graphpo_agent.errors import DataError
from graphpo_agent.types import Task

__all__ = ["TaskStream"]


class TaskStream:
    """An endless shuffled pass over the tasks, each epoch in an order of its own.

    The position alone says what comes next, so a resumed run goes on where it stopped.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0) -> None:
        self.position = position
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def draw(self, count: int, exclude: frozenset[str] = frozenset()) -> list[Task]:
        """The next ``count`` tasks, all different and none with an id in ``exclude``.

        Raises:
            DataError: there are not that many different tasks.
        """
        if count + len(exclude) > len(self._tasks):
            raise DataError(
                f"a step needs {count + len(exclude)} different tasks but the file has "
                f"{len(self._tasks)}: lower train.prompts_per_step or train.max_resample"
            )
        drawn: dict[str, Task] = {}
        while len(drawn) < count:
            task = self._at(self.position)
            self.position += 1
            if task.id not in exclude:
                drawn.setdefault(task.id, task)
        return list(drawn.values())

    def _at(self, position: int) -> Task:
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._order = (
                np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks)).tolist()
            )
            self._epoch = epoch
        return self._tasks[self._order[index]]
