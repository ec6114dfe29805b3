"""Task files as verl's data set. Imported by verl's processes, which so learn our agent loops."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from graphpo_agent.data.tasks import load_tasks
from graphpo_agent.engines.verl import loop  # noqa: F401  (registers the agent loops)
from graphpo_agent.engines.verl.worker import task_line

__all__ = ["TaskDataset"]


class TaskDataset(Dataset[dict[str, Any]]):
    """Tasks by number, each with the agent loop that serves it.

    Only held-out tasks are asked for with a limit (``data.val_max_samples``); so they are known.
    """

    def __init__(
        self, data_files: str | Sequence[str], config: Any, max_samples: int = -1, **others: object
    ) -> None:
        """Read the tasks, but for the training tasks at ``config.left_out``.

        ``others`` is what verl gives to every data set.
        """
        paths = [data_files] if isinstance(data_files, str) else list(data_files)
        tasks = load_tasks(*map(Path, paths))
        self._heldout = max_samples > 0
        left_out = frozenset(config.left_out)
        fitting = [task for place, task in enumerate(tasks) if place not in left_out]
        self._tasks = tasks[:max_samples] if self._heldout else fitting

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task = self._tasks[index]
        return {
            "index": index,
            "raw_prompt": [{"role": "user", "content": task.question}],
            "task": task_line(task),
            "agent_name": "graphpo_heldout" if self._heldout else "graphpo",
            "data_source": "heldout" if self._heldout else "train",
        }
