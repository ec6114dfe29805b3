import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.errors import ConfigError, DataError, ToolError
from graphpo_agent.evals.grade import GradeSummary, grade_file
from graphpo_agent.evals.graders import KINDS, GradeOptions
from graphpo_agent.program_tests import ProgramTests
from graphpo_agent.rewards.math import MathReward
from graphpo_agent.types import Outcome, Task
from tests.net.servers import answer, serving

ROW = {"id": "a", "response": "<think>x</think> <answer> The Oak </answer>", "gold": "oak"}


def graded(
    tmp_path: Path, kind: str, *rows: dict[str, Any], options: GradeOptions | None = None
) -> list[dict[str, Any]]:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    grade_file(kind, str(source), str(out), options or GradeOptions())
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_exact_match_of_the_last_complete_answer(tmp_path: Path) -> None:
    rows = [
        ROW,
        {**ROW, "id": 2, "gold": ["fir", "oak", "elm"]},
        {**ROW, "id": "c", "response": "<answer>fir</answer> oak <answer>oak</answer> <answer>fir"},
        {**ROW, "id": "d", "response": "<answer>oak</answer> </answer>"},
        {**ROW, "id": "e", "response": "<answer> fir <answer>oak</answer>"},
        {**ROW, "id": "f", "response": "oak"},
        {**ROW, "id": "g", "response": "fir", "prompt": "<answer>oak</answer>"},
        {**ROW, "id": "h", "response": "<answer></answer>"},
    ]
    found = graded(tmp_path, "em", *rows)
    assert [row["id"] for row in found] == ["a", 2, "c", "d", "e", "f", "g", "h"]
    assert [row["score"] for row in found] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert [row["extracted"] for row in found[-3:]] == [None, None, ""]
    assert [row["status"] for row in found[-3:]] == ["no_answer", "no_answer", "ok"]
    assert found[1]["detail"] == {"gold": "oak"}
    assert set(found[0]) == {"id", "score", "extracted", "status", "detail"}


def test_a_bare_response_is_the_answer(tmp_path: Path) -> None:
    bare = GradeOptions(bare=True)
    row = {"id": "a", "response": " born 1987\n", "gold": ["1954", "1987", "9"], "note": "mine"}
    (em,) = graded(tmp_path, "em", row, options=bare)
    (subem,) = graded(tmp_path, "subem", row, options=bare)
    (f1,) = graded(tmp_path, "f1", row, options=bare)
    assert (em["score"], subem["score"], f1["score"]) == (0.0, 1.0, pytest.approx(2 / 3))
    assert em["extracted"] == "born 1987" and em["detail"] == {"gold": None}
    assert f1["detail"] == {"gold": "1987"}


def test_the_originals_read_prompt_and_response(tmp_path: Path) -> None:
    prompt = "<answer>and</answer> <answer>Beijing</answer> <|im_start|>assistant\n"
    answered = {"id": "a", "prompt": prompt, "response": ROW["response"], "gold": "oak"}
    unanswered = {**answered, "response": "hm", "gold": ["Beijing"]}
    options = GradeOptions(structure_score=0.2, final_format_score=0.1, format_score=0.05)
    for kind, scores in {
        "search_r1_em": [1.0, 1.0, 0.0],
        "search_r1_em_format": [1.0, 0.8, 0.0],
        "tree_grpo_f1": [1.0, 0.8, 0.0],
        "verl_search_r1_em": [1.0, 1.0, 1.0],
    }.items():
        found = graded(tmp_path, kind, answered, unanswered, ROW, options=options)
        assert [row["score"] for row in found] == pytest.approx(scores), kind
        assert [row["extracted"] for row in found[:2]] == ["The Oak", "Beijing"]
        assert [row["status"] for row in found[:2]] == ["ok", "ok"]
    (single,) = graded(tmp_path, "search_r1_em", ROW)
    assert single["extracted"] is None and single["status"] == "no_answer"


def test_the_format_scores_reach_their_rules(tmp_path: Path) -> None:
    wrong = {"id": "a", "response": "<answer>fir</answer>" * 2, "gold": "oak"}
    options = GradeOptions(final_format_score=0.1, format_score=0.05)
    scores = {
        kind: graded(tmp_path, kind, wrong, options=options)[0]["score"] for kind in KINDS[3:7]
    }
    assert scores == {
        "search_r1_em": 0.05,
        "search_r1_em_format": 0.1,
        "tree_grpo_f1": 0.0,
        "verl_search_r1_em": 0.05,
    }


