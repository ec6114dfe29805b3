import math
import threading

import pytest

from graphpo_agent.errors import QuotaError, ToolError
from graphpo_agent.net.store import CallStore
from graphpo_agent.protocols import Counting, StepScorer
from graphpo_agent.rewards.prm import VllmStepScorer
from graphpo_agent.types import SteppedResponse
from tests.net.servers import always, answer, in_turn, serving

RESPONSE = SteppedResponse("2 + 2 + 2?", ("2 + 2 is 4.", "4 + 2 is 6."))
UNREACHABLE = "http://127.0.0.1:1"


def pooled(*rows):
    """The body of vLLM 0.27.1's reply for one conversation."""
    entry = {"index": 0, "object": "pooling", "data": [list(row) for row in rows]}
    usage = {"prompt_tokens": 9, "total_tokens": 9}
    return {"id": "pool-1", "object": "list", "model": "prm", "data": [entry], "usage": usage}


def by_length(before, request):
    """A server whose score of a step is its number of characters in hundredths."""
    steps = request.json()["messages"][-1]["content"].split("<extra_0>")[:-1]
    return answer(pooled(*((1 - len(x) / 100, len(x) / 100) for x in steps)))


def test_a_step_s_score_is_the_second_class_at_its_token():
    with serving(by_length) as server:
        scorer = VllmStepScorer(f"{server.url}/", "prm", system="Be strict.")
        assert isinstance(scorer, StepScorer) and isinstance(scorer, Counting)
        assert scorer.score([RESPONSE]) == [pytest.approx([0.11, 0.11])]
        (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/pooling")
    assert "Authorization" not in request.headers
    assert request.json() == {
        "model": "prm",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "2 + 2 + 2?"},
            {"role": "assistant", "content": "2 + 2 is 4.<extra_0>4 + 2 is 6.<extra_0>"},
        ],
    }


def test_many_responses_keep_their_order_and_come_at_once():
    gate = threading.Barrier(3)

    def three_together(before, request):
        gate.wait(10)
        return by_length(before, request)

    responses = [SteppedResponse("q", ("x" * i,) * (i % 3 + 1)) for i in range(1, 10)]
    with serving(three_together) as server:
        scores = VllmStepScorer(server.url, "prm", concurrency=3).score(responses)
    assert scores == [pytest.approx([i / 100] * (i % 3 + 1)) for i in range(1, 10)]


def test_nothing_is_asked_of_a_response_without_steps():
    with serving(by_length) as server:
        scorer = VllmStepScorer(server.url, "prm")
        assert scorer.score([SteppedResponse("q", ())]) == [[]]
        assert scorer.score([]) == []
        assert not server.requests


def test_control_tokens_in_a_step_are_broken_and_the_key_is_sent(monkeypatch):
    monkeypatch.setenv("PRM_KEY", "very-secret")
    sly = SteppedResponse("<|im_end|> q", ("a<step>b", "c<|im_end|>"))
    with serving(always(pooled([0.5, 0.5], [0.25, 0.75]))) as server:
        scorer = VllmStepScorer(server.url, "prm", step_token="<step>", api_key_env="PRM_KEY")
        assert scorer.score([sly]) == [[0.5, 0.75]]
        (request,) = server.requests
    assert request.headers["Authorization"] == "Bearer very-secret"
    assert request.json()["messages"] == [
        {"role": "user", "content": "< |im_end|> q"},
        {"role": "assistant", "content": "a< step>b<step>c< |im_end|><step>"},
    ]


TOO_LONG = answer({"error": {"message": "maximum context length is 4096 tokens"}}, 400)
NOT_A_NUMBER = answer(pooled([0.5, None], [0.5, 0.5]))
TOO_LARGE = answer(pooled([0.5, 10**400], [0.5, 0.5]))
NO_ROWS = answer({"error": {"message": "busy"}})


@pytest.mark.parametrize(
    ("reply", "requests"),
    [(TOO_LONG, 1), (NOT_A_NUMBER, 2), (TOO_LARGE, 2), (NO_ROWS, 2), (answer({}, 503), 2)],
)
def test_a_response_without_an_answer_has_no_scores_and_is_counted(reply, requests):
    with serving(in_turn(answer(pooled([0.1, 0.9], [0.2, 0.8])), reply)) as server:
        scorer = VllmStepScorer(server.url, "prm", tries=2, concurrency=1)
        scores = scorer.score([RESPONSE, RESPONSE])
        assert len(server.requests) == 1 + requests
    assert scores[0] == [0.9, 0.8]
    assert len(scores[1]) == 2 and all(math.isnan(x) for x in scores[1])
    assert scorer.counts == {"prm/failed": 1}


def test_a_passing_failure_is_tried_again():
    with serving(in_turn(NO_ROWS, answer(pooled([0.1, 0.9], [0.2, 0.8])))) as server:
        assert VllmStepScorer(server.url, "prm").score([RESPONSE]) == [[0.9, 0.8]]


def test_a_server_that_never_answered_stops_the_run():
    with pytest.raises(ToolError, match=r"no response could be scored: .*127.0.0.1:1/pooling"):
        VllmStepScorer(UNREACHABLE, "prm", tries=1).score([RESPONSE])


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (answer({}, 404), ToolError, "check its address, key and model"),
        (answer({"error": {"code": "insufficient_quota"}}, 429), QuotaError, "used up"),
        (answer(pooled([0.1, 0.9])), ToolError, r"shape \(1, 2\) for 2 steps"),
        (answer(pooled()), ToolError, r"shape \(0,\) for 2 steps.*step token is <extra_0>"),
        (answer(pooled([0.4], [0.5])), ToolError, r"shape \(2, 1\)"),
        (answer(pooled([0.1, 0.9], [-2.0, 3.0])), ToolError, "not two probabilities"),
        (answer(pooled([0.1, 0.9], [0.3, 0.9])), ToolError, "not two probabilities"),
    ],
)
def test_a_server_of_another_kind_is_one_clear_line(reply, error, message):
    with serving(in_turn(reply)) as server, pytest.raises(error, match=message) as caught:
        VllmStepScorer(server.url, "prm").score([RESPONSE])
    assert "\n" not in str(caught.value)


def test_recorded_scores_need_no_server_and_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("PRM_KEY", "k")
    settings = {"model": "prm", "api_key_env": "PRM_KEY"}
    with serving(by_length) as server:
        store = CallStore(tmp_path / "calls.sqlite")
        recorded = VllmStepScorer(server.url, **settings, store=store).score([RESPONSE])
        url = server.url
    monkeypatch.delenv("PRM_KEY")
    store = CallStore(tmp_path / "calls.sqlite", "strict")
    assert VllmStepScorer(url, **settings, store=store).score([RESPONSE]) == recorded
