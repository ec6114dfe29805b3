"""Evaluations of search agents, as they are published."""

import base64
import csv
import hashlib
import math
from decimal import Decimal
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.data.prepare import Summary, prepare
from graphpo_agent.data.tasks import load_tasks, write_tasks
from graphpo_agent.errors import DataError
from tests.data.test_prepare_sources import lines, parquet

CANARY = "a canary 3a5c"


def encrypted(text: str, key: bytes) -> str:
    return base64.b64encode(bytes(a ^ b for a, b in zip(text.encode(), cycle(key)))).decode()


def hashed(text: str) -> str:
    return encrypted(text, hashlib.sha256(CANARY.encode()).digest())


def written(path: Path, *rows: dict[str, Any]) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_gaia(tmp_path: Path) -> None:
    row = {"task_id": "c61d", "Question": "Who?", "Level": "2", "Final answer": "Ada"}
    path = parquet(
        tmp_path / "validation.parquet",
        {**row, "file_name": "", "Annotator Metadata": {"Steps": "1."}},
        {**row, "Question": "What is drawn?", "file_name": "c61d.png"},
        {**row, "Question": "Hidden?", "Final answer": "?", "file_name": ""},
    )
    prepared = prepare("benchmark", [path])
    (task,) = prepared.tasks
    assert (task.question, task.answers) == ("Who?", ("Ada",))
    assert task.metadata == {"source_id": "c61d", "level": "2"}
    assert prepared.summary == Summary(3, 1, 0, {"comes with a file": 1, "no answer": 1}, {}, 0)


def test_webwalker_in_both_its_shapes(tmp_path: Path) -> None:
    flat = {"id": 3, "Question": "When?", "answer": "in May", "difficulty_level": "easy"}
    nested = {
        "question": "Where?",
        "answer": "in the hall",
        "root_url": "https://example.org/",
        "info": {"difficulty_level": "hard", "type": "multi_source"},
    }
    tasks = prepare("benchmark", [lines(tmp_path / "a.jsonl", flat, nested)]).tasks
    assert [task.metadata for task in tasks] == [
        {"source_id": "3", "level": "easy"},
        {"level": "hard"},
    ]
    assert [task.answers for task in tasks] == [("in May",), ("in the hall",)]


@pytest.mark.parametrize("question", ["Wer? «Ada»\nund wo", "abcd"])
def test_browsecomp_and_xbench_are_decrypted(tmp_path: Path, question: str) -> None:
    browsecomp = {"problem": hashed(question), "answer": hashed("Ada"), "problem_topic": "People"}
    xbench = {
        "id": 7,
        "prompt": encrypted(question, CANARY.encode()),
        "answer": encrypted("Ada", CANARY.encode()),
        "reference_steps": encrypted("1. look", CANARY.encode()),
    }
    for row in (browsecomp, xbench):
        path = written(tmp_path / "a.csv", {**row, "canary": CANARY})
        (task,) = prepare("benchmark", [path]).tasks
        assert (task.question, task.answers) == (question, ("Ada",))
        assert task.metadata["canary"] == CANARY
        train = lines(
            tmp_path / "t.jsonl", *({"question": q, "answer": "x"} for q in (question, "q"))
        )
        prepared = prepare("asearcher", [train], exclude=[path])
        assert prepared.summary.overlaps == {str(path): 1} and prepared.summary.tasks == 1


def test_white_space_around_encrypted_texts_says_nothing(tmp_path: Path) -> None:
    row = {"problem": f" {hashed('Who?')}\n", "answer": f"{hashed('Ada')} ", "canary": CANARY}
    (task,) = prepare("benchmark", [lines(tmp_path / "a.jsonl", row)]).tasks
    assert (task.question, task.answers) == ("Who?", ("Ada",))


@pytest.mark.parametrize("canary", [math.nan, Decimal("1.5"), 3])
def test_a_canary_that_is_no_text_is_not_kept(tmp_path: Path, canary: Any) -> None:
    row = {"question": "Who?", "answer": "Ada", "canary": canary}
    prepared = prepare("benchmark", [parquet(tmp_path / "a.parquet", row)])
    write_tasks(tmp_path / "tasks.jsonl", prepared.tasks)
    (task,) = load_tasks(tmp_path / "tasks.jsonl")
    assert task.metadata == {}


def test_a_decrypted_copy_is_read_as_it_is(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", {"problem": "Who is it?", "answer": "1987", "canary": CANARY}
    )
    (task,) = prepare("benchmark", [path]).tasks
    assert (task.question, task.answers) == ("Who is it?", ("1987",))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "x?"}, "field 'answer' is missing"),
        ({"answer": "x"}, "field 'question' is missing"),
        ({"Question": "x?"}, "field 'answer' is missing"),
        (
            {"problem": hashed("Who?"), "answer": "x", "canary": "another"},
            "field 'problem' is encrypted, and not with the row's canary: give a decrypted copy",
        ),
    ],
)
def test_a_row_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = lines(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError) as error:
        prepare("benchmark", [path])
    assert str(error.value) == f"{path}:1: {says}"
