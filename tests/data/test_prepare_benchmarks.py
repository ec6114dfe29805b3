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


def test_webwalker_in_all_its_shapes(tmp_path: Path) -> None:
    flat = {"id": 3, "Question": "When?", "answer": "in May", "difficulty_level": "easy"}
    nested = {
        "question": "Where?",
        "answer": "in the hall",
        "root_url": "https://example.org/",
        "info": {"difficulty_level": "hard", "type": "multi_source"},
    }
    capital = {"Question": "Who?", "Answer": "Ada", "Info": {"Difficulty_Level": "Medium"}}
    untold = {"question": "Why?", "answer": "so", "info": {"difficulty_level": None}}
    path = lines(tmp_path / "a.jsonl", flat, nested, capital, untold)
    tasks = prepare("benchmark", [path]).tasks
    assert [task.metadata for task in tasks] == [
        {"source_id": "3", "level": "easy"},
        {"level": "hard"},
        {"level": "Medium"},
        {},
    ]
    assert [task.answers for task in tasks] == [("in May",), ("in the hall",), ("Ada",), ("so",)]


def test_whole_numbers_are_whole_in_columns_of_floats(tmp_path: Path) -> None:
    rows = [
        {"id": 3.0, "Question": "When?", "Final answer": 1987.0, "Level": 2.0},
        {"id": 4.0, "Question": "How long?", "Final answer": 2.5, "Level": None},
        {"id": 5.0, "Question": "How many?", "Final answer": 1e300, "Level": 1.0},
    ]
    tasks = prepare("benchmark", [parquet(tmp_path / "a.parquet", *rows)]).tasks
    assert [task.answers for task in tasks] == [("1987",), ("2.5",), ("1e+300",)]
    assert [task.metadata for task in tasks] == [
        {"source_id": "3", "level": "2"},
        {"source_id": "4"},
        {"source_id": "5", "level": "1"},
    ]


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
    question = "Who wrote of the sea? " * 12
    wrapped = base64.encodebytes(base64.b64decode(hashed(question))).decode()
    row = {"problem": f" {wrapped}\r\n", "answer": f"{hashed('Ada')} ", "canary": CANARY}
    (task,) = prepare("benchmark", [lines(tmp_path / "a.jsonl", row)]).tasks
    assert (task.question, task.answers) == (question.strip(), ("Ada",))


def test_a_question_of_plain_words_is_not_taken_for_base64(tmp_path: Path) -> None:
    row = {"question": "Name the second city of the empire then", "answer": "Ada", "canary": CANARY}
    (task,) = prepare("benchmark", [lines(tmp_path / "a.jsonl", row)]).tasks
    assert (task.question, task.answers) == (row["question"], ("Ada",))


def test_a_short_word_is_a_question_that_nobody_encrypted(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"question": "Why", "answer": "so"})
    (task,) = prepare("benchmark", [path]).tasks
    assert (task.question, task.answers) == ("Why", ("so",))


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
        *(
            (
                {"problem": hashed("Who?"), "answer": answer, "canary": CANARY},
                "field 'answer' is not encrypted with the row's canary, as its question is: "
                "give a decrypted copy",
            )
            for answer in (encrypted("Ada", b"another"), hashed("Ada")[:-1], "Ada Oak", "1987")
        ),
        *(
            (
                {"problem": hashed("Who wrote of the sea before 1987?"), "answer": "x", **canary},
                "field 'problem' is encrypted, and the row has no 'canary' to decrypt it with: "
                "add it, or give a decrypted copy",
            )
            for canary in ({}, {"canary": ""})
        ),
    ],
)
def test_a_row_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = lines(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError) as error:
        prepare("benchmark", [path])
    assert str(error.value) == f"{path}:1: {says}"
