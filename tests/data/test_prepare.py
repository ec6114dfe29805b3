import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.data.prepare import Summary, overlap_key, prepare, task_id
from graphpo_agent.data.tasks import (
    load_demonstrations,
    load_tasks,
    write_demonstrations,
    write_tasks,
)
from graphpo_agent.data.verl_parquet import Trainer, write_verl_parquet
from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.rewards.transcripts import (
    FormatScores,
    search_r1_em,
    search_r1_em_format,
    tree_grpo_f1,
    verl_search_r1_em,
)
from graphpo_agent.types import Message, Task
from tests.data.test_prepare_sources import TRAINING, TRAJECTORY, lines, parquet


def row(question: str, answer: Any = "oak", **fields: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer, **fields}


def asked(task: Task) -> list[Message]:
    return [{"role": "user", "content": f"Question: {task.question}\n"}]


def test_the_rows_of_all_files_become_one_task_per_question(tmp_path: Path) -> None:
    first = lines(
        tmp_path / "a.jsonl",
        row("who?", ["oak"], source="a", qid=1),
        row("what?", ["fir"], qid=2),
    )
    second = lines(
        tmp_path / "b.jsonl", row(" who ", "pine", source="b", aug_answer=["tree"]), row("Who?")
    )
    prepared = prepare("asearcher", [first, second])
    assert [task.question for task in prepared.tasks] == ["who?", "what?", "Who?"]
    assert prepared.tasks[0].answers == ("oak", "pine")
    assert prepared.tasks[0].metadata == {"source": "a", "source_id": "1", "aug_answers": ["tree"]}
    assert prepared.summary == Summary(4, 3, 1, {}, {}, 0)


def test_ids_depend_on_the_question_alone(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", row("x?"), row("who?"))
    second = lines(tmp_path / "b.jsonl", {"question": "who", "golden_answers": ["fir"]})
    one, other = prepare("asearcher", [first]).tasks[1], prepare("search-r1", [second]).tasks[0]
    assert one.id == other.id == task_id("who?")


words = st.text("abAB .?3+-", max_size=8).filter(str.strip)


@given(one=words, other=words)
def test_equal_ids_mean_the_same_words(one: str, other: str) -> None:
    def plain(question: str) -> list[str]:
        said = question.split()
        bare = " ".join(said).rstrip(".? ")
        return bare.split() or said

    assert (task_id(one) == task_id(other)) == (plain(one) == plain(other))


def test_unanswerable_rows_are_dropped_or_kept(tmp_path: Path) -> None:
    invalid = {"source": "compose_chain_qa_invalid"}
    path = lines(
        tmp_path / "a.jsonl",
        row("who?", **invalid),
        row("what?", [], **invalid),
        row("why?", ["", " "]),
        row("where?"),
        row("where?", **invalid),
    )
    dropped = prepare("asearcher", [path])
    assert [task.question for task in dropped.tasks] == ["where?"]
    assert dropped.summary.dropped == {"unanswerable": 3, "no answer": 1}
    kept = prepare("asearcher", [path], keep_unanswerable=True)
    assert [task.metadata.get("unanswerable") for task in kept.tasks] == [True, True, None]
    assert kept.summary == Summary(5, 3, 1, {"no answer": 1}, {}, 0)


def test_overlaps_with_evaluation_files_of_every_kind_are_removed(tmp_path: Path) -> None:
    train = lines(tmp_path / "a.jsonl", *(row(f"is it number {n}?") for n in range(8)))
    tasks, csv = tmp_path / "tasks.jsonl", tmp_path / "gaia.csv"
    write_tasks(tasks, [Task("t", "Is it  “number 0”", ()), Task("u", "never asked", ())])
    csv.write_text("Question,answer\nIs it number 0?,a\nIS IT NUMBER 1,b\n")
    browse = lines(tmp_path / "b.json", [{"problem": "is it, number ２?", "canary": "c"}])
    files = [
        tasks,
        csv,
        browse,
        parquet(tmp_path / "p.parquet", {"prompt": asked(Task("t", "is it number 3", ()))}),
        lines(tmp_path / "x.jsonl", {"prompt": "Is it number 4?"}, {"query": "is it number 5"}),
        lines(tmp_path / "y.jsonl", {"question": "something else"}),
    ]
    prepared = prepare("asearcher", [train], exclude=files)
    assert [task.question for task in prepared.tasks] == ["is it number 6?", "is it number 7?"]
    assert list(prepared.summary.overlaps.values()) == [1, 1, 1, 1, 2, 0]
    assert list(prepared.summary.overlaps) == [str(path) for path in files]
    assert prepared.summary.rows == 8 and prepared.summary.tasks == 2


def test_an_overlapping_trajectory_is_no_demonstration(tmp_path: Path) -> None:
    path = lines(tmp_path / "t.jsonl", TRAJECTORY, {"question": "what?", "answer": "fir"})
    evaluation = lines(tmp_path / "e.jsonl", {"question": "Who"})
    prepared = prepare("webdancer", [path], exclude=[evaluation])
    assert [task.question for task in prepared.tasks] == ["what?"]
    assert prepared.demonstrations == ()


def test_overlap_keys_of_known_cases() -> None:
    assert overlap_key("Who's  “Karo Venn”?") == "who s karo venn"
    assert overlap_key("Straße ２") == "strasse 2"
    assert overlap_key("谁？") == "谁"
    assert overlap_key(" ?? ") == "??"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"text": "who?"}, ":1: field 'question' is missing"),
        ({"Question": 3}, ":1: field 'Question' must be a string"),
        ({"problem": "d2hvPw==", "canary": "c"}, ":1: field 'problem' is encrypted"),
        ({"prompt": "d2hvPw==", "canary": "c"}, ":1: field 'prompt' is encrypted"),
    ],
)
def test_an_evaluation_row_without_a_readable_question(
    tmp_path: Path, line: dict[str, Any], says: str
) -> None:
    train = lines(tmp_path / "a.jsonl", row("who?"))
    path = lines(tmp_path / "e.jsonl", line)
    with pytest.raises(DataError) as error:
        prepare("asearcher", [train], exclude=[path])
    assert f"{path}{says}" in str(error.value)


