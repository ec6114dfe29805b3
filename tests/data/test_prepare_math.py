"""Files of mathematics, as they are published."""

from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.data.prepare import Summary, prepare, task_id
from graphpo_agent.errors import DataError
from graphpo_agent.types import Task
from tests.data.test_prepare_benchmarks import CANARY, encrypted, hashed, written
from tests.data.test_prepare_sources import lines, parquet

ASKED = "How many?\n\nCount twice."
WRAPPED = (
    "Solve it. The last line must be Answer: $Answer, where $Answer is the answer.\n\n"
    f'{ASKED}\n\nThe answer goes on its own line after "Answer:".'
)
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": WRAPPED, "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


@pytest.mark.parametrize(
    ("row", "question", "answer", "metadata"),
    [
        (DAPO, ASKED, "34", {"source": "math_dapo", "source_id": "9a9b6eb4"}),
        ({"prompt": "How many?", "solution": "34"}, "How many?", "34", {}),
        ({**DAPO, "extra_info": {"index": 3, "raw_problem": "x?"}}, "x?", "34", None),
        (
            {
                "problem": "x?",
                "answer": "\\frac12",
                "solution": "…",
                "level": 5,
                "unique_id": "a/1",
            },
            "x?",
            "\\frac12",
            {"source_id": "a/1", "level": "5"},
        ),
        (
            {"problem": "x?", "solution": "So $x = \\boxed{\\frac{1}{2}}$."},
            "x?",
            "\\frac{1}{2}",
            {},
        ),
        ({"ID": "2024-I-1", "Problem": "x?", "Answer": 25}, "x?", "25", {"source_id": "2024-I-1"}),
        ({"id": 0, "problem": "x?", "expected_answer": "025"}, "x?", "025", {"source_id": "0"}),
        ({"question": "x?", "answer": "6 * 12 = 72\n#### 72"}, "x?", "72", {}),
        ({"problem": "x?", "solution": "so it is $\\boxed 2$."}, "x?", "2", {}),
        (
            {"id": 7.0, "problem": "x?", "answer": "2", "level": 3.0},
            "x?",
            "2",
            {"source_id": "7", "level": "3"},
        ),
        ({**DAPO, "extra_info": {"question": "x?"}}, "x?", "34", {"source": "math_dapo"}),
    ],
)
def test_every_flavour_of_a_row(
    tmp_path: Path, row: dict[str, Any], question: str, answer: str, metadata: Any
) -> None:
    for path in (lines(tmp_path / "a.jsonl", row), parquet(tmp_path / "a.parquet", row)):
        (task,) = prepare("math", [path]).tasks
        assert task == Task(task_id(question), question, (answer,), task.metadata)
        assert metadata is None or task.metadata == metadata


def test_a_solution_without_a_mark_is_an_answer_where_it_is_short(tmp_path: Path) -> None:
    proof = "Since $n(n+1)$ is a product of neighbours, one of them is even. $\\blacksquare$"
    rows = [
        {"problem": "Prove it.", "solution": proof},
        {"problem": "Prove it again.", "solution": "One is even.\nSo is all."},
        {"problem": "2 + 2?", "solution": "4"},
    ]
    prepared = prepare("math", [lines(tmp_path / "a.jsonl", *rows)])
    assert [task.question for task in prepared.tasks] == ["2 + 2?"]
    assert prepared.summary.dropped == {"no answer": 2}