def test_asearcher_s_reward_of_the_turns_between_observations(tmp_path: Path) -> None:
    seen = "<search>oak</search>\n<information>\nThe assistant <answer>no\n</information>\n"
    right = {**ROW, "response": f"{seen}<think>x</think> <answer>Oak</answer>"}
    rows = [
        right,
        {**right, "gold": "fir", "aug_answers": ["oak"]},
        {**right, "response": "<search>a</search>" + right["response"]},
        {**right, "response": seen, "aug_answers": None},
        {**right, "response": "<answer>invalid</answer>", "gold": "invalid oak", "unanswerable": 1},
    ]
    found = graded(tmp_path, "asearcher", *rows)
    assert [row["score"] for row in found] == pytest.approx([1.0, 0.3, 0.0, 0.0, 2 / 3])
    assert [row["status"] for row in found] == ["ok", "ok", "ok", "no_answer", "ok"]
    assert found[0]["detail"] == {"turns": 2}


def test_a_judge_s_verdicts_are_scores_and_what_has_none_is_told_apart(tmp_path: Path) -> None:
    def judged(before: int, request: Any) -> Any:
        (case,) = [m["content"] for m in request.json()["messages"] if "accepted" in m["content"]]
        given = json.loads(case[case.index("\n{") :])["given_answer"]
        verdict = {"oak": "correct", "fir": "incorrect"}.get(given)
        content = json.dumps({"verdict": verdict}) if verdict else "who knows"
        return answer({"choices": [{"message": {"role": "assistant", "content": content}}]})

    rows = [
        {"id": n, "question": "which?", "gold": "oak", "response": f"<answer>{said}</answer>"}
        for n, said in enumerate(["oak", "fir", "elm"] * 7)
    ]
    with serving(judged) as server:
        options = GradeOptions(judge_url=server.url, judge_model="m")
        found = graded(tmp_path, "judge", *rows, {**rows[0], "response": "oak"}, options=options)
        bare = replace(options, bare=True)
        (alone,) = graded(tmp_path, "judge", {**rows[0], "response": "oak"}, options=bare)
        with pytest.raises(DataError, match=r"in[.]jsonl:1: field 'question' is missing"):
            graded(tmp_path, "judge", ROW, options=options)
    assert [row["id"] for row in found] == [*range(21), 0]
    assert [row["score"] for row in found] == [1.0, 0.0, None] * 7 + [0.0]
    assert [row["status"] for row in found] == ["ok", "ok", "unjudged"] * 7 + ["no_answer"]
    assert (alone["score"], alone["extracted"]) == (1.0, "oak")


