from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.data.prepare import prepare
from graphpo_agent.errors import DataError
from graphpo_agent.rewards.math import MathReward
from graphpo_agent.types import Outcome
from tests.data.test_prepare_benchmarks import written
from tests.data.test_prepare_sources import lines


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
    path = lines(tmp_path / "gpqa.jsonl", row(0), row(1), other, twice)
    prepared = prepare("gpqa", [path])
    assert [task.metadata["source_id"] for task in prepared.tasks] == ["rec0"]
    assert prepared.summary.dropped == {
        "has a choice twice": 1,
        "answers that contradict each other": 2,
    }


def test_a_row_without_a_choice(tmp_path: Path) -> None:
    short = row(1)
    del short["Incorrect Answer 3"]
    path = lines(tmp_path / "gpqa.jsonl", row(0), short)
    with pytest.raises(DataError, match=r"gpqa.jsonl:2: field 'Incorrect Answer 3' is missing"):
        prepare("gpqa", [path])
