import json
import os
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import requests

from tests.retrievers.served import HALF_A_PAIR, Served, documents, served, wait_for

PAGES = [
    {"url": "http://wiki/index.php?title=Oak", "contents": "Oak\nA tree.", "extra": 1},
    {"url": "http://wiki/Elm", "contents": "first"},
    {"url": "http://wiki/Elm", "contents": "second"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    pages = directory / "pages.jsonl"
    pages.write_text("\n\n".join(map(json.dumps, PAGES)))
    limits = {"max_topk": 20, "max_queries": 8, "max_query_chars": 300, "max_body_bytes": 20_000}
    with served(directory, pages=str(pages), workers=2, **limits) as running:
        yield running


def expected(query, topk, scores=True):
    found = [asdict(document) for document in documents(query, topk)]
    hits = [({k: d[k] for k in ("id", "contents", "url")}, d["score"]) for d in found]
    return [{"document": d, "score": s} if scores else d for d, s in hits]


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_every_query_has_its_hits_in_order_with_scores_and_without(server, scores, count):
    queries = ["oak", "only 1 elm", "only 0 fir"][:count]
    answer = server.retrieve(*queries, topk=4, scores=scores)
    assert answer == [expected(query, 4, scores) for query in queries]


@pytest.mark.parametrize("fields", [{}, {"topk": None}, {"topk": 0}, {"topk": 3}])
def test_topk_is_3_where_nothing_else_is_asked_for_and_strange_keys_are_ignored(server, fields):
    body = {"queries": ["oak"], "return_scores": True, "topk_rerank": 9, **fields}
    assert server.post("/retrieve", body).json() == {"result": [expected("oak", 3)]}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b'{"queries": [], "topk": NaN}', 400, "not valid JSON"),
        ([], 400, "must be a JSON object, found list"),
        ({}, 422, "queries must be a list of strings"),
        ({"queries": "oak"}, 422, "queries must be a list of strings"),
        ({"queries": ["oak", 1]}, 422, "queries must be a list of strings"),
        ({"queries": ["oak"], "topk": "3"}, 422, "topk must be a whole number"),
        ({"queries": ["oak"], "topk": 2.5}, 422, "topk must be a whole number"),
        ({"queries": ["oak"], "topk": True}, 422, "topk must be a whole number"),
        ({"queries": ["oak"], "topk": -1}, 422, "topk must be a whole number"),
        ({"queries": ["oak"], "topk": 21}, 422, "topk is 21, at most 20"),
        ({"queries": ["oak"], "return_scores": "yes"}, 422, "return_scores must be true or false"),
        ({"queries": ["oak"] * 9}, 422, "9 queries, at most 8"),
        ({"queries": ["oak", "a" * 301]}, 422, "queries[1] has 301 characters, at most 300"),
        ({"queries": ["oak"], "topk": 10**30}, 4, ""),
    ],
)
def test_a_wrong_body_is_refused_in_one_line_of_json(server, body, status, message):
    reply = server.post("/retrieve", body)
    assert str(reply.status_code).startswith(str(status))
    assert reply.headers["content-type"] == "application/json"
    [(key, line)] = reply.json().items()
    assert key == "error" and message in line and "\n" not in line
    assert server.retrieve("oak") == [expected("oak", 2)]


def test_half_a_surrogate_pair_fails_neither_its_query_nor_the_others(server):
    body = rb'{"queries": ["only 1 elm", "\ud800 oak", "\ud83c\udf33"], "return_scores": true}'
    queries = ["only 1 elm", "? oak", "\N{DECIDUOUS TREE}"]
    reply = server.post("/retrieve", body)
    assert reply.status_code == 200
    assert reply.json() == {"result": [expected(query, 3) for query in queries]}
    broken = server.post("/retrieve", rb'{"queries": ["\ud800"]' + b"[" * 9_000)
    assert broken.status_code == 400 and "not valid JSON" in broken.json()["error"]


def test_a_body_over_the_limit_is_refused_whether_or_not_it_says_its_length(server):
    body = json.dumps({"queries": ["oak"], "padding": "x" * 3_000_000}).encode()
    assert server.post("/retrieve", body).status_code == 413
    pieces = (body[start : start + 1000] for start in range(0, len(body), 1000))
    reply = requests.post(server.url + "/retrieve", data=pieces, timeout=60)
    assert reply.status_code == 413
    assert reply.json() == {"error": "the body is longer than 20000 bytes"}