def test_benchmarks_answers_are_where_they_ask_for_them(tmp_path: Path) -> None:
    shown: list[str] = []

    def judged(before: int, request: Any) -> Any:
        (case,) = [m["content"] for m in request.json()["messages"] if "accepted" in m["content"]]
        shown.append(json.loads(case[case.index("\n{") :])["given_answer"])
        content = json.dumps({"verdict": "correct" if "oak" in shown[-1] else "incorrect"})
        return answer({"choices": [{"message": {"role": "assistant", "content": content}}]})

    row = {"id": "a", "question": "which?", "gold": "oak"}
    browsed = "<think>Exact Answer: fir</think>Explanation: old\n**Exact Answer:** an oak\n"
    evaluated = {**row, "turns": ["x"], "answer": None, "response": "an oak"}
    with serving(judged) as server:
        options = GradeOptions(judge_url=server.url, judge_model="m")

        def grade(kind: str, *rows: dict[str, Any]) -> list[tuple[Any, ...]]:
            shown.clear()
            found = graded(tmp_path, kind, *rows, options=options)
            return [(one["score"], one["extracted"], one["detail"]) for one in found]

        assert grade("browsecomp", {**row, "response": "Exact Answer:\nConfidence: 9 %"})[0][
            1:
        ] == (
            "Exact Answer:\nConfidence: 9 %",
            {"verdict": "incorrect", "confidence": 9.0},
        )
        assert grade("browsecomp", {**row, "response": "Exact Answer: $5"})[0][1] == "$5"
        sure, unsure = browsed + "Confidence: 85%", browsed.replace("an oak", "fir")
        assert grade("browsecomp", {**row, "response": sure}, {**row, "response": unsure}) == [
            (1.0, "an oak", {"verdict": "correct", "confidence": 85.0}),
            (0.0, "fir", {"verdict": "incorrect", "confidence": None}),
        ]
        whole = "It has been an oak\nfor ever."
        assert grade("webwalker", {**row, "response": f"<think>fir</think> {whole}"}) == [
            (1.0, whole, {"verdict": "correct"})
        ]
        assert shown == [whole]
        assert grade("xbench", {**row, "response": "推理\n最终答案: oak"}) == [
            (1.0, "oak", {"verdict": "equal"})
        ]
        assert not shown
        assert grade("xbench", {**row, "response": "**最终答案**：an oak"}, evaluated) == [
            (1.0, "an oak", {"verdict": "correct"}),
            (0.0, None, {}),
        ]
        assert grade("webwalker", {**row, "response": "<answer>fir</answer> oak"})[0][:2] == (
            0.0,
            "fir",
        )
    with pytest.raises(ConfigError, match="xbench needs --judge-url and --judge-model"):
        graded(tmp_path, "xbench", row)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", ":2: not valid JSON"),
        ("[]", ":2: expected a JSON object"),
        ('{"response": "x", "gold": "y"}', ":2: field 'id' is missing"),
        ('{"id": true, "response": "x", "gold": "y"}', ":2: field 'id' must be"),
        ('{"id": "b", "gold": "y"}', ":2: field 'response' is missing"),
        ('{"id": "b", "response": null, "gold": "y"}', ":2: field 'response' must be a string"),
        ('{"id": "b", "response": "x"}', ":2: field 'gold' is missing"),
        ('{"id": "b", "response": "x", "gold": []}', ":2: field 'gold' must not be empty"),
        ('{"id": "b", "response": "x", "gold": ["y", 3]}', ":2: field 'gold' must hold strings"),
        ('{"id": "b", "response": "x", "gold": 3}', ":2: field 'gold' must be a string or a list"),
        ('{"id": "b", "response": "x", "gold": "y", "prompt": 1}', ":2: field 'prompt' must be"),
    ],
)
def test_a_bad_row_names_its_place_and_leaves_the_output_alone(
    tmp_path: Path, line: str, says: str
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(ROW) + "\n" + line + "\n")
    out.write_text("precious")
    with pytest.raises(DataError) as error:
        grade_file("em", str(source), str(out), GradeOptions())
    assert f"{source}{says}" in str(error.value) and "\n" not in str(error.value)
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    out = str(tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        grade_file("em", str(source), out, GradeOptions())
    source.write_text("\n")
    with pytest.raises(DataError, match="holds no transcripts"):
        grade_file("em", str(source), out, GradeOptions())
    source.write_text(json.dumps(ROW))
    for wrong in (tmp_path, tmp_path / "nowhere" / "out.jsonl", Path("/dev/null")):
        with pytest.raises(DataError, match="output"):
            grade_file("em", str(source), str(wrong), GradeOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("em", GradeOptions(format_score=0.1), "--format-score is not a setting of em"),
        ("search_r1_em", GradeOptions(bare=True), "--bare is not a setting of search_r1_em"),
        ("asearcher", GradeOptions(bare=True), "--bare is not a setting of asearcher"),
        ("em", GradeOptions(judge_url="http://h"), "--judge-url is not a setting of em"),
        ("judge", GradeOptions(judge_url="http://h"), "judge needs --judge-url and --judge-model"),
        ("tree_grpo_f1", GradeOptions(structure_score=float("nan")), "--structure-score must be"),
        ("tree_grpo_f1", GradeOptions(retrieval_score=float("inf")), "--retrieval-score must be"),
    ],
)
def test_options_that_a_kind_does_not_take(
    tmp_path: Path, kind: str, options: GradeOptions, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        graded(tmp_path, kind, ROW, options=options)


def test_gaia_s_rule_and_mathematics(tmp_path: Path) -> None:
    row = {"id": "a", "response": "<answer>$ 1,234</answer>", "gold": ["x", "1234", "y"]}
    (gaia,) = graded(tmp_path, "gaia", row)
    assert (gaia["score"], gaia["status"], gaia["detail"]) == (1.0, "ok", {"gold": "1234"})
    rows = [
        {"id": 1, "response": "So \\boxed{\\frac12}", "gold": "0.5"},
        {"id": 2, "response": "no idea", "gold": ["3"]},
        {"id": 3, "response": "Answer: 4", "gold": ["3", "5"]},
    ]
    found = graded(tmp_path, "math", *rows)
    assert [row["score"] for row in found] == [1.0, 0.0, 0.0]
    assert [row["extracted"] for row in found] == ["\\frac12", None, "4"]
    assert [row["status"] for row in found] == ["ok", "no_answer", "ok"]
    (bare,) = graded(
        tmp_path, "math", {**rows[2], "response": " 5 "}, options=GradeOptions(bare=True)
    )
    assert bare["score"] == 1.0


def test_mathematics_takes_an_agent_s_marked_answer(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "response": "<think>2</think><answer>34</answer>", "gold": ["34"]},
        {"id": 2, "response": "so \\boxed{5}: <answer>\\frac{1}{2}</answer>", "gold": "0.5"},
    ]
    assert [row["score"] for row in graded(tmp_path, "math", *rows)] == [1.0, 1.0]


