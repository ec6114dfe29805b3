"""Tiny files of every public schema, right and wrong rows."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from graphpo_agent.data.files import read_data_file
from graphpo_agent.data.prepare import prepare
from graphpo_agent.errors import DataError
from graphpo_agent.types import Piece, Task

TRAINING = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer. <answer> Beijing </answer>. Question: who?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ola Brand", "Brand"]}},
    "extra_info": {"split": "train", "index": 0},
}
BASE = {
    "question": "who?",
    "answer": ["Ola Brand", 7],
    "aug_answer": ["Brand"],
    "source": "opensource",
    "qid": 12,
}
CALL = (
    "<think>\nhm\n</think>\n<tool_call>\n"
    '{"name": "search", "arguments": {"query": ["a"]}}\n</tool_call>'
)
SEEN = "<tool_response>\nfound\n</tool_response>"
FINAL = "<think>\nso\n</think>\n<answer>\nOla\n</answer>"
TRAJECTORY = {
    "type": "chatml",
    "task": "agent/multiturn_search",
    "messages": [
        {"role": "system", "content": "Current date: 2025-07-18"},
        {"role": "user", "content": "<tools>\n</tools>\nUser: an example\n\nUser: who?"},
        {"role": "assistant", "content": CALL},
        {"role": "user", "content": SEEN},
        {"role": "assistant", "content": FINAL + "\n"},
    ],
    "functions": [{"name_for_model": "search", "parameters": {"properties": {"queries": {}}}}],
    "tool_calls": [],
    "answer": [["Ola", "Ola Brand"]],
    "tag": "e2hqa",
}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def one_task(kind: str, path: Path) -> Task:
    (task,) = prepare(kind, [path], keep_unanswerable=True).tasks
    return task


def refused(kind: str, path: Path) -> str:
    with pytest.raises(DataError) as error:
        prepare(kind, [path])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "question", "source"),
    [
        ({}, "who?", "nq"),
        ({"question": "who was it?"}, "who was it?", "nq"),
        ({"data_source": "searchR1_nq"}, "who?", "nq"),
        (
            {"data_source": "searchR1_popqa", "extra_info": {"index": 1, "question": "so who?"}},
            "so who?",
            "popqa",
        ),
    ],
)
def test_search_r1_parquet(
    tmp_path: Path, changes: dict[str, Any], question: str, source: str
) -> None:
    task = one_task("search-r1", parquet(tmp_path / "t.parquet", {**TRAINING, **changes}))
    assert (task.question, task.answers) == (question, ("Ola Brand", "Brand"))
    assert task.metadata == {"source": source}


def test_a_question_that_only_other_rows_have_beside_the_prompt(tmp_path: Path) -> None:
    extras = [{"index": 1, "question": None}, {"index": 2, "question": "so who?"}]
    rows = [{**TRAINING, "extra_info": extra} for extra in extras]
    prepared = prepare("search-r1", [parquet(tmp_path / "t.parquet", *rows)])
    assert [task.question for task in prepared.tasks] == ["who?", "so who?"]


def test_a_target_may_be_one_string(tmp_path: Path) -> None:
    model = {"style": "rule", "ground_truth": {"target": "Ola Brand"}}
    path = parquet(tmp_path / "t.parquet", {**TRAINING, "reward_model": model})
    assert one_task("search-r1", path).answers == ("Ola Brand",)


def test_plain_questions(tmp_path: Path) -> None:
    row = {"id": "test_3", "question": "who?", "golden_answers": ["Ola"], "metadata": {"a": 1}}
    for path in (lines(tmp_path / "q.jsonl", row), parquet(tmp_path / "q.parquet", row)):
        task = one_task("search-r1", path)
        assert task.answers == ("Ola",) and task.metadata == {"source_id": "test_3"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": "who?"}, "row 1: field 'prompt' must be a list of messages"),
        ({"prompt": [{"role": "user", "content": "who?"}]}, "row 1: field 'prompt' has no 'Quest"),
        (
            {"question": "who?", "prompt": [{"role": "user"}]},
            "row 1: field 'prompt[0]' must have the texts role and content",
        ),
        ({"prompt": None}, "row 1: field 'question' is missing, and so is 'prompt'"),
        ({"question": "  "}, "row 1: field 'question' must not be empty"),
        ({"question": 3}, "row 1: field 'question' must be a string, found 3"),
        ({"reward_model": None}, "row 1: field 'golden_answers' is missing"),
        ({"reward_model": 3}, "row 1: field 'reward_model' must be an object"),
        ({"reward_model": {"style": "rule"}}, "in 'reward_model': field 'ground_truth' is missing"),
        (
            {"reward_model": {"ground_truth": {"target": [{"a": 1}]}}},
            "in 'reward_model'.ground_truth: field 'target' must hold strings",
        ),
        ({"extra_info": {"question": 3}}, "row 1: field 'extra_info.question' must be a string"),
    ],
)
def test_a_wrong_search_r1_row(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refused("search-r1", parquet(tmp_path / "t.parquet", {**TRAINING, **changes}))


def test_asearcher_base_and_lrm_and_test_rows(tmp_path: Path) -> None:
    base = one_task("asearcher", lines(tmp_path / "base.jsonl", BASE))
    assert base.answers == ("Ola Brand", "7")
    assert base.metadata == {"source": "opensource", "source_id": "12", "aug_answers": ["Brand"]}
    lrm = {"question": "who?", "answer": "Ola", "id": "x", "idx": 3, "source": None}
    assert one_task("asearcher", lines(tmp_path / "lrm.jsonl", lrm)).metadata == {"source_id": "x"}
    test = {"question": "who?", "gt": "Ola", "Annotator_Metadata": {"Steps": "1"}}
    for path in (lines(tmp_path / "test.json", [test]), lines(tmp_path / "test.jsonl", test)):
        assert one_task("asearcher", path).answers == ("Ola",)


def test_unanswerable_rows_of_either_spelling_are_marked(tmp_path: Path) -> None:
    for source in ("compose_chain_qa_invalid", "train_v1:compose_chain_qa_invalid"):
        task = one_task("asearcher", lines(tmp_path / "b.jsonl", {**BASE, "source": source}))
        assert task.metadata["unanswerable"] is True


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"answer": None}, ":1: field 'answer' is missing"),
        ({"answer": {"a": 1}}, ":1: field 'answer' must hold strings or finite numbers"),
        ({"answer": [None]}, ":1: field 'answer' must hold strings"),
        ({"aug_answer": [["x"]]}, ":1: field 'aug_answer' must hold strings"),
        ({"question": ""}, ":1: field 'question' must not be empty"),
        ({"question": "\ud800?"}, ":1: holds half a character"),
        ({"answer": ["\udfff"]}, ":1: holds half a character"),
        ({"source": 3}, ":1: field 'source' must be a string"),
    ],
)
def test_a_wrong_asearcher_row(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refused("asearcher", lines(tmp_path / "b.jsonl", {**BASE, **changes}))


def test_webdancer_questions(tmp_path: Path) -> None:
    row = {"question": "who?", "answer": "Ola", "tag": "crawlqa"}
    task = one_task("webdancer", lines(tmp_path / "sample_qa.jsonl", row))
    assert (task.question, task.answers, task.metadata) == ("who?", ("Ola",), {"source": "crawlqa"})


def test_a_webdancer_trajectory_is_a_task_and_a_demonstration(tmp_path: Path) -> None:
    prepared = prepare("webdancer", [lines(tmp_path / "t.jsonl", TRAJECTORY)])
    (task,), (demonstration,) = prepared.tasks, prepared.demonstrations
    assert (task.question, task.answers) == ("who?", ("Ola", "Ola Brand"))
    assert [message["role"] for message in demonstration.messages] == ["system", "user"]
    assert demonstration.pieces == (
        Piece(CALL, trained=True),
        Piece(SEEN, trained=False, role="user"),
        Piece(FINAL, trained=True),
    )
    assert demonstration.ends and demonstration.id.startswith(task.id)


def test_a_trajectory_needs_no_system_message(tmp_path: Path) -> None:
    row = {**TRAJECTORY, "messages": TRAJECTORY["messages"][1:]}
    (demonstration,) = prepare("webdancer", [lines(tmp_path / "t.jsonl", row)]).demonstrations
    assert [message["role"] for message in demonstration.messages] == ["user"]
    assert [piece.trained for piece in demonstration.pieces] == [True, False, True]


def changed_messages(index: int, **changes: Any) -> list[Any]:
    messages: list[Any] = list(TRAJECTORY["messages"])
    messages[index] = {**messages[index], **changes}
    return messages


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("x", "field 'messages' must be a list"),
        ([], "field 'messages' must begin with system and user, or user"),
        (["x"], "field 'messages[0]' must be an object with role and content"),
        (TRAJECTORY["messages"][:2], "must alternate assistant and user after the prompt"),
        (TRAJECTORY["messages"][:4], "and end with assistant, found assistant, user"),
        (changed_messages(3, role="tool"), "found assistant, tool, assistant"),
        (changed_messages(3, content="found"), "'messages[3].content' must hold a <tool_response>"),
        (changed_messages(2, content="hm"), "'messages[2].content' must hold a <tool_call>"),
        (changed_messages(4, content=CALL), "'messages[4].content' must hold a <answer>"),
        (changed_messages(4, content=[1]), "'messages[4].content' must be a string"),
        (changed_messages(1, content="who?"), "'messages[1].content' has no line 'User: "),
    ],
)
def test_a_wrong_trajectory(tmp_path: Path, messages: Any, says: str) -> None:
    path = lines(tmp_path / "t.jsonl", TRAJECTORY, {**TRAJECTORY, "messages": messages})
    error = refused("webdancer", path)
    assert f"{path}:2: " in error and says in error


def test_a_trajectory_without_an_answer_field(tmp_path: Path) -> None:
    row = {name: value for name, value in TRAJECTORY.items() if name != "answer"}
    assert "field 'answer' is missing" in refused("webdancer", lines(tmp_path / "t.jsonl", row))


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [{"question": "who, or\nwhat?", "answer": "Ola"}, {"question": "é?", "answer": "b"}]
    csv = tmp_path / "r.csv"
    csv.write_text('\ufeffquestion,answer\n"who, or\nwhat?",Ola\né?,b\n', encoding="utf-8")
    paths = [
        csv,
        parquet(tmp_path / "r.parquet", *rows),
        lines(tmp_path / "r.json", rows),
        lines(tmp_path / "r.jsonl", *rows),
    ]
    for path in paths:
        assert [row for _, row in read_data_file(path)] == rows
    assert [place for place, _ in read_data_file(paths[1])] == [
        f"{paths[1]}: row 1",
        f"{paths[1]}: row 2",
    ]


def test_an_array_may_stand_behind_a_mark_and_white_space_and_a_cell_may_be_long(
    tmp_path: Path,
) -> None:
    rows = [{"question": "who?", "answer": "x" * 200_000}]
    array, table = tmp_path / "r.json", tmp_path / "r.csv"
    array.write_bytes(b"\xef\xbb\xbf\n " + json.dumps(rows).encode())
    table.write_text(f"question,answer\nwho?,{rows[0]['answer']}\n")
    for path in (array, table):
        assert [row for _, row in read_data_file(path)] == rows


def test_rows_of_a_long_parquet_file_are_counted_through(tmp_path: Path) -> None:
    path = parquet(tmp_path / "r.parquet", *({"question": f"{n}?"} for n in range(1500)))
    places = [place for place, _ in read_data_file(path)]
    assert places == [f"{path}: row {n}" for n in range(1, 1501)]


@pytest.mark.parametrize("name", ["x.parquet", "x.csv", "x.json", "x.jsonl"])
def test_what_is_read_is_a_file_perhaps_behind_a_link_and_no_pipe(
    tmp_path: Path, name: str
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"question": "who?"}\n')
    os.close(writing)
    piped = tmp_path / name
    piped.symlink_to(f"/dev/fd/{reading}")
    with pytest.raises(DataError, match=f"{name}: is not a regular file; write its rows to a file"):
        list(read_data_file(piped))
    os.close(reading)
    linked = tmp_path / "linked.jsonl"
    linked.symlink_to(lines(tmp_path / "target.jsonl", {"question": "who?"}))
    assert [row for _, row in read_data_file(linked)] == [{"question": "who?"}]


@pytest.mark.parametrize("name", ["x.parquet", "x.csv", "x.json", "x.jsonl"])
def test_a_file_that_is_missing_or_not_what_it_says(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(DataError, match="cannot be read"):
        list(read_data_file(path))
    path.write_bytes(b"[\xff not this]")
    with pytest.raises(DataError, match=r"not (a readable|valid)"):
        list(read_data_file(path))


def test_a_parquet_file_with_a_value_that_python_has_none_for(tmp_path: Path) -> None:
    columns = {
        "dates": pa.array([10**7], pa.date32()),
        "times": pa.array([9 * 10**12], pa.timestamp("s")),
        "raw": pa.array([b"\xff"], pa.binary()).view(pa.string()),
    }
    for name, column in columns.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"question": ["who?"], name: column}), path)
        with pytest.raises(DataError) as error:
            list(read_data_file(path))
        assert f"{path}: not a readable parquet file (column '{name}': " in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('q,a\nwho?,1\n"what?,2\nwhy?,3\n', "from row 2 on (unexpected end of data)"),
        ('q,a\n"what?,1\n"why?",2\n', "from row 1 on ("),
        ('q,a\n"who" is it?,1\n', "from row 1 on ("),
    ],
)
def test_a_csv_file_whose_quotes_do_not_pair_is_refused(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "r.csv"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        list(read_data_file(path))
    assert str(error.value).startswith(f"{path}: not valid CSV in UTF-8 {says}")


def test_a_column_has_one_name(tmp_path: Path) -> None:
    table, columns = tmp_path / "r.csv", tmp_path / "r.parquet"
    table.write_text("question,answer,answer\nwho?,1,2\n")
    values = [pa.array(["who?"]), pa.array(["1"]), pa.array(["2"])]
    pq.write_table(pa.table(values, names=["question", "answer", "answer"]), columns)
    for path in (table, columns):
        with pytest.raises(DataError) as error:
            list(read_data_file(path))
        assert str(error.value) == f"{path}: column 'answer' is there twice; remove or rename one"
    table.write_text("question,,\nwho?,,\n")
    assert [row["question"] for _, row in read_data_file(table)] == ["who?"]


@pytest.mark.parametrize(
    ("value", "says"),
    [(3, "expected a JSON object, found int"), ({"id": "\ud800"}, "holds half a character")],
)
def test_an_array_holds_objects_of_whole_characters(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"row 2: {says}"):
        list(read_data_file(lines(tmp_path / "r.json", [{}, value])))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.gz", "rows.json"])
def test_a_compressed_file_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b'{"question": "who?"}\n' * 9))
    with pytest.raises(DataError, match=r"is compressed; unpack it with gunzip"):
        list(read_data_file(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.json", b"[" * 100_000),
        ("deep.jsonl", b'{"a":' * 100_000),
        ("half.jsonl", b'{"id": "\xed\xa0\x80"}'),
        ("two.csv", b"question,answer\nwho, or what?,Ola\n"),
    ],
)
def test_a_file_that_cannot_be_taken_as_it_is(tmp_path: Path, name: str, text: bytes) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=r"not valid JSON|row 1: has more cells than the header"):
        list(read_data_file(tmp_path / name))
