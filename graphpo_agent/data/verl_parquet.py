"""Tasks as the parquet file that Search-R1 and verl train on."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graphpo_agent.errors import DataError
from graphpo_agent.types import Message, Task

__all__ = ["write_verl_parquet"]

_ROWS = 4096
"""Rows written at a time."""
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_TRUTH = pa.struct([("target", pa.list_(pa.string()))])
_EXTRA = pa.struct([("split", pa.string()), ("index", pa.int64()), ("question", pa.string())])
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("question", pa.string()),
        ("golden_answers", pa.list_(pa.string())),
        ("data_source", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", _TRUTH)])),
        ("extra_info", _EXTRA),
        ("metadata", pa.string()),
    ]
)


def write_verl_parquet(
    path: Path,
    tasks: Iterable[Task],
    render: Callable[[Task], Sequence[Message]],
    split: str = "train",
) -> None:
    """Write one row per task; whole or not at all.

    ``extra_info.index``, by which upstream groups rollouts, is made from the task's id: it stays
    the task's own where several such files are merged. ``metadata`` is the task's, as JSON.

    Args:
        path: the file; its directory is made where missing.
        tasks: with different ids.
        render: the prompt of a task, as a dialect writes it.
        split: what ``extra_info.split`` says.

    Raises:
        DataError: the file cannot be written.
    """
    if not path.name:
        raise DataError(f"{path}: cannot be written (it names no file)")
    partial = path.with_name(f".{path.name}.partial")
    rows = (_row(task, render(task), split) for task in tasks)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(partial, _SCHEMA) as writer:
            for batch in _batches(rows):
                writer.write_table(pa.Table.from_pylist(batch, schema=_SCHEMA))
        partial.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        partial.unlink(missing_ok=True)


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(rows, _ROWS)):
        yield batch


def _row(task: Task, prompt: Sequence[Message], split: str) -> dict[str, Any]:
    answers = list(task.answers)
    return {
        "id": task.id,
        "question": task.question,
        "golden_answers": answers,
        "data_source": task.metadata.get("source", "unknown"),
        "prompt": [dict(message) for message in prompt],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": _index(task.id), "question": task.question},
        "metadata": json.dumps(dict(task.metadata), ensure_ascii=False),
    }


def _index(identifier: str) -> int:
    """A number below 2⁶³ that no other task has (but by a chance of 10⁻¹⁰ in 35,000 tasks)."""
    return int.from_bytes(hashlib.sha256(identifier.encode()).digest()[:8], "big") >> 1