def test_an_answer_inside_a_call_of_an_evaluated_agent_is_none(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "s", "arguments": {"query": "<answer>oak</answer>"}}</tool_call>'
    row = {"id": "a", "response": call, "turns": [call], "answer": None, "gold": "oak"}
    for kind in ("em", "subem", "f1", "gaia"):
        (found,) = graded(tmp_path, kind, row)
        assert (found["score"], found["status"]) == (0.0, "no_answer")
        (found,) = graded(tmp_path, kind, {**row, "answer": "The oak" if kind == "em" else "oak"})
        assert found["score"] == 1.0
    segment = {**ROW, "turns": [], "answer": None}
    assert [each["score"] for each in graded(tmp_path, "em", segment)] == [1.0]


def test_mathematics_reads_an_evaluation_s_rows_as_training_does(tmp_path: Path) -> None:
    guess = "Perhaps <answer>5</answer>? No: \\boxed{4}"
    reasons = "because " * 100 + "so \\boxed{4}."
    rows = [
        {"id": 1, "response": guess, "gold": "4", "answer": None, "turns": []},
        {"id": 2, "response": f"<answer>{reasons}</answer>", "gold": "4", "answer": reasons},
        {"id": 3, "response": f"<answer>{reasons}</answer>", "gold": "4"},
        {"id": 4, "response": guess, "gold": "5"},
    ]
    rows[1]["turns"] = [rows[1]["response"]]
    assert [row["score"] for row in graded(tmp_path, "math", *rows)] == [1.0] * 4
    reward = MathReward()
    for row in rows[:2]:
        task = Task("t", "q", (row["gold"],))
        assert reward(task, Outcome(row["response"], row["answer"])) == 1.0


@pytest.mark.parametrize("kind", ["math", "asearcher", "em"])
def test_the_answer_of_a_data_set_is_not_the_one_that_was_given(tmp_path: Path, kind: str) -> None:
    row = {"id": 1, "response": "\\boxed{7} <answer>7</answer>", "gold": "34", "answer": "34"}
    assert [each["score"] for each in graded(tmp_path, kind, row)] == [0.0]


def test_a_trajectory_that_an_evaluation_left_out_has_no_score(tmp_path: Path) -> None:
    judged = {**ROW, "answer": "The Oak", "reward": 1.0, "outages": 1}  # outages: score
    rows = [judged, {**ROW, "response": "<search>oak", "reward": None, "outages": 1}]
    found = graded(tmp_path, "gaia", *rows)
    assert [row["score"] for row in found] == [0.0, None]  # GAIA's rule keeps the article
    assert [row["status"] for row in found] == ["ok", "outage"]