def test_what_a_request_may_hold_at_most_is_taken(server):
    queries = ["oak"] * 7 + ["a" * 300]
    answer = server.retrieve(*queries, topk=20)
    assert answer == [expected(query, 20) for query in queries]
    body = json.dumps({"queries": ["oak"], "padding": ""})
    reply = server.post("/retrieve", body.replace('""', f'"{"x" * (20_000 - len(body))}"').encode())
    assert reply.json() == {"result": [expected("oak", 3, scores=False)]}


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("POST", "/", 404), ("GET", "/retrieve", 405)]
)
def test_other_paths_and_methods_are_answered_in_json(server, method, path, status):
    reply = requests.request(method, server.url + path, timeout=60)
    assert reply.status_code == status
    assert f"{method} {path}" in reply.json()["error"]


def test_a_bug_in_a_search_is_that_request_s_only(server):
    reply = server.post("/retrieve", {"queries": ["oak", "broken"]})
    assert reply.status_code == 500
    assert reply.json() == {"error": "ZeroDivisionError: a bug in the retriever"}
    assert server.retrieve("oak") == [expected("oak", 2)]


@pytest.mark.parametrize(
    ("query", "status", "wait"),
    [
        ("fail bad_arguments", 422, None),
        ("fail no_result", 422, None),
        ("fail rate_limit", 503, "1"),
        ("fail transient", 502, None),
        ("used up", 402, None),
    ],
)
def test_what_fails_behind_the_server_keeps_its_kind(server, query, status, wait):
    reply = server.post("/retrieve", {"queries": [query]})
    assert (reply.status_code, reply.headers.get("Retry-After")) == (status, wait)
    assert reply.json() == {"error": "behind the server"}


def test_text_that_is_no_unicode_arrives(server):
    assert server.retrieve("half", scores=False) == [[{"id": "half", "contents": HALF_A_PAIR}]]


def test_pages_by_address_null_where_there_is_none(server):
    urls = ["http://wiki/Elm", "http://wiki/none", "http://wiki/index.php/Oak"]
    reply = server.post("/access", {"urls": urls})
    assert reply.json() == {"result": [PAGES[2], None, PAGES[0]]}
    assert server.post("/access", {"urls": "http://wiki/Elm"}).status_code == 422
    assert server.post("/access", {"urls": urls * 3}).status_code == 422


def test_a_page_file_that_is_cut_while_it_is_served_ends_no_server(tmp_path):
    pages = tmp_path / "pages.jsonl"
    pages.write_text("\n".join(map(json.dumps, PAGES)))
    with served(tmp_path, pages=str(pages)) as server:
        assert server.get("/ready").status_code == 200
        os.truncate(pages, 0)
        reply = server.post("/access", {"urls": ["http://wiki/Elm"]})
        assert reply.status_code == 500
        assert "pages.jsonl: has changed since it was opened" in reply.json()["error"]
        assert server.retrieve("oak") == [expected("oak", 2)]


def test_health_says_what_is_served(server):
    state = server.get("/health").json()
    assert (state["status"], state["ready"]) == ("ok", True)
    assert state["serves"]["index"] == "steered"
    assert server.get("/ready").status_code == 200


def test_many_clients_get_what_the_retriever_finds(server):
    rng = random.Random(0)
    asked = [
        ([f"word {rng.randrange(9)}" for _ in range(rng.randrange(1, 8))], rng.randrange(1, 20))
        for _ in range(300)
    ]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda one: server.retrieve(*one[0], topk=one[1]), asked))
    assert answers == [[expected(query, topk) for query in queries] for queries, topk in asked]


def test_metrics_count_what_happened(tmp_path):
    with served(tmp_path) as server:
        server.retrieve("oak", "only 0", topk=5)
        server.post("/retrieve", b"{")
        server.get("/elsewhere")
        metrics = server.metrics()
        assert metrics['graphpo_requests_total{path="/retrieve",status="200"}'] == 1
        assert metrics['graphpo_requests_total{path="/retrieve",status="400"}'] == 1
        assert metrics['graphpo_requests_total{path="other",status="404"}'] == 1
        assert metrics['graphpo_request_seconds_count{path="/retrieve"}'] == 2
        assert metrics["graphpo_queries_total"] == 2
        assert metrics["graphpo_queries_without_hit_total"] == 1
        assert metrics["graphpo_hits_total"] == 5
        assert metrics["graphpo_waiting_queries"] == metrics["graphpo_unanswered_requests"] == 0
        assert server.post("/access", {"urls": []}).status_code == 404


