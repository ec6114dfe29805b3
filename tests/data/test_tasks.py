import json
import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.data.jsonl import write_rows
from graphpo_agent.data.tasks import (
    load_demonstrations,
    load_tasks,
    write_demonstrations,
    write_tasks,
)
from graphpo_agent.errors import DataError
from graphpo_agent.types import Demonstration, Piece, Task

GOOD_TASK = {"id": "a", "question": "q", "answers": ["1"], "metadata": {"hops": 2}}
GOOD_DEMONSTRATION = {
    "id": "a",
    "messages": [{"role": "user", "content": "q"}],
    "pieces": [{"text": " 1", "trained": True}, {"text": " 2", "trained": False}],
    "ends": False,
}


def write_lines(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3),
    max_leaves=5,
)
tasks_lists = st.lists(
    st.builds(
        Task,
        id=texts,
        question=texts.filter(str.strip),
        answers=st.lists(texts, max_size=3).map(tuple),
        metadata=st.dictionaries(texts, json_values, max_size=3),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda task: task.id,
)
own_pieces = st.builds(Piece, texts, st.just(True))
observations = st.builds(Piece, texts, st.just(False), st.none() | texts)
demonstration_lists = st.lists(
    st.builds(
        Demonstration,
        id=texts,
        messages=st.lists(
            st.fixed_dictionaries({"role": texts, "content": texts}), min_size=1, max_size=3
        ).map(tuple),
        pieces=st.lists(own_pieces | observations, max_size=3).map(
            lambda pieces: (*pieces, Piece("x", trained=True))
        ),
        ends=st.booleans(),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda demonstration: demonstration.id,
)


def test_of_two_processes_that_write_the_same_file_the_last_one_stays_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    other = multiprocessing.get_context("fork").Process(
        target=write_rows, args=(path, [{"by": "other"}] * 3)
    )

    def rows():
        yield {"by": "me"}
        other.start()
        other.join(60)
        assert path.read_text() == '{"by": "other"}\n' * 3
        yield {"by": "me"}

    write_rows(path, rows())
    assert other.exitcode == 0
    assert path.read_text() == '{"by": "me"}\n' * 2
    assert list(tmp_path.iterdir()) == [path]


@given(tasks=tasks_lists)
def test_what_is_written_is_read_back(tmp_path_factory, tasks):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    write_tasks(path, tasks)
    assert load_tasks(path) == tasks


@pytest.mark.parametrize(
    ("task", "says"),
    [
        (Task("a", "q", "paris"), "task 'a': field 'answers' must be a list, found 'paris'"),  # type: ignore[arg-type]
        (Task("a", "q", (7,)), "task 'a': field 'answers' must hold strings, found"),  # type: ignore[arg-type]
        (Task(7, "q", ("x",)), "task 7: field 'id' must be a string, found 7"),  # type: ignore[arg-type]
        (Task("a", " ", ("x",)), "task 'a': field 'question' must not be empty"),
    ],
)
def test_a_task_that_could_not_be_read_back_is_not_written(tmp_path, task, says):
    file = tmp_path / "tasks.jsonl"
    with pytest.raises(DataError, match=says):
        write_tasks(file, [Task("b", "q", ("x",)), task])
    assert not file.exists()


@given(demonstrations=demonstration_lists)
def test_demonstrations_are_read_back(tmp_path_factory, demonstrations):
    path = tmp_path_factory.mktemp("demonstrations") / "demonstrations.jsonl"
    write_demonstrations(path, demonstrations)
    assert load_demonstrations(path) == demonstrations


def test_blank_lines_and_a_missing_metadata_field_are_fine(tmp_path):
    path = write_lines(
        tmp_path / "t.jsonl",
        "",
        '{"id": "a", "question": "q", "answers": []}',
        "   ",
        '{"id": "b", "question": "q", "answers": []}',
    )
    assert load_tasks(path) == [Task("a", "q", ()), Task("b", "q", ())]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": None}, "field 'id' must be a string"),
        ({"id": ...}, "field 'id' is missing"),
        ({"question": 3}, "field 'question' must be a string"),
        ({"question": "  "}, "field 'question' must not be empty"),
        ({"answers": "1987"}, "field 'answers' must be a list"),
        ({"answers": ["1987", 1954]}, "field 'answers' must hold strings"),
        ({"answers": ...}, "field 'answers' is missing"),
        ({"metadata": []}, "field 'metadata' must be an object"),
        ({"metadata": {"x": float("nan")}}, "not valid JSON"),
        ({"metadata": {"x": float("inf")}}, "not valid JSON"),
        ({"answer": "x"}, "field 'answer' is not one of"),
    ],
)
def test_a_bad_task_names_file_line_and_field(tmp_path, change, message):
    row = {k: v for k, v in {**GOOD_TASK, "id": "b", **change}.items() if v is not ...}
    path = write_lines(tmp_path / "t.jsonl", json.dumps(GOOD_TASK), json.dumps(row))
    with pytest.raises(DataError) as caught:
        load_tasks(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ["[1]", '"text"', "{", '{"id": "\\ud800"}', '{"id": 1e999}', "\x00"]
)
def test_a_line_that_is_no_object_of_finite_numbers_is_refused(tmp_path, line):
    with pytest.raises(DataError, match=r"t\.jsonl:1: "):
        load_tasks(write_lines(tmp_path / "t.jsonl", line))


