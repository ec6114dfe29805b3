"""Tasks as the parquet file that verl, Search-R1 and Tree-GRPO train on.

They differ in what their scorers need. ``data_source`` names the scorer: verl knows Search-R1's
seven sets with the prefix ``searchR1_``, Search-R1 the same without, and both stop at any other
name; Tree-GRPO scores its question answering sets by exact match and every other name by F1.
Search-R1 and Tree-GRPO take the last answer element of prompt and response together, and none
where there is only one: the prompt has to hold one.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from graphpo_agent.atomic import replacing
from graphpo_agent.errors import ConfigError, DataError, first_line
from graphpo_agent.outputs import check_place
from graphpo_agent.types import Message, Task

__all__ = ["VERL_PREFIX", "Trainer", "write_verl_parquet"]

Trainer = Literal["verl", "search-r1", "tree-grpo"]
"""Whose trainer reads the file."""
VERL_PREFIX = "searchR1_"
"""What verl puts before the names of Search-R1's data sets."""

_ROWS = 4096
"""Rows written at a time."""
_EXACT_MATCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""The data sets that Search-R1 and verl score, all of them by the same rule."""
_SEARCH_TAGS = (
    "To look something up, write <search> your query </search>; what is found is shown to you "
    "between <information> and </information>. You may search as often as you need."
)
_SEARCH_TOOL = "To look something up, call the search tool, as often as you need."
_PROMPT = """\
Find the answer to the question at the end. Reason inside <think> </think> first, and again after \
everything that you look up. {search} Once nothing is missing, give the answer alone, in a few \
words, like this: <answer> 1987 </answer>
Question: {question}
"""

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TRUTH = pa.struct([("target", pa.list_(pa.string()))])
_CREATE = pa.struct(
    [("ground_truth", _TRUTH), ("question", pa.string()), ("data_source", pa.string())]
)
_EXTRA = [("split", pa.string()), ("index", pa.int64()), ("question", pa.string())]
_VERL_EXTRA = [
    ("need_tools_kwargs", pa.bool_()),
    ("tools_kwargs", pa.struct([("search", pa.struct([("create_kwargs", _CREATE)]))])),
]


def _schema(trainer: Trainer) -> pa.Schema:
    verl = trainer == "verl"
    columns = [
        ("id", pa.string()),
        ("question", pa.string()),
        ("golden_answers", pa.list_(pa.string())),
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", _TRUTH)])),
        ("extra_info", pa.struct([*_EXTRA, *_VERL_EXTRA] if verl else _EXTRA)),
        ("metadata", pa.string()),
    ]
    return pa.schema([*columns, ("agent_name", pa.string())] if verl else columns)


def write_verl_parquet(
    path: Path,
    tasks: Iterable[Task],
    trainer: Trainer = "verl",
    prompts: Mapping[str, Sequence[Message]] | None = None,
) -> None:
    """Write one row per task; whole or not at all.

    A task whose source the trainer's scorer does not know is scored as ``nq`` is, by exact match
    (Tree-GRPO: under its own name, by F1). For verl rows name the loop ``tool_agent`` and give the
    tool ``search`` its arguments.

    ``extra_info.index``, by which upstream groups rollouts, is made from the task's id: it stays
    the task's own where several such files are merged. ``metadata`` is the task's, as JSON, with
    the source that it came from.

    Args:
        path: the file; its directory is made where missing.
        tasks: with different ids.
        trainer: for whom the file is.
        prompts: by task id, those that are not to be this module's own.

    Raises:
        ConfigError: another trainer.
        DataError: the file cannot be written.
    """
    if trainer not in get_args(Trainer):
        raise ConfigError(f"parquet: {trainer!r} is none of {', '.join(get_args(Trainer))}")
    check_place(path)
    given = prompts or {}
    rows = (_row(task, given.get(task.id) or _prompt(task, trainer), trainer) for task in tasks)
    schema = _schema(trainer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, pq.ParquetWriter(partial, schema) as writer:
            for batch in _batches(rows):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({first_line(error)})") from error


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(rows, _ROWS)):
        yield batch


def _prompt(task: Task, trainer: Trainer) -> list[Message]:
    """One user message with one answer element: without its own, a response has no answer."""
    search = _SEARCH_TOOL if trainer == "verl" else _SEARCH_TAGS
    return [{"role": "user", "content": _PROMPT.format(search=search, question=task.question)}]


def _data_source(task: Task, trainer: Trainer) -> str:
    source = str(task.metadata.get("source", "unknown"))
    if trainer == "tree-grpo":
        return source
    known = source if source in _EXACT_MATCH else _EXACT_MATCH[0]
    return VERL_PREFIX + known if trainer == "verl" else known


def _row(task: Task, prompt: Sequence[Message], trainer: Trainer) -> dict[str, Any]:
    answers = list(task.answers)
    truth = {"target": answers}
    source = _data_source(task, trainer)
    create = {"ground_truth": truth, "question": task.question, "data_source": source}
    row = {
        "id": task.id,
        "question": task.question,
        "golden_answers": answers,
        "data_source": source,
        "prompt": [dict(message) for message in prompt],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": _index(task.id), "question": task.question},
        "metadata": json.dumps(dict(task.metadata), ensure_ascii=False),
    }
    if trainer == "verl":
        row["agent_name"] = "tool_agent"
        row["extra_info"] |= {
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": create}},
        }
    return row


def _index(identifier: str) -> int:
    """A number below 2⁶³ that no other task has (but by a chance of 10⁻¹⁰ in 35,000 tasks)."""
    return int.from_bytes(hashlib.sha256(identifier.encode()).digest()[:8], "big") >> 1
