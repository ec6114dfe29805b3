"""The verbs about data and documents, as a user calls them."""

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import requests

from graphpo_agent.cli import _parser, main
from graphpo_agent.data import KINDS as DATA_KINDS
from graphpo_agent.data.sources import SOURCES
from graphpo_agent.data.tasks import load_demonstrations, load_tasks
from graphpo_agent.data_commands import _options
from graphpo_agent.evals import GRADERS
from graphpo_agent.evals.graders import KINDS, GradeOptions
from tests.net.servers import always, serving
from tests.worlds import start_command

ROWS = [
    {"question": "Who wrote Hamlet?", "answer": ["Shakespeare"], "aug_answer": [], "source": "a"},
    {"question": "Which?", "answer": ["x"], "aug_answer": [], "source": "compose_chain_qa_invalid"},
    {"question": "Capital of France?", "answer": ["Paris"], "aug_answer": [], "source": "a"},
]
CORPUS = [
    {"id": "0", "contents": '"Hamlet"\nHamlet is a play by Shakespeare'},
    {"id": "1", "contents": '"Paris"\nParis is the capital of France'},
]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prepare_writes_tasks_and_parquet_and_says_what_it_left_out(tmp_path, capsys) -> None:
    assert tuple(SOURCES) == DATA_KINDS
    source = write(tmp_path / "asearcher.jsonl", ROWS)
    exclude = write(tmp_path / "gaia.jsonl", [{"Question": "capital of France"}])
    out, parquet = tmp_path / "tasks.jsonl", tmp_path / "verl.parquet"
    arguments = ["data", "prepare", "asearcher", source, "--exclude", exclude]
    arguments += ["--out", str(out), "--parquet", str(parquet)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "3 rows → 1 tasks" in said and "unanswerable" in said and f"asked in {exclude}" in said
    (task,) = load_tasks(out)
    assert (task.question, task.answers) == ("Who wrote Hamlet?", ("Shakespeare",))
    (row,) = pq.read_table(parquet).to_pylist()
    assert row["reward_model"]["ground_truth"]["target"] == ["Shakespeare"]
    assert "Who wrote Hamlet?" in row["prompt"][0]["content"]
    assert row["data_source"] == "searchR1_nq"
    assert main([*arguments[:-2], "--keep-unanswerable"]) == 0
    assert "3 rows → 2 tasks" in capsys.readouterr().out
    assert main([*arguments, "--parquet-for", "tree-grpo"]) == 0
    (row,) = pq.read_table(parquet).to_pylist()
    assert row["data_source"] == "a" and "<search>" in row["prompt"][0]["content"]


def test_a_search_r1_file_keeps_its_prompts(tmp_path, capsys) -> None:
    prompt = [{"role": "user", "content": "Mine. <answer> Beijing </answer> Question: who?\n"}]
    truth = {"style": "rule", "ground_truth": {"target": ["Ola"]}}
    source = write(
        tmp_path / "t.jsonl", [{"data_source": "nq", "prompt": prompt, "reward_model": truth}]
    )
    parquet = tmp_path / "again.parquet"
    arguments = ["data", "prepare", "search-r1", source, "--out", str(tmp_path / "o.jsonl")]
    for trainer, kept in (("search-r1", True), ("verl", False)):  # verl's agent calls a tool
        assert main([*arguments, "--parquet", str(parquet), "--parquet-for", trainer]) == 0
        (row,) = pq.read_table(parquet).to_pylist()
        assert (row["prompt"] == prompt) == kept


def test_prepare_keeps_trajectories_as_demonstrations(tmp_path, capsys) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"query": ["q"]}}\n</tool_call>'
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "<tools></tools>\nUser: Who?"},
        {"role": "assistant", "content": f"<think>\nx\n</think>\n{call}"},
        {"role": "user", "content": "<tool_response>\nr\n</tool_response>"},
        {"role": "assistant", "content": "<think>\ny\n</think>\n<answer>\nz\n</answer>"},
    ]
    row = {"type": "chatml", "messages": messages, "functions": [], "tool_calls": []}
    row |= {"task": "agent/multiturn_search", "answer": [["z"]], "tag": "e2hqa"}
    source = write(tmp_path / "traj.jsonl", [row])
    out, shown = tmp_path / "tasks.jsonl", tmp_path / "sft.jsonl"
    arguments = ["data", "prepare", "webdancer", source, "--out", str(out)]
    assert main([*arguments, "--demonstrations", str(shown)]) == 0
    (demonstration,) = load_demonstrations(shown)
    assert [(p.trained, p.role) for p in demonstration.pieces] == [
        (True, None),
        (False, "user"),
        (True, None),
    ]
    none = ["data", "prepare", "asearcher", write(tmp_path / "a.jsonl", ROWS)]
    assert main([*none, "--out", str(tmp_path / "n"), "--demonstrations", str(shown)]) == 2
    assert "recorded trajectory" in capsys.readouterr().err
    assert not (tmp_path / "n").exists()