def test_waiting_requests_are_searched_together_and_fail_alone(tmp_path):
    gate = tmp_path / "gate"
    with served(tmp_path, workers=1, max_batch=4) as server, ThreadPoolExecutor(9) as threads:
        first = threads.submit(server.retrieve, f"wait {gate}")
        server.wait_until("graphpo_batch_queries_count", 1)
        body = {"queries": ["broken"], "topk": 2}
        bad = threads.submit(server.post, "/retrieve", body)
        server.wait_until("graphpo_waiting_queries", 1)
        good = [threads.submit(server.retrieve, f"oak {n}") for n in range(6)]
        server.wait_until("graphpo_waiting_queries", 7)
        gate.touch()
        assert first.result() == [expected(f"wait {gate}", 2)]
        assert bad.result().status_code == 500
        assert [f.result() for f in good] == [[expected(f"oak {n}", 2)] for n in range(6)]
        metrics = server.metrics()
        assert metrics["graphpo_batch_queries_sum"] == 8
        assert metrics["graphpo_batch_queries_count"] == 3  # 1, then 4 and 3


def test_requests_with_different_topk_or_more_queries_than_a_batch_come_out_right(tmp_path):
    gate = tmp_path / "gate"
    with served(tmp_path, workers=1, max_batch=4) as server, ThreadPoolExecutor(9) as threads:
        first = threads.submit(server.retrieve, f"wait {gate}")
        server.wait_until("graphpo_batch_queries_count", 1)
        asked = [([f"oak {n}" for n in range(count)], count) for count in (1, 2, 11, 2)]
        rest = [threads.submit(server.retrieve, *queries, topk=k) for queries, k in asked]
        server.wait_until("graphpo_waiting_queries", 16)
        gate.touch()
        first.result()
        for (queries, topk), answer in zip(asked, rest, strict=True):
            assert answer.result() == [expected(query, topk) for query in queries]


def test_a_full_queue_answers_503_at_once_and_takes_requests_again_later(tmp_path):
    gate = tmp_path / "gate"
    with served(tmp_path, queue=2, workers=1) as server, ThreadPoolExecutor(2) as threads:
        held = [threads.submit(server.retrieve, f"wait {gate}") for _ in range(2)]
        server.wait_until("graphpo_unanswered_requests", 2)
        reply = server.post("/retrieve", {"queries": ["oak"]})
        assert reply.status_code == 503
        assert int(reply.headers["Retry-After"]) >= 1
        assert reply.json() == {"error": "busy: 2 requests are unanswered"}
        assert server.get("/ready").status_code == 200
        gate.touch()
        for each in held:
            each.result()
        assert server.retrieve("oak") == [expected("oak", 2)]


def test_a_search_over_its_deadline_is_given_up_and_one_that_was_not_begun_never_is(tmp_path):
    gate = tmp_path / "gate"
    with served(tmp_path, workers=1, deadline_s=0.2) as server:
        assert server.post("/retrieve", {"queries": [f"wait {gate}"]}).status_code == 504
        assert server.post("/retrieve", {"queries": ["broken"]}).status_code == 504
        gate.touch()
        assert server.retrieve("oak") == [expected("oak", 2)]
        assert server.metrics()["graphpo_batch_queries_sum"] == 2


def test_the_port_is_open_while_the_index_is_loaded_and_the_ready_file_comes_after(tmp_path):
    gate, port = tmp_path / "gate", free_port()
    with served(tmp_path, loading_gate=str(gate), port=port) as server:
        url = f"http://127.0.0.1:{port}"
        state = until_connected(url + "/health").json()
        assert (state["status"], state["ready"]) == ("ok", False)
        assert not server.ready_file.exists()
        for reply in (
            requests.get(url + "/ready", timeout=60),
            requests.post(url + "/retrieve", json={"queries": ["oak"]}, timeout=60),
        ):
            assert reply.status_code == 503
            assert reply.headers["Retry-After"]
            assert "still being loaded" in reply.json()["error"]
        gate.touch()
        assert wait_for(server.ready_file) == f"127.0.0.1:{port}"
        assert server.retrieve("oak") == [expected("oak", 2)]


