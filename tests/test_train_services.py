"""Training runs whose states, rewards and tools ask real servers."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpo_agent.cli import main
from graphpo_agent.net.chat import OpenAIChat
from graphpo_agent.rewards.judge import Judge
from graphpo_agent.types import Outcome, Task
from tests.net.servers import Request, answer, serving
from tests.net.test_embeddings import openai_server, tei_server
from tests.rewards.test_prm import pooled
from tests.worlds import make_world, run_arguments


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("worlds"), "kb")


def train(kb: Path, run: Path, *overrides: str) -> list[dict[str, float]]:
    assert main(["train", *run_arguments(kb, run, "train.steps=2", *overrides)]) == 0
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.mark.parametrize(
    ("embedder", "script"),
    [
        ("{{kind: openai, base_url: '{url}/v1', model: m}}", openai_server),
        ("{{kind: tei, url: '{url}'}}", tei_server),
    ],
)
def test_states_are_compared_by_a_servers_vectors(
    embedder: str, script: Any, kb: Path, tmp_path: Path
) -> None:
    with serving(script) as server:
        state = f"state={{kind: text, embedder: {embedder.format(url=server.url)}}}"
        rows = train(kb, tmp_path / "run", state, "overlap=true")
        assert server.requests
    assert all(row["embedder/failed"] == 0 for row in rows)
    graph = json.loads((tmp_path / "run/graphs.jsonl").read_text().splitlines()[0])
    assert all("embedding" in node for node in graph["nodes"])


def test_responses_that_a_process_reward_model_left_unscored_are_counted(
    kb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def flaky(before: int, request: Request) -> Any:
        return answer(pooled([0.25, 0.75])) if before % 4 else answer({}, 503)

    with serving(flaky) as server:
        kind = "class: graphpo_agent.rewards.prm:VllmStepScorer"
        scorer = f"{{{kind}, url: '{server.url}', model: m, tries: 1}}"
        method = f"method={{name: prm, group_size: 4, steps: response, scorer: {scorer}}}"
        rows = train(kb, tmp_path / "run", method)
        asked = len(server.requests)
        assert sum(row["prm/failed"] for row in rows) == -(-asked // 4)
        out = str(tmp_path / "graphs.jsonl")
        grown = run_arguments(kb, tmp_path / "run", method)
        assert main(["rollout", *grown, "--count", "2", "--out", out]) == 0
    (told,) = re.findall(r"^prm/failed +([0-9]+)$", capsys.readouterr().out, re.MULTILINE)
    assert int(told) == len(range(-asked % 4, len(server.requests) - asked, 4))


class JudgedWords:
    """A judge of all that the policy wrote: an untrained one gives no answers."""

    def __init__(self, chat: OpenAIChat) -> None:
        self._judge = Judge(chat)

    @property
    def counts(self) -> Mapping[str, int]:
        return self._judge.counts

    def __call__(self, task: Task, outcome: Outcome) -> float:
        return self._judge(task, replace(outcome, answer=outcome.response))


def judge_server(before: int, request: Request) -> Any:
    """Finds short requests right, medium ones wrong, and says nothing clear about long ones."""
    size = len(request.json()["messages"][0]["content"]) % 3
    said = ('{"verdict": "correct"}', '{"verdict": "incorrect"}', "Absolutely not sure.")[size]
    return answer({"choices": [{"message": {"role": "assistant", "content": said}}]})


def test_a_judge_rewards_and_what_it_could_not_judge_is_counted(kb: Path, tmp_path: Path) -> None:
    with serving(judge_server) as server:
        chat = f"{{class: graphpo_agent.net.chat:OpenAIChat, base_url: '{server.url}', model: m}}"
        reward = f"reward={{class: tests.test_train_services:JudgedWords, chat: {chat}}}"
        rows = train(kb, tmp_path / "run", reward, "overlap=true")
    judged = sum(row[f"judge/{verdict}"] for row in rows for verdict in ("correct", "incorrect"))
    assert judged > 0 and sum(row["judge/unjudged"] for row in rows) > 0
    assert all(row["judge/failed"] == 0 for row in rows)
    assert any(0 < row["reward/mean"] < 1 for row in rows)
