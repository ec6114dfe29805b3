"""From a published file of mathematics to a trained reasoner, with the verifier that judges it."""

import json
import random
import re
from pathlib import Path

import pytest

from graphpo_agent.cli import main
from graphpo_agent.data.tasks import load_tasks, write_demonstrations
from graphpo_agent.data.toy_model import make_toy_model
from graphpo_agent.types import Demonstration, Piece
from tests.data.test_prepare_sources import parquet
from tests.worlds import ROOT

WRAPPED = "Solve it; the last line is Answer: $Answer.\n\n{}\n\nEnd with a line Answer: as said."


def sums(count: int, seed: int) -> list[tuple[str, str]]:
    """Questions and answers: sums of two numbers below five."""
    draw = random.Random(seed)
    pairs = [(draw.randrange(5), draw.randrange(5)) for _ in range(count)]
    return [(f"What is {a} + {b} ?", str(a + b)) for a, b in pairs]


def solution(answer: str) -> str:
    return f"The sum is ${answer}$ .\nSo it is \\boxed{{{answer}}} ."


def test_sums_are_prepared_learned_trained_and_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": WRAPPED.format(question)}],
            "solution": answer,
            "level": "small" if int(answer) < 5 else "large",
        }
        for question, answer in sums(200, seed=0)
    ]
    source, tasks = parquet(tmp_path / "sums.parquet", *rows), tmp_path / "tasks.jsonl"
    assert main(["data", "prepare", "math", str(source), "--out", str(tasks)]) == 0
    questions = {task.question: task.answers for task in load_tasks(tasks)}
    assert questions == {question: (answer,) for question, answer in sums(200, seed=0)}

    draw = random.Random(1)
    demonstrations = [
        Demonstration(str(i), ({"role": "user", "content": question},), (Piece(text, True),))
        for i, (question, answer) in enumerate(sums(400, seed=2))
        for text in [solution(answer if draw.random() < 0.5 else str(draw.randrange(9)))]
    ]
    write_demonstrations(tmp_path / "sft.jsonl", demonstrations)
    texts = [solution(str(n)) for n in range(9)] + [q for q, _ in sums(200, seed=0)]
    make_toy_model(tmp_path / "blank", texts, phrases=[" ?", *"0123456789"])
    sft = tmp_path / "sft.yaml"
    sft.write_text(
        f"output: {tmp_path}/policy\nmodel: {{path: {tmp_path}/blank, device: cpu}}\n"
        f"demonstrations: {tmp_path}/sft.jsonl\nthreads: 1\n"
        "steps: 150\nbatch_size: 32\nlearning_rate: 3.0e-3\n"
    )
    assert main(["sft", str(sft)]) == 0

    arguments = [
        str(ROOT / "configs/math/qwen2.5-math-7b.yaml"),
        str(ROOT / "configs/methods/graphpo/paper.yaml"),
        f"model={{path: {tmp_path}/policy, device: cpu}}",
        "engine={kind: local}",
        "threads=1",
        f"output={tmp_path}/run",
        f"tasks={{train: {tasks}, heldout: {tasks}}}",
        "mode={kind: segment, segment_length: 8, max_response_tokens: 32}",
        "state={kind: text, embedder: {kind: hashing}}",
        "method.schedule=[4, 2, 1, 1]",
        "budget.tokens=null",
        "update.minibatch_graphs=4",
        "update.learning_rate=1e-3",
        "train={prompts_per_step: 8, steps: 4, eval_every: 4, eval_tasks: 25}",
    ]
    assert main(["train", *arguments]) == 0
    log = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert log[0]["eval/accuracy"] > 0
    assert any(row["reward/mixed_prompts"] > 0 for row in log[1:])
    assert all({"math/unanswered", "math/timeout"} <= set(row) for row in log[1:])

    transcripts, grades = tmp_path / "transcripts.jsonl", tmp_path / "grades.jsonl"
    capsys.readouterr()
    assert main(["eval", *arguments, "--samples", "2", "--out", str(transcripts)]) == 0
    told = capsys.readouterr().out
    assert "25 tasks, 50 trajectories" in told and "best of 2" in told
    assert re.search(
        r"level large: [\d.]+% over 10 tasks\nlevel small: [\d.]+% over 15 tasks", told
    )
    assert main(["grade", "math", str(transcripts), "--out", str(grades)]) == 0
    rewards = [json.loads(line)["reward"] for line in transcripts.read_text().splitlines()]
    scores = [json.loads(line)["score"] for line in grades.read_text().splitlines()]
    assert scores == rewards and 0 < sum(scores) < len(scores)
    assert f"mean score {sum(scores) / 50:.3f} over 50 transcripts" in capsys.readouterr().out