def test_a_ready_file_that_a_killed_server_left_goes_before_the_next_answers(tmp_path):
    port, left = free_port(), tmp_path / "left"
    left.write_text("127.0.0.1:1")
    with served(tmp_path, loading_gate=str(tmp_path / "never"), port=port, ready_file=str(left)):
        until_connected(f"http://127.0.0.1:{port}/health")
        assert not left.exists()


def test_a_server_leaves_the_ready_file_of_its_successor_alone(tmp_path):
    with served(tmp_path) as server:
        server.retrieve("oak")
        server.ready_file.write_text("127.0.0.1:1")
        assert server.stop() == 0
        assert server.ready_file.read_text() == "127.0.0.1:1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_ends_with_status_0(tmp_path, number):
    gate = tmp_path / "gate"
    with served(tmp_path, workers=1) as server, ThreadPoolExecutor(2) as threads:
        held = [threads.submit(server.retrieve, f"wait {gate}", f"oak {n}") for n in range(2)]
        server.wait_until("graphpo_unanswered_requests", 2)
        url = server.url
        server.process.send_signal(number)
        until_refused(url)
        gate.touch()
        for n, each in enumerate(held):
            assert each.result() == [expected(f"wait {gate}", 2), expected(f"oak {n}", 2)]
        out, errors = server.process.communicate(timeout=60)
        assert (server.process.returncode, errors) == (0, "")
        assert out == f"serving on {url}\n"
        assert not server.ready_file.exists()


def test_a_signal_while_loading_ends_with_status_0(tmp_path):
    port = free_port()
    with served(tmp_path, loading_gate=str(tmp_path / "never"), port=port) as server:
        until_connected(f"http://127.0.0.1:{port}/health")
        assert server.stop() == 0


def test_a_second_signal_does_not_wait_for_a_search(tmp_path):
    gate = tmp_path / "never"
    with served(tmp_path, workers=1) as server, ThreadPoolExecutor(1) as threads:
        held = threads.submit(server.post, "/retrieve", {"queries": [f"wait {gate}"]})
        server.wait_until("graphpo_unanswered_requests", 1)
        url = server.url
        server.process.send_signal(signal.SIGTERM)
        until_refused(url)
        assert server.stop() == 0
        assert (held.result().status_code, server.process.communicate()[1]) == (503, "")


def outcome(directory, **options):
    process = Served(directory, **options).process
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def test_what_cannot_be_served_is_one_line_and_status_2(tmp_path, server):
    port = int(server.url.rsplit(":", 1)[1])
    (tmp_path / "pages.jsonl").write_text('{"url": "http://a", "contents": "a"}\n{"url": 3}\n')
    cases = {
        f"cannot listen on 127.0.0.1:{port} ": {"port": port},
        "cannot listen on 127.0.0.1:99999 ": {"port": 99999},
        f"cannot listen on {'ö' * 64}:0 ": {"host": "ö" * 64},
        "server: host is empty; 0.0.0.0 lets other machines in": {"host": ""},
        "server: workers must be a whole number of at least 1": {"workers": 0},
        "server: queue must be a whole number of at least 1": {"queue": 0},
        "server: max_queries must be a whole number of at least 1": {"max_queries": 0},
        "server: topk is 101, more than max_topk, 100": {"topk": 101},
        "server: deadline_s must be a number above 0": {"deadline_s": -1.0},
        "the index has gone": {"loading_fails": "the index has gone"},
        "pages.jsonl:2: field 'url' must be a string": {"pages": str(tmp_path / "pages.jsonl")},
        "none.jsonl: cannot be read": {"pages": str(tmp_path / "none.jsonl")},
        "ready: there is no directory": {  # before the index is loaded
            "ready_file": str(tmp_path / "no" / "ready"),
            "loading_fails": "the index has gone",
        },
    }
    for message, options in cases.items():
        status, errors = outcome(tmp_path, **options)
        assert (status, errors.count("\n")) == (2, 1), errors
        assert message in errors
        assert not (tmp_path / "ready").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until_connected(url):
    end = time.monotonic() + 60  # a server that has died answers nobody
    while True:
        try:
            return requests.get(url, timeout=60)
        except requests.ConnectionError:
            if time.monotonic() > end:
                raise


def until_refused(url):
    while True:
        try:
            requests.get(url + "/health", timeout=60)
        except requests.ConnectionError:
            return