@pytest.mark.parametrize(
    ("solution", "answers"),
    [
        ("6 * 12 = 72\n#### 72\n", ("72",)),
        ("6 * 12 = 72 #### 72", ("72",)),
        ("6 * 12 = 72\n#### 72\n\nThe answer is 72.", ("72",)),
        ("6 * 12 = 72\n#### 72\n\\boxed{}", ("72",)),
        ("#### Step 1\nMultiply.\n#### Conclusion\n\nThere are 72.", ()),
        ("##### Step 72", ("##### Step 72",)),
        ("So \\boxed{72}, then \\boxed{}.", ()),
        ("\\boxed{ }", ()),
    ],
)
def test_what_a_solution_marks_is_its_answer_and_no_more_of_it(
    tmp_path: Path, solution: str, answers: tuple[str, ...]
) -> None:
    rows = {"problem": "x?", "solution": solution}, {"problem": "y?", "answer": "1"}
    tasks = prepare("math", [lines(tmp_path / "a.jsonl", *rows)]).tasks
    assert [task.answers for task in tasks if task.question == "x?"] == [answers] * bool(answers)


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"answer": "", "solution": "It is $\\boxed{4}$."}, ("4",)),
        ({"answer": "#### ", "solution": "4"}, ("4",)),
        ({"answer": [], "final_answer": " ", "reward_model": {"ground_truth": "4"}}, ("4",)),
        ({"answer": "4", "solution": {"not": "read"}}, ("4",)),
    ],
)
def test_the_answer_is_in_the_first_field_that_is_not_empty(
    tmp_path: Path, fields: dict[str, Any], answers: tuple[str, ...]
) -> None:
    (task,) = prepare("math", [lines(tmp_path / "a.jsonl", {"problem": "x?", **fields})]).tasks
    assert task.answers == answers


def test_only_paragraphs_about_the_form_are_left_out(tmp_path: Path) -> None:
    texts = ["One.\n\nTwo.\n\nThree.", "Write Answer: x.\n\nWhat?", "Answer: x.\n\nWhat?\n\nNow."]
    path = lines(tmp_path / "a.jsonl", *({"prompt": text, "answer": "1"} for text in texts))
    assert [task.question for task in prepare("math", [path]).tasks] == texts


@pytest.mark.parametrize(
    "asked",
    [
        " Let's think step by step and output the final answer within \\boxed{}.",
        ' Let\'s think step by step and output the final answer after "####".',
        "\nPlease reason step by step, and put your final answer within \\boxed{}",
        "\n\nPut your final answer in $\\boxed{}$.",
        "\n\nPresent the answer in LaTex format: \\boxed{Your answer}",
    ],
)
def test_a_sentence_behind_a_prompt_about_the_form_is_left_out(tmp_path: Path, asked: str) -> None:
    content = f"Let $x = 2$. Write the answer{asked}"
    messages = {**DAPO, "prompt": [{"content": content, "role": "user"}]}
    path = parquet(tmp_path / "verl.parquet", messages)
    (task,) = prepare("math", [path]).tasks
    assert task.question == "Let $x = 2$. Write the answer"
    bare = {"problem": task.question, "answer": "34"}
    train = lines(tmp_path / "a.jsonl", bare, {"problem": "x?", "answer": "1"})
    assert [t.question for t in prepare("math", [train], exclude=[path]).tasks] == ["x?"]


@pytest.mark.parametrize(
    "question",
    [
        "What is \\boxed{}?",
        "Put $x$ into \\boxed{}.",
        "Fill it. Give the answer that stands in \\boxed{3}.",
        "Fill it. Give your answer as \\boxed{m + n}.",
        "Put your answer in \\boxed{}.",
        "Put your answer in \\boxed{}. What is it?",
    ],
)
def test_a_question_that_names_a_box_stays_whole(tmp_path: Path, question: str) -> None:
    path = lines(tmp_path / "a.jsonl", {"prompt": question, "answer": "1"})
    assert [task.question for task in prepare("math", [path]).tasks] == [question]