def test_an_unknown_kind_and_an_empty_result(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", row("who?"))
    with pytest.raises(ConfigError, match="'gsm8k' is none of search-r1, asearcher, webdancer"):
        prepare("gsm8k", [path])
    with pytest.raises(DataError, match=r"no task is left of 1 rows \(1 asked in .*a[.]jsonl\)"):
        prepare("asearcher", [path], exclude=[path])
    hidden = lines(tmp_path / "test.jsonl", {"Question": "who?", "Final answer": "?"})
    with pytest.raises(DataError, match=r"no task is left of 1 rows \(1 no answer\)$"):
        prepare("benchmark", [hidden])
    empty = lines(tmp_path / "e.jsonl")
    with pytest.raises(DataError, match=r"e[.]jsonl: holds no questions to exclude"):
        prepare("asearcher", [path], exclude=[empty])


def test_what_was_prepared_is_written_and_read_back(tmp_path: Path) -> None:
    again = {**TRAJECTORY, "answer": [["Brand"]]}
    prepared = prepare("webdancer", [lines(tmp_path / "t.jsonl", TRAJECTORY, again)])
    assert prepared.summary == Summary(2, 1, 1, {}, {}, 2)
    write_tasks(tmp_path / "tasks.jsonl", prepared.tasks)
    write_demonstrations(tmp_path / "d.jsonl", prepared.demonstrations)
    assert tuple(load_tasks(tmp_path / "tasks.jsonl")) == prepared.tasks
    assert tuple(load_demonstrations(tmp_path / "d.jsonl")) == prepared.demonstrations


def test_the_verl_file_has_upstream_s_columns(tmp_path: Path) -> None:
    tasks = [
        Task("q-1", "who?", ("oak", "fir"), {"source": "popqa", "aug_answers": ["tree"]}),
        Task("q-2", "was für ein Baum?", ()),
    ]
    path = tmp_path / "new" / "train.parquet"
    write_verl_parquet(path, tasks, "verl", {"q-1": asked(tasks[0])})
    first, second = pq.read_table(path).to_pylist()
    index = first["extra_info"].pop("index")
    assert json.loads(first.pop("metadata")) == tasks[0].metadata
    truth = {"target": ["oak", "fir"]}
    create = {"ground_truth": truth, "question": "who?", "data_source": "searchR1_popqa"}
    assert first == {
        "id": "q-1",
        "question": "who?",
        "golden_answers": ["oak", "fir"],
        "data_source": "searchR1_popqa",
        "prompt": [{"role": "user", "content": "Question: who?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "split": "train",
            "question": "who?",
            "need_tools_kwargs": True,
            "tools_kwargs": {"search": {"create_kwargs": create}},
        },
        "agent_name": "tool_agent",
    }
    assert second["reward_model"]["ground_truth"]["target"] == []
    assert 0 <= index != second["extra_info"]["index"]
    write_verl_parquet(path, tasks[:1], "search-r1")
    (alone,) = pq.read_table(path).to_pylist()
    assert alone["extra_info"] == {"split": "train", "index": index, "question": "who?"}
    assert [file.name for file in path.parent.iterdir()] == ["train.parquet"]


@pytest.mark.parametrize(
    ("trainer", "sources"),
    [
        ("verl", ["searchR1_musique", "searchR1_nq", "searchR1_nq"]),
        ("search-r1", ["musique", "nq", "nq"]),
        ("tree-grpo", ["musique", "compose_chain_qa", "unknown"]),
    ],
)
def test_the_scorers_of_other_trainers_know_every_row_and_score_a_right_answer(
    tmp_path: Path, trainer: Trainer, sources: list[str]
) -> None:
    own = ({"source": "musique"}, {"source": "compose_chain_qa"}, {})
    tasks = [Task(f"q-{n}", f"who is {n}?", ("Ola",), told) for n, told in enumerate(own)]
    path = tmp_path / "train.parquet"
    write_verl_parquet(path, tasks, trainer)
    rows = pq.read_table(path).to_pylist()
    assert [row["data_source"] for row in rows] == sources
    response = "<think> so </think> <answer> Ola </answer>"
    for task, row in zip(tasks, rows, strict=True):
        (message,) = row["prompt"]
        assert message["content"].endswith(f"\nQuestion: {task.question}\n")
        assert ("<search>" in message["content"]) == (trainer != "verl")
        chat = f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
        golds = row["reward_model"]["ground_truth"]["target"]
        for rule in (search_r1_em, search_r1_em_format, tree_grpo_f1):
            scores = FormatScores(structure=0.2)
            assert rule(chat + response, golds, scores).score == 1.0
            assert rule(chat + "<think> so </think>", ["1987"], scores).score == 0.0
        assert verl_search_r1_em(response, golds, FormatScores()).score == 1.0
        if trainer == "verl":
            compute = pytest.importorskip("verl.utils.reward_score").default_compute_score
            assert compute(row["data_source"], response, {"target": golds}) == 1.0


def test_another_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'trl' is none of verl, search-r1, tree-grpo"):
        write_verl_parquet(tmp_path / "t.parquet", [], "trl")  # pyright: ignore


def test_a_row_s_own_prompt_comes_back_where_it_fits_the_trainer(tmp_path: Path) -> None:
    tool_prompt = [
        {"role": "system", "content": "Call tools.\n"},
        {"role": "user", "content": "Think. Question: what?\n"},
    ]
    tools = {**TRAINING, "data_source": "searchR1_nq", "prompt": tool_prompt}
    prepared = prepare("search-r1", [parquet(tmp_path / "a.parquet", TRAINING, tools)])
    tagged, called = prepared.tasks
    assert prepared.prompts == {tagged.id: tuple(TRAINING["prompt"])}
    assert prepared.tool_prompts == {called.id: tuple(tool_prompt)}


def test_many_tasks_survive_the_verl_file(tmp_path: Path) -> None:
    tasks = prepare(
        "asearcher", [lines(tmp_path / "a.jsonl", *(row(f"number {n}?", n) for n in range(5000)))]
    ).tasks
    path = tmp_path / "train.parquet"
    write_verl_parquet(path, tasks)
    back = prepare("search-r1", [path]).tasks
    assert [(t.id, t.question, t.answers) for t in back] == [
        (t.id, t.question, t.answers) for t in tasks
    ]
    extra = pq.read_table(path)["extra_info"].to_pylist()
    assert len({one["index"] for one in extra}) == len(tasks)


def test_an_unwritable_verl_file_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "train.parquet"
    target.mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write_verl_parquet(target, [Task("q", "who?", ())])

    def broken() -> Iterator[Task]:
        yield Task("q", "who?", ())
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_verl_parquet(tmp_path / "other.parquet", broken())
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]
