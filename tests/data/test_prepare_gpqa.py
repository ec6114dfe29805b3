import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.data.prepare import prepare
from graphpo_agent.data.tasks import load_tasks, write_tasks
from graphpo_agent.errors import DataError
from graphpo_agent.rewards.math import MathReward
from graphpo_agent.types import Outcome
from tests.data.test_prepare_benchmarks import written
from tests.data.test_prepare_sources import lines, parquet


def row(number: int) -> dict[str, Any]:
    return {
        "Record ID": f"rec{number}",
        "Question": f"How many are {number} and 1?\n",
        "Correct Answer": f"{number + 1}\n",
        **{f"Incorrect Answer {i}": f"{number + 1 + i}" for i in (1, 2, 3)},
        "High-level domain": "Physics",
    }


def test_choices_are_shuffled_by_the_question_and_one_letter_is_right(tmp_path: Path) -> None:
    rows = [row(number) for number in range(400)]
    tasks = prepare("gpqa", [written(tmp_path / "gpqa.csv", *rows)]).tasks
    assert tasks == prepare("gpqa", [lines(tmp_path / "gpqa.jsonl", *rows)]).tasks
    for number, task in enumerate(tasks):
        asked, _, *choices = task.question.split("\n")
        assert asked == f"How many are {number} and 1?"
        assert [line[:3] for line in choices] == ["A) ", "B) ", "C) ", "D) "]
        assert f"{task.answers[0]}) {number + 1}" in choices
        assert sorted(int(line[3:]) for line in choices) == [number + i for i in (1, 2, 3, 4)]
        assert task.metadata == {"source_id": f"rec{number}", "level": "Physics"}
    letters = Counter(task.answers[0] for task in tasks)
    assert set(letters) == set("ABCD") and min(letters.values()) > 60


def test_choices_that_come_again_stand_in_other_orders(tmp_path: Path) -> None:
    choices = {name: row(0)[name] for name in row(0) if name.endswith(("Answer", "1", "2", "3"))}
    rows = [{**choices, "Question": f"How many in case {n}?"} for n in range(40)]
    tasks = prepare("gpqa", [lines(tmp_path / "gpqa.jsonl", *rows)]).tasks
    assert {task.answers[0] for task in tasks} == set("ABCD")


@pytest.mark.parametrize(
    "form", ["\\boxed{%s}", "\\boxed{\\text{(%s)}}", "Answer: (%s)", "Answer: %s."]
)
def test_the_mathematical_verifier_reads_letters(tmp_path: Path, form: str) -> None:
    (task,) = prepare("gpqa", [lines(tmp_path / "gpqa.jsonl", row(3))]).tasks
    reward = MathReward(seconds=60.0)
    (right,) = task.answers
    for letter in "ABCD":
        assert reward(task, Outcome(form % letter)) == float(letter == right)


def test_rows_that_leave_open_what_is_right(tmp_path: Path) -> None:
    other = {**row(1), "Correct Answer": "3", "Incorrect Answer 1": "2"}
    twice = {**row(2), "Incorrect Answer 3": "3"}
    wrong_twice = {**row(3), "Incorrect Answer 3": "6", "Incorrect Answer 2": "6"}
    path = lines(tmp_path / "gpqa.jsonl", row(0), row(1), other, twice, wrong_twice)
    prepared = prepare("gpqa", [path])
    assert [task.metadata["source_id"] for task in prepared.tasks] == ["rec0", "rec3"]
    (answer,) = prepared.tasks[1].answers
    assert f"\n{answer}) 4" in prepared.tasks[1].question
    assert prepared.summary.dropped == {
        "has its right choice twice": 1,
        "answers that contradict each other": 2,
    }


def test_a_question_is_excluded_whatever_file_has_it_and_whatever_its_choices(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "extended.csv", *(row(number) for number in range(6)))
    other = {**row(1), "Question": "HOW many are  1 and 1?", "Incorrect Answer 1": "11"}
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, prepare("gpqa", [lines(tmp_path / "main.jsonl", row(2))]).tasks)
    files = [
        written(tmp_path / "diamond.csv", row(0), other),
        tasks,
        lines(tmp_path / "bare.jsonl", {"question": row(3)["Question"]}),
    ]
    prepared = prepare("gpqa", [path], exclude=files)
    assert [task.metadata["source_id"] for task in prepared.tasks] == ["rec4", "rec5"]
    assert list(prepared.summary.overlaps.values()) == [2, 1, 1]


@pytest.mark.parametrize("kind", ["math", "asearcher"])
def test_prepared_tasks_exclude_a_question_of_another_source(tmp_path: Path, kind: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, prepare("gpqa", [lines(tmp_path / "main.jsonl", row(2))]).tasks)
    (whole,) = load_tasks(tasks)
    asked = (row(2)["Question"], whole.question, row(3)["Question"])
    path = lines(tmp_path / "a.jsonl", *({"question": each, "answer": "3"} for each in asked))
    prepared = prepare(kind, [path], exclude=[tasks])
    assert [task.question for task in prepared.tasks] == ["How many are 3 and 1?"]


@pytest.mark.parametrize("domain", [math.nan, Decimal("1.5"), 3])
def test_a_domain_that_is_no_text_is_not_kept(tmp_path: Path, domain: Any) -> None:
    path = parquet(tmp_path / "gpqa.parquet", {**row(1), "High-level domain": domain})
    prepared, out = prepare("gpqa", [path]), tmp_path / "tasks.jsonl"
    write_tasks(out, prepared.tasks)
    (task,) = load_tasks(out)
    assert task.metadata == {"source_id": "rec1"}


def test_a_row_without_a_choice(tmp_path: Path) -> None:
    short = row(1)
    del short["Incorrect Answer 3"]
    path = lines(tmp_path / "gpqa.jsonl", row(0), short)
    with pytest.raises(DataError, match=r"gpqa.jsonl:2: field 'Incorrect Answer 3' is missing"):
        prepare("gpqa", [path])
