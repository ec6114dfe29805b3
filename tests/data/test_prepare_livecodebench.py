import base64
import json
import pickle
import zlib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.cli import main
from graphpo_agent.data import livecodebench
from graphpo_agent.data.prepare import prepare
from graphpo_agent.data.tasks import load_tasks, write_tasks
from graphpo_agent.errors import DataError
from graphpo_agent.program_tests import ProgramTests
from graphpo_agent.rewards.code import CodeReward
from graphpo_agent.types import Outcome
from tests.data.test_prepare_sources import lines, parquet

PRINTS = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
CALLS = [{"input": "[1, 2]\n3", "output": "true", "testtype": "functional"}]


def compressed(value: Any) -> str:
    return squeezed(pickle.dumps(value))


def squeezed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def problem(tests: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    return {
        "question_title": "Sums",
        "question_content": "Add them.\n",
        "platform": "atcoder",
        "question_id": "abc301_a",
        "contest_date": "2024-05-13T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(tests),
        "private_test_cases": compressed(json.dumps(tests * 2)),
        "metadata": "{}",
        **fields,
    }


def test_both_kinds_of_problems_become_tasks_that_the_reward_can_judge(tmp_path: Path) -> None:
    starter = "class Solution:\n    def hasSum(self, values: List[int], n: int) -> bool:\n        "
    called = problem(
        CALLS,
        question_content="Is it so?",
        starter_code=starter,
        metadata='{"func_name": "hasSum"}',
        private_test_cases=json.dumps(CALLS * 2),
    )
    path, out = lines(tmp_path / "test6.jsonl", problem(PRINTS), called), tmp_path / "tasks.jsonl"
    assert main(["data", "prepare", "livecodebench", str(path), "--out", str(out)]) == 0
    printing, calling = load_tasks(out)
    assert printing.question.startswith("Add them.\n\nWrite a Python program that reads")
    assert calling.question.startswith(
        f"Is it so?\n\nComplete this Python code:\n\n```python\n{starter.rstrip()}\n```"
    )
    for task, tests, function in ((printing, PRINTS, None), (calling, CALLS, "hasSum")):
        case = (tests[0]["input"], tests[0]["output"])
        assert ProgramTests.unpacked(task.metadata["tests"]) == ProgramTests((case,) * 3, function)
        assert task.answers == () and task.metadata["level"] == "easy"
        assert task.metadata["contest_date"] == "2024-05-13T00:00:00"
        assert (task.metadata["source"], task.metadata["source_id"]) == ("atcoder", "abc301_a")
    reward = CodeReward(seconds=30.0)
    assert reward(printing, Outcome("```python\nprint(sum(map(int, input().split())))\n```")) == 1.0
    method = f"{starter}return sum(values) == n"
    assert reward(calling, Outcome(f"```python\n{method}\n```")) == 1.0


def test_problems_of_its_own_files_and_of_task_files_are_excluded(tmp_path: Path) -> None:
    texts = ["Add them.", "Subtract them.", "Divide them."]
    path = lines(tmp_path / "a.jsonl", *(problem(PRINTS, question_content=text) for text in texts))
    untested = {"question_content": "ADD  them\n", "starter_code": ""}
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, prepare("livecodebench", [path]).tasks[1:2])
    files = [lines(tmp_path / "test6.jsonl", untested), tasks]
    prepared = prepare("livecodebench", [path], exclude=files)
    assert [task.question[:12] for task in prepared.tasks] == ["Divide them."]
    assert list(prepared.summary.overlaps.values()) == [1, 1]


def test_a_problem_of_which_one_test_prints_is_a_program(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", problem(PRINTS, private_test_cases=json.dumps(CALLS)))
    (task,) = prepare("livecodebench", [path]).tasks
    tests = ProgramTests.unpacked(task.metadata["tests"])
    assert tests.function is None and len(tests.cases) == 2


def test_neither_level_nor_date_is_needed(tmp_path: Path) -> None:
    row = problem(PRINTS)
    del row["difficulty"], row["contest_date"]
    (task,) = prepare("livecodebench", [lines(tmp_path / "a.jsonl", row)]).tasks
    assert set(task.metadata) == {"source", "source_id", "tests"}


def test_a_date_is_the_same_in_a_column_of_times(tmp_path: Path) -> None:
    row = problem(PRINTS, contest_date=datetime(2024, 5, 13))
    (task,) = prepare("livecodebench", [parquet(tmp_path / "a.parquet", row)]).tasks
    assert task.metadata["contest_date"] == "2024-05-13T00:00:00"


def test_a_text_that_is_very_long_when_decompressed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(livecodebench, "_MOST_BYTES", 1000)
    row = problem(PRINTS, private_test_cases=compressed(json.dumps(PRINTS * 100)))
    with pytest.raises(DataError, match="more than 1 GiB"):
        prepare("livecodebench", [lines(tmp_path / "a.jsonl", row)])


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("it ran",))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"question_content": " "}, "field 'question_content' must not be empty"),
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "holds no tests"),
        ({"private_test_cases": "abc"}, "field 'private_test_cases' cannot be read"),
        ({"private_test_cases": compressed(Harmful())}, "cannot be read (it wants builtins.print)"),
        ({"private_test_cases": "[" * 100_000}, "field 'private_test_cases' cannot be read"),
        ({"private_test_cases": squeezed(b"NNa.")}, "field 'private_test_cases' cannot be read"),
        (
            {"private_test_cases": squeezed(b"Nr\xff\xff\xff\xff.")},
            "field 'private_test_cases' cannot be read",
        ),
        (
            {
                "public_test_cases": json.dumps(CALLS),
                "private_test_cases": json.dumps(CALLS),
                "metadata": "[]",
            },
            "field 'metadata' must have func_name",
        ),
        ({"private_test_cases": '[{"input": "x"}]'}, "field 'private_test_cases' must be a list"),
        ({"private_test_cases": '{"input": "x"}'}, "field 'private_test_cases' must be a list"),
        (
            {"public_test_cases": json.dumps(CALLS), "private_test_cases": json.dumps(CALLS)},
            "field 'metadata' must have func_name, as its tests call it",
        ),
    ],
)
def test_a_row_that_cannot_be_used(
    tmp_path: Path, fields: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "test.jsonl", problem(PRINTS, **fields))
    with pytest.raises(DataError) as error:
        prepare("livecodebench", [path])
    assert str(error.value).startswith(f"{path}:1: ") and says in str(error.value)
    assert "it ran" not in capsys.readouterr().out