@pytest.mark.parametrize(
    "text",
    [
        '{"problem": "2 + 2?", "answer": "4", "unique_id": "x"}\n',
        '{"id": 60, "problem": "2 + 2?", "answer": "4"}\n',
        '[\n{"id": "a", "question": "q", "answers": []}]\n',
        "problem,answer\n2 + 2?,4\n",
        "PAR1\x15\x04",
    ],
)
def test_a_data_sets_own_file_is_told_what_makes_tasks_of_it(tmp_path, text):
    path = tmp_path / "raw.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"raw\.jsonl:1: .*; `graphpo data prepare` makes") as told:
        load_tasks(path)
    assert "\n" not in str(told.value)
    again = write_lines(tmp_path / "t.jsonl", json.dumps(GOOD_TASK), json.dumps(GOOD_TASK))
    with pytest.raises(DataError) as told:
        load_tasks(again)
    assert "prepare" not in str(told.value)
    with pytest.raises(DataError) as told:
        load_tasks(tmp_path / "none.jsonl")
    assert "prepare" not in str(told.value)


def test_several_files_are_one_list_without_repeated_ids(tmp_path):
    one = write_lines(tmp_path / "one.jsonl", json.dumps(GOOD_TASK))
    two = write_lines(tmp_path / "two.jsonl", json.dumps(GOOD_TASK | {"id": "z"}))
    assert [task.id for task in load_tasks(one, two)] == [GOOD_TASK["id"], "z"]
    with pytest.raises(DataError, match=r"two\.jsonl:1: field 'id' repeats 'z' of .*two\.jsonl:1"):
        load_tasks(one, two, two)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"id": "b",', ".* at column 12"),
        ('{"id": "b', ".* starting at column 8"),
        (f'{{"id": {"9" * 5000}}}', "Exceeds the limit .*: value has 5000 digits"),
    ],
)
def test_a_broken_row_is_named_by_its_line_in_the_file(tmp_path, row, says):
    path = write_lines(tmp_path / "t.jsonl", json.dumps(GOOD_TASK), row)
    with pytest.raises(DataError, match=rf"t\.jsonl:2: not valid JSON \({says}\)$"):
        load_tasks(path)


def test_invalid_utf8_is_refused(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(DataError, match=r"t\.jsonl:1: not valid JSON"):
        load_tasks(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"id": "a", "question": "q", "answers": ["1"], "answers": ["2"]}', "answers"),
        ('{"id": "a", "question": "q", "answers": [], "metadata": {"\\u0068": 1, "h": 1}}', "h"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path, line, key):
    path = write_lines(tmp_path / "t.jsonl", json.dumps({**GOOD_TASK, "id": "b"}), line)
    with pytest.raises(DataError) as caught:
        load_tasks(path)
    told = f"not valid JSON (key '{key}' is there twice in one object; remove one)"
    assert str(caught.value) == f"{path}:2: {told}"


def test_an_id_may_not_repeat(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", json.dumps(GOOD_TASK), "", json.dumps(GOOD_TASK))
    with pytest.raises(DataError, match=r"t\.jsonl:3: field 'id' repeats 'a' of .*t\.jsonl:1$"):
        load_tasks(path)


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_tasks(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no tasks"):
        load_tasks(write_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(DataError, match="holds no demonstrations"):
        load_demonstrations(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "field 'messages' must not be empty"),
        ({"messages": ["hi"]}, r"field 'messages\[0\]' must be an object"),
        (
            {"pieces": [{"text": "x", "trained": True, "role": "user"}]},
            r"field 'pieces\[0\]' is trained and has a role",
        ),
        ({"messages": [{"role": "user"}]}, r"field 'messages\[0\].content' is missing"),
        ({"pieces": [{"text": "x", "trained": 1}]}, r"field 'pieces\[0\].trained' must be true or"),
        ({"pieces": [{"text": "x", "trained": False}]}, "field 'pieces' holds no trained piece"),
        ({"ends": 0}, "field 'ends' must be true or false"),
    ],
)
def test_a_bad_demonstration_names_the_field(tmp_path, change, message):
    path = write_lines(tmp_path / "d.jsonl", json.dumps({**GOOD_DEMONSTRATION, **change}))
    with pytest.raises(DataError, match=message):
        load_demonstrations(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, [{"x": 1}])
    with pytest.raises(ValueError):
        write_rows(path, [{"x": 2}, {"x": float("nan")}])
    assert path.read_text() == '{"x": 1}\n'
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_tasks(tmp_path / "file" / "t.jsonl", [Task("a", "q", ())])