def test_grade_runs_a_reward_on_transcripts(tmp_path, capsys) -> None:
    assert GRADERS == KINDS
    rows = [{"id": "a", "response": "<answer>oak</answer>", "gold": ["Oak tree", "oak."]}]
    path, out = write(tmp_path / "t.jsonl", rows), tmp_path / "grades.jsonl"
    assert main(["grade", "em", path, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["score"] == 1.0
    assert main(["grade", "em", write(tmp_path / "u.jsonl", [{"id": "a"}]), "--out", path]) == 2
    error = capsys.readouterr().err
    assert "u.jsonl:1" in error and error.count("\n") == 1
    assert json.loads(Path(path).read_text())["id"] == "a"  # what was there stays
    lost = write(tmp_path / "lost.jsonl", [rows[0] | {"outages": 1, "reward": None}])
    assert main(["grade", "em", lost, "--out", str(out)]) == 0
    assert "mean score unknown over 0 transcripts" in capsys.readouterr().out


def test_flags_that_are_not_given_change_nothing() -> None:
    options = vars(_parser().parse_args(["grade", "em", "in.jsonl", "--out", "out.jsonl"]))
    assert {name: options[name] for name in asdict(GradeOptions())} == asdict(GradeOptions())
    options = vars(_parser().parse_args(["serve", "index"]))
    assert (options["host"], options["port"]) == ("127.0.0.1", 8000)


def test_an_index_is_built_described_and_served(tmp_path, capsys) -> None:
    corpus, index = write(tmp_path / "corpus.jsonl", CORPUS), str(tmp_path / "index")
    assert main(["index", "build", "bm25", "--corpus", corpus, "--out", index, "k1=1.2"]) == 0
    assert "2 documents" in capsys.readouterr().out
    assert main(["index", "info", index]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["k1"] == 1.2
    more = write(tmp_path / "more.jsonl", [{"id": "2", "contents": '"Rome"\nRome is in Italy'}])
    other, both = str(tmp_path / "other"), str(tmp_path / "both")
    assert main(["index", "build", "bm25", "--corpus", more, "--out", other, "k1=1.2"]) == 0
    assert main(["index", "merge", index, other, "--out", both]) == 0
    assert "3 documents" in capsys.readouterr().out
    ready = tmp_path / "address"
    pages = write(tmp_path / "pages.jsonl", [{"url": "http://wiki/Rome", "contents": "Rome."}])
    arguments = ["serve", index, "--port", "0", "--ready-file", str(ready), "--topk", "1"]
    arguments += ["--pages", pages]
    arguments += ["--max-query-chars", "30"]
    process = start_command(arguments)
    try:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        body = {"queries": ["capital", "play"], "return_scores": True}
        reply = requests.post(f"http://{ready.read_text()}/retrieve", json=body, timeout=20)
        found = [[hit["document"]["id"] for hit in hits] for hits in reply.json()["result"]]
        assert found == [["1"], ["0"]]
        reply = requests.post(
            f"http://{ready.read_text()}/access", json={"urls": ["http://wiki/Rome"]}, timeout=20
        )
        assert reply.status_code == 200 and "Rome." in reply.text
        long = {"queries": ["capital " * 4]}
        reply = requests.post(f"http://{ready.read_text()}/retrieve", json=long, timeout=20)
        assert reply.status_code == 422 and "at most 30 are allowed" in reply.text
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("query: ", "query: "),
        ("query ", "query "),
        ("a: b # c", "a: b # c"),
        ("'query: '", "query: "),
        ('"x" ', "x"),
        ("none", "none"),
        ("null", None),
        ("2", 2),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_bare_texts_are_options_as_they_stand(text: str, value: object) -> None:
    assert _options([f"name={text}"]) == {"name": value}


BUILD = ["index", "build", "bm25", "--corpus", "{corpus}", "--out", "{out}"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*BUILD, "k2=1"], "option 'k2'"),
        ([*BUILD, "=1"], "name=value"),
        ([*BUILD, "k1=[1"], "option 'k1=[1': the value is not YAML"),
        (["index", "build", "bm25", "--corpus", "/nowhere", "--out", "{out}"], "/nowhere"),
        (["index", "build", "dense", "--corpus", "{corpus}", "--out", "{out}"], "model"),
        (["index", "info", "{out}"], "no index"),
        (["index", "merge", "{out}", "--out", "{out}2"], "no index"),
        (["serve", "{out}", "--port", "0"], "no index"),
        (["serve", "{out}", "--deadline", "0"], "deadline_s"),
        (["serve", "{out}", "--queue", "0"], "queue"),
        (["serve", "{out}", "--workers", "0"], "workers"),
        (
            ["data", "prepare", "webdancer", "{corpus}", "--out", "{out}"],
            "field 'answer' is missing",
        ),
        (
            ["data", "prepare", "webdancer", "{corpus}", "--out", "{corpus}"],
            "corpus.jsonl is also an input or another output",
        ),
        (
            ["data", "prepare", "webdancer", "x", "--exclude", "{corpus}", "--out", "{corpus}"],
            "corpus.jsonl is also an input or another output",
        ),
        (
            ["data", "prepare", "webdancer", "x", "--out", "{out}", "--parquet", "{out}"],
            "is also an input or another output",
        ),
        (
            ["data", "prepare", "webdancer", "x", "--out", "{out}", "--parquet-for", "search-r1"],
            "--parquet-for needs --parquet FILE",
        ),
        (
            ["serve", "{out}", "--pages", "{corpus}", "--ready-file", "{corpus}"],
            "corpus.jsonl is also an input or another output",
        ),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, capsys, arguments, says) -> None:
    places = {"corpus": write(tmp_path / "corpus.jsonl", CORPUS), "out": str(tmp_path / "out")}
    process = start_command([argument.format(**places) for argument in arguments])
    assert process.wait(60) == 2
    error = process.stderr.read().strip().splitlines()[-1]
    assert error.startswith("graphpo: ") and says in error
    assert not (tmp_path / "out").exists() and (tmp_path / "corpus.jsonl").read_text()


@pytest.mark.parametrize("flag", ["--out", "--parquet"])
@pytest.mark.parametrize(
    "place", ["pipe", "folder", "tasks.jsonl/x", "x" * 300, "new/" + "x" * 250]
)
def test_prepare_writes_over_no_device_or_directory(tmp_path, capsys, flag, place) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    source = write(tmp_path / "tasks.jsonl", [{"question": "q", "answer": "a"}])
    outputs = {"--out": str(tmp_path / "out.jsonl")} | {flag: str(tmp_path / place)}
    arguments = [word for pair in outputs.items() for word in pair]
    assert main(["data", "prepare", "webdancer", source, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphpo: ") and error.count("\n") == 1
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "folder").is_dir()
    assert ("is not a file" if place in ("pipe", "folder") else "cannot be written") in error
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe", "tasks.jsonl"]


@pytest.mark.parametrize("kind", ["math", "gpqa", "livecodebench"])
def test_parquet_for_search_trainers_is_not_for_reasoning(kind, tmp_path, capsys) -> None:
    source = write(tmp_path / "m.jsonl", [{"problem": "x?", "answer": "1"}])
    out = tmp_path / "tasks.jsonl"
    arguments = ["data", "prepare", kind, source, "--out", str(out)]
    assert main([*arguments, "--parquet", str(tmp_path / "m.parquet")]) == 2
    told = f"graphpo: --parquet writes tasks of search agents, not those of {kind}\n"
    assert capsys.readouterr().err == told
    assert not out.exists()


def test_an_output_that_has_no_arrows_gets_a_question_mark(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    source = write(tmp_path / "a.jsonl", ROWS[:1])
    out = str(tmp_path / "tasks.jsonl")
    process = start_command(["data", "prepare", "asearcher", source, "--out", out])
    said, told = process.communicate()
    assert (process.returncode, said) == (0, f"1 rows ? 1 tasks\n{out}\n"), told


def test_a_warning_is_one_line_of_the_command(tmp_path: Path) -> None:
    row = {"id": "a", "question": "Who?", "response": "<answer>Ada</answer>", "gold": ["Ada"]}
    rows = write(tmp_path / "rows.jsonl", [row])
    vague = {"choices": [{"message": {"role": "assistant", "content": "Hard\nto say."}}]}
    with serving(always(vague)) as server:
        command = ["grade", "judge", rows, "--out", str(tmp_path / "grades.jsonl")]
        command += ["--judge-url", server.url, "--judge-model", "m"]
        process = start_command(command)
        _, told = process.communicate()
    assert process.returncode == 0
    assert told == "graphpo: judge: a reply holds no verdict: 'Hard to say.'\n"