def test_repeated_questions_and_such_as_have_two_answers(tmp_path: Path) -> None:
    rows = [
        *([DAPO] * 3),
        {"problem": "x?", "answer": "1"},
        {"problem": " x ", "answer": "2"},
        {"problem": "y?", "answer": ["1", "2"]},
        {"problem": "z?", "answer": "#### "},
        {"problem": "w", "answer": "3"},
    ]
    evaluation = lines(tmp_path / "aime.jsonl", {"Problem": "W", "Answer": "4"})
    prepared = prepare("math", [lines(tmp_path / "a.jsonl", *rows)], exclude=[evaluation])
    assert [(task.question, task.answers) for task in prepared.tasks] == [
        (ASKED, ("34",)),
        ("y?", ("1", "2")),
    ]
    dropped = {"answers that contradict each other": 2, "no answer": 1}
    assert prepared.summary == Summary(8, 2, 2, dropped, {str(evaluation): 1}, 0)


def test_a_question_answered_otherwise_once_is_left_out(tmp_path: Path) -> None:
    rows = ({"problem": "x?", "answer": answer} for answer in ("1", "2", "1"))
    path = lines(tmp_path / "a.jsonl", *rows, {"problem": "y?", "answer": "1"})
    prepared = prepare("math", [path])
    assert [task.question for task in prepared.tasks] == ["y?"]
    assert prepared.summary.dropped == {"answers that contradict each other": 3}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("25", "025"),
        ("\\frac12", "1/2"),
        ("3.50", "7/2"),
        ("$h=4$.", "$h=4$"),
        ("(1,2)", "(1, 2)"),
        ("90^\\circ", "90°"),
    ],
)
def test_one_answer_written_in_two_ways_is_one_answer(
    tmp_path: Path, first: str, second: str
) -> None:
    rows = ({"problem": "x?", "answer": answer} for answer in (first, second))
    (task,) = prepare("math", [lines(tmp_path / "a.jsonl", *rows)]).tasks
    assert task.answers == (first, second)


def test_questions_are_excluded_in_whatever_flavour_the_evaluation_has_them(tmp_path: Path) -> None:
    train = lines(tmp_path / "a.jsonl", DAPO, {"problem": "x?", "answer": "1"})
    evaluation = parquet(tmp_path / "aime.parquet", DAPO)
    assert [t.question for t in prepare("math", [train], exclude=[evaluation]).tasks] == ["x?"]


def test_encrypted_evaluations_are_excluded_by_what_they_ask_and_are_no_tasks(
    tmp_path: Path,
) -> None:
    secret = {"answer": hashed("4"), "canary": CANARY}
    browse = lines(tmp_path / "bc.jsonl", {"problem": hashed("What is 2 + 2?"), **secret})
    xbench = written(
        tmp_path / "xb.csv",
        {
            "prompt": encrypted("What is 3 + 3?", CANARY.encode()),
            "answer": encrypted("6", CANARY.encode()),
            "canary": CANARY,
        },
    )
    asked = ("what is 2 + 2", "what is 3 + 3", "x?")
    train = lines(tmp_path / "a.jsonl", *({"problem": one, "answer": "4"} for one in asked))
    prepared = prepare("math", [train], exclude=[browse, xbench])
    assert [task.question for task in prepared.tasks] == ["x?"]
    for path in (browse, xbench):
        with pytest.raises(DataError, match="1: the question is encrypted: prepare the file as"):
            prepare("math", [path])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "x?"}, "field 'problem' is missing, and so are 'question' and 'prompt'"),
        ({"problem": " "}, "field 'problem' must not be empty"),
        ({"prompt": [], "answer": "1"}, "field 'prompt' must be a text or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "field 'prompt' must be a text or a list"),
        (
            {"problem": "x?"},
            "field 'answer' is missing, and so are 'reward_model.ground_truth' and",
        ),
        ({"problem": "x?", "answer": {"a": 1}}, "field 'answer' must hold strings or finite"),
        ({"problem": "x?", "reward_model": "34"}, "field 'reward_model' must be an object"),
    ],
)
def test_a_row_that_cannot_be_used(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    path = lines(tmp_path / "a.jsonl", {"problem": "y?", "answer": "1"}, row)
    with pytest.raises(DataError) as error:
        prepare("math", [path])
    assert str(error.value).startswith(f"{path}:2: {says}")