def test_a_judge_that_is_not_there_ends_it_and_writes_nothing(tmp_path: Path) -> None:
    with serving(lambda before, request: answer({}, status=400)) as server:
        options = GradeOptions(judge_url=server.url, judge_model="m")
        with pytest.raises(ToolError, match="could be asked about none of the transcripts"):
            graded(tmp_path, "judge", {**ROW, "question": "which?"}, options=options)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_judge_that_could_not_be_asked_about_one_grades_the_others(tmp_path: Path) -> None:
    said = answer({"choices": [{"message": {"role": "assistant", "content": "correct"}}]})

    def judged(before: int, request: Any) -> Any:
        return answer({}, status=400) if "fir" in str(request.json()) else said

    rows = [
        {"id": n, "question": "which?", "gold": "oak", "response": f"<answer>{text}</answer>"}
        for n, text in enumerate(["oak", "fir", "elm"])
    ]
    with serving(judged) as server:
        options = GradeOptions(judge_url=server.url, judge_model="m")
        found = graded(tmp_path, "judge", *rows, options=options)
    assert [row["score"] for row in found] == [1.0, None, 1.0]
    assert [row["status"] for row in found] == ["ok", "error", "ok"]


def test_dapo_s_rule_by_the_release_of_verl(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "response": "Answer: $x = 34$ units", "gold": "34"},
        {"id": "b", "response": "So \\boxed{34}", "gold": ["5", "34"]},
    ]
    found = graded(tmp_path, "math_dapo", *rows)
    assert [(row["score"], row["extracted"]) for row in found] == [(1.0, "34"), (0.0, None)]
    assert [row["status"] for row in found] == ["ok", "no_answer"]
    newer = GradeOptions(verl_version="0.9.1")
    assert [row["score"] for row in graded(tmp_path, "math_dapo", *rows, options=newer)] == [1, 1]
    with pytest.raises(ConfigError, match="--verl-version is not a setting of math"):
        graded(tmp_path, "math", *rows, options=newer)


def test_a_choice_is_a_letter(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "response": "The answer is **B**.", "gold": "B"},
        {"id": "b", "response": "The answer is B.", "gold": ["A"], "turns": [], "answer": None},
        {"id": "c", "response": "<answer>(B)</answer> or A", "gold": "B"},
        {"id": "d", "response": "Hard to say", "gold": "B"},
    ]
    found = graded(tmp_path, "gpqa", *rows)
    assert [(row["score"], row["extracted"]) for row in found] == [
        *((1.0, "B"), (0.0, "B"), (1.0, "B"), (0.0, None))
    ]
    assert found[3]["status"] == "no_answer"


def test_programs_are_run_on_the_tests_of_their_rows(tmp_path: Path) -> None:
    tests = ProgramTests((("1 2", "3"), ("2 2", "4"))).packed()
    right = "print(sum(map(int, input().split())))"
    about = {"metadata": {"tests": tests}}
    rows = [
        {"id": "a", "response": f"So\n```python\n{right}\n```", **about},
        {"id": "b", "response": "```\nprint(3)\n```", "gold": [], "tests": tests},
        {"id": "c", "response": right, **about},
    ]
    found = graded(tmp_path, "code", *rows)
    assert [(row["score"], row["status"]) for row in found] == [
        *((1.0, "ok"), (0.0, "ok"), (0.0, "no_answer"))
    ]
    assert found[0]["extracted"].strip() == right and found[1]["detail"] == {"tests": "failed"}
    (bare,) = graded(tmp_path, "code", rows[2], options=GradeOptions(bare=True))
    assert bare["score"] == 1.0
    for metadata, says in (({}, "is missing"), ({"tests": 3}, "a string"), ({"tests": "e"}, "not")):
        with pytest.raises(DataError, match=rf"in\.jsonl:1: field 'metadata\.tests'.* {says}"):
            graded(tmp_path, "code", {**rows[0], "metadata": metadata})


def test_a_summary_of_all_grades(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", str(tmp_path / "out.jsonl")
    lost = {**ROW, "outages": 1, "reward": None}
    rows = [ROW, {**ROW, "response": "oak"}, lost, {**ROW, "gold": "fir"}]
    source.write_text("\n".join(json.dumps(row) for row in rows))
    summary = grade_file("em", str(source), out, GradeOptions())
    assert summary == GradeSummary(pytest.approx(1 / 3), 3, {"ok": 2, "no_answer": 1, "outage": 1})
