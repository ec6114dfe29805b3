import hashlib
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.store import CallStore
from graphpo_agent.protocols import PageReader, Retriever
from graphpo_agent.types import Document
from retrievers import failover
from retrievers.remote import RemotePages, RemoteRetriever
from retrievers.together import PartlyFailed
from tests.retrievers.canned import canned
from tests.retrievers.served import HALF_A_PAIR, documents, served

OAK = '"Oak"\nA tree.'
OAK_ID = hashlib.sha256(OAK.encode()).hexdigest()[:16]
HALF_ID = hashlib.sha256(HALF_A_PAIR.encode(errors="surrogatepass")).hexdigest()[:16]


def answers(*results, status=200):
    return lambda asked: (status, {"result": list(results)})


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ([], []),
        ([{"document": {"id": "7", "contents": OAK}, "score": 2}], [Document("7", OAK, 2.0)]),
        ([{"document": {"id": 7, "contents": OAK}, "score": None}], [Document("7", OAK)]),
        ([{"document": {"id": 7, "contents": OAK}, "score": 10**400}], [Document("7", OAK)]),
        ([{"document": {"contents": OAK}}], [Document(OAK_ID, OAK)]),
        ([{"id": "7", "contents": OAK, "url": "u"}], [Document("7", OAK, url="u")]),
        ([OAK], [Document(OAK_ID, OAK)]),
        ([{"document": OAK, "score": 0.5}], [Document(OAK_ID, OAK, 0.5)]),
        ([None, {"document": None}, OAK], [Document(OAK_ID, OAK)]),
        ([{"document": {"id": "", "title": '"Oak"', "text": "A tree."}}], [Document(OAK_ID, OAK)]),
        ([{"title": "Oak", "text": "A tree.", "id": "1"}], [Document("1", OAK)]),
        ([{"title": "Oak", "text": "x", "contents": OAK, "id": "1"}], [Document("1", OAK)]),
        ([{"text": OAK, "id": "1"}], [Document("1", OAK)]),
        ([{"contents": OAK, "id": "1", "url": 3}], [Document("1", OAK)]),
        ([HALF_A_PAIR], [Document(HALF_ID, HALF_A_PAIR)]),
        (f"\n{OAK}\n", [Document(OAK_ID, OAK)]),
        ("", []),
        ("No search results found.", []),
    ],
)
def test_every_shape_of_a_result_is_read(element, expected):
    with canned(answers(element, [OAK])) as server:
        found = RemoteRetriever(server.url).search(["oak", "elm"], topk=3)
    assert found == [expected, [Document(OAK_ID, OAK)]]
    [asked] = server.asked
    assert (asked.method, asked.path) == ("POST", "/retrieve")
    assert asked.body == {"queries": ["oak", "elm"], "topk": 3, "return_scores": True}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ({"result": [[OAK]]}, "answered 1 results, 2 were asked for"),
        ({"result": [[OAK]] * 3}, "answered 3 results, 2 were asked for"),
        ({"results": []}, "answered no list 'result'"),
        ([[OAK], [OAK]], "answered no list 'result'"),
        ({"result": [[3], []]}, "unknown shape: 3"),
        ({"result": [[{"score": 1}], []]}, "unknown shape"),
        ({"result": [[{"document": {"text": 3}}], []]}, "unknown shape"),
        ({"result": [{"contents": OAK}, []]}, "unknown shape"),
        ({"result": [None, []]}, "unknown shape"),
    ],
)
def test_another_shape_is_a_wrong_address_and_is_named(reply, message):
    with canned(lambda asked: (200, reply)) as server, pytest.raises(ToolError) as caught:
        RemoteRetriever(server.url).search(["oak", "elm"], topk=3)
    assert message in str(caught.value)
    assert server.url in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "bad_arguments"), (422, "bad_arguments"), (503, "transient")]
)
def test_an_error_names_the_status_and_the_body(status, kind):
    with (
        canned(lambda asked: (status, {"error": "topk is 500"})) as server,
        pytest.raises(CallFailed, match=rf"{server.url}/retrieve.*{status}.*topk is 500") as caught,
    ):
        RemoteRetriever(server.url, tries=1).search(["oak"], topk=500)
    assert caught.value.kind == kind


def test_an_address_without_a_retrieval_server_stops_the_run():
    with canned(lambda asked: (404, b"nothing here")) as server:
        with pytest.raises(ToolError, match=r"404.*what urls of the (retriever|pages) names"):
            RemoteRetriever(server.url).search(["oak"], topk=1)
        with pytest.raises(ToolError, match=r"404.*what urls of the (retriever|pages) names"):
            RemoteRetriever([server.url, server.url]).search(["oak"], topk=1)
    assert len(server.asked) == 2


def test_a_failure_inside_the_server_is_no_empty_result():
    with (
        canned(answers("\nSearch failed for query: oak")) as server,
        pytest.raises(CallFailed, match="Search failed for query: oak") as caught,
    ):
        RemoteRetriever(server.url).search(["oak"], topk=1)
    assert caught.value.kind == "transient"


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/retrieve", "HOST:PORT"])
def test_every_spelling_of_an_address(form):
    with canned(answers([OAK])) as server:
        url = server.url.removeprefix("http://") if form == "HOST:PORT" else form.format(server.url)
        RemoteRetriever(url).search(["oak"], topk=1)
        RemoteRetriever(server.url + "/other/path").search(["oak"], topk=1)
    assert [asked.path for asked in server.asked] == ["/retrieve", "/other/path"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"urls": []},
        {"urls": ""},
        {"urls": ["127.0.0.1:8000", "ftp://host"]},
        {"urls": "http://host:port"},
        {"urls": "host", "batch_size": 0},
        {"urls": "host", "concurrency": 0},
        {"urls": "host", "tries": 0},
        {"urls": ["host", "other"], "tries": 0},
        {"urls": "host", "deadline_s": 0},
    ],
)
def test_settings_that_cannot_be_used_are_refused(arguments):
    with pytest.raises(ToolError):
        RemoteRetriever(**arguments)


def echo(asked):
    return 200, {"result": [[{"id": query, "contents": query}] for query in asked.body["queries"]]}


def test_queries_are_asked_in_batches_once_each_and_come_back_in_order():
    queries = [f"query {number % 70}" for number in range(100)]
    with canned(echo) as server:
        retriever = RemoteRetriever(server.url, batch_size=16, concurrency=4)
        found = retriever.search(queries, topk=1)
        assert retriever.search([], topk=1) == []
    assert found == [[Document(query, query)] for query in queries]
    sizes = sorted(len(asked.body["queries"]) for asked in server.asked)
    assert sizes == [6, 16, 16, 16, 16]


def test_a_batch_that_fails_does_not_cost_the_others_their_answers():
    def answer(asked):
        return (500, b"broken") if "b" in asked.body["queries"] else echo(asked)

    with canned(answer) as server, pytest.raises(PartlyFailed, match="500: broken") as caught:
        RemoteRetriever(server.url, tries=1, batch_size=1).search(["a", "b", "a"], topk=1)
    first, second, third = caught.value.answers
    assert first == third == [Document("a", "a")]
    assert isinstance(second, CallFailed)


def test_a_query_that_the_server_refuses_or_fails_at_costs_the_others_of_its_request_nothing():
    def answer(asked):
        queries = asked.body["queries"]
        if "long" in queries:
            return 422, b"too long"
        return 200, {
            "result": [[q] if q != "down" else f"Search failed for query: {q}" for q in queries]
        }

    queries = ["a", "b", "long", "c", "down", "d", "a"]
    with canned(answer) as server, pytest.raises(PartlyFailed, match="422: too long") as caught:
        RemoteRetriever(server.url, tries=1).search(queries, topk=1)
    found = dict(zip(queries, caught.value.answers, strict=True))
    kinds = {query: each.kind for query, each in found.items() if isinstance(each, CallFailed)}
    assert kinds == {"long": "bad_arguments", "down": "transient"}
    assert {query: found[query][0].contents for query in "abcd"} == {q: q for q in "abcd"}


def test_one_refused_query_of_many_costs_few_requests():
    def answer(asked):
        return (422, b"too long") if "17" in asked.body["queries"] else echo(asked)

    with canned(answer) as server, pytest.raises(PartlyFailed):
        RemoteRetriever(server.url).search([str(number) for number in range(64)], topk=1)
    assert len(server.asked) == 13  # all, then both halves of what was refused, six times


def test_a_request_that_fails_is_not_taken_apart():
    with canned(lambda asked: (500, b"broken")) as server, pytest.raises(PartlyFailed):
        RemoteRetriever(server.url, tries=1).search(["a", "b"], topk=1)
    assert len(server.asked) == 1


def test_a_server_that_gives_more_than_topk_is_cut():
    with canned(answers([OAK, "b", "c"])) as server:
        assert len(RemoteRetriever(server.url).search(["oak"], topk=2)[0]) == 2


def test_a_query_with_half_a_surrogate_pair_can_be_asked():
    with canned(echo) as server:
        found = RemoteRetriever(server.url).search([f"oak {HALF_A_PAIR}", "oak ?"], topk=1)
    assert found == [[Document("oak ?", "oak ?")]] * 2


@pytest.mark.parametrize("servers", [1, 2])
def test_a_passing_failure_is_tried_again(servers):
    replies = iter([(503, b"busy"), (200, b"{"), (200, {"result": [[OAK]]})])
    with canned(lambda asked: next(replies)) as server:
        retriever = RemoteRetriever([server.url] * servers, tries=3)
        assert retriever.search(["oak"], topk=1) == [[Document(OAK_ID, OAK)]]


def test_a_failure_inside_the_server_is_not_recorded(tmp_path):
    replies = iter([["Search failed for query: oak"], [[OAK]]])
    with canned(lambda asked: (200, {"result": next(replies)})) as server:
        retriever = RemoteRetriever(server.url, store=CallStore(tmp_path / "calls.sqlite"))
        with pytest.raises(CallFailed, match="Search failed"):
            retriever.search(["oak"], topk=1)
        assert retriever.search(["oak"], topk=1) == [[Document(OAK_ID, OAK)]]


def test_an_address_with_a_password_is_refused_without_showing_it():
    for url in ("http://me:hunter2-secret@host:8000", "me:hunter2-secret@host:8000"):
        with pytest.raises(ToolError, match="is no address") as caught:
            RemoteRetriever(url)
        assert "hunter2" not in str(caught.value)


def test_a_store_answers_for_servers_that_are_gone_whatever_was_asked_together(tmp_path):
    with canned(echo) as server:
        urls = [server.url, server.url + "/retrieve"]
        retriever = RemoteRetriever(urls, store=CallStore(tmp_path / "calls.sqlite"))
        first = retriever.search(["oak", "elm", "fir"], topk=1)
        assert len(server.asked) == 3
    store = CallStore(tmp_path / "calls.sqlite", "strict")
    strict = RemoteRetriever("localhost:1", store=store)  # the address makes no difference
    assert strict.search(["fir"], topk=1) == first[2:]
    assert strict.search(["elm", "oak"], topk=1) == first[1::-1]
    for queries, topk in ((["oak"], 2), (["ash"], 1)):
        with pytest.raises(ToolError, match="no answer is stored"):
            strict.search(queries, topk)


def test_a_server_that_fails_is_left_alone_and_the_other_answers():
    with canned(lambda asked: (500, b"broken index")) as bad, canned(echo) as good:
        retriever = RemoteRetriever([bad.url, good.url])
        for number in range(10):
            assert retriever.search([str(number)], topk=1)[0][0].id == str(number)
    assert len(good.asked) == 10
    assert len(bad.asked) < 5  # at the start, and perhaps once after each rest


@pytest.mark.parametrize(
    "wrong",
    [
        (404, b"nothing here"),
        (401, b"who are you"),
        (200, {"detail": "a proxy"}),
        (200, {"result": [None]}),
        (200, {"result": [[{"score": 1}]]}),
        (200, {"result": []}),
    ],
)
def test_what_is_no_retrieval_server_is_left_alone_where_there_is_one(wrong, tmp_path):
    with canned(lambda asked: wrong) as bad, canned(echo) as good:
        for store in (None, CallStore(tmp_path / "calls.sqlite")):
            retriever = RemoteRetriever([bad.url, good.url], store=store)
            with pytest.warns(UserWarning, match=f"{bad.url}.*; asking the others"):
                found = [retriever.search([str(number)], topk=1) for number in range(4)]
            assert [hits[0].id for [hits] in found] == ["0", "1", "2", "3"]
        assert bad.asked
        retriever = RemoteRetriever([bad.url, bad.url.replace("127.0.0.1", "localhost")])
        with pytest.raises(ToolError):
            retriever.search(["oak"], topk=1)
    with canned(lambda asked: wrong) as bad, canned(lambda asked: (500, b"down")) as down:
        retriever = RemoteRetriever([bad.url, down.url], tries=3)
        with pytest.raises(CallFailed):  # an outage: the other may come back
            retriever.search(["oak"], topk=1)


def test_requests_are_paced():
    with canned(echo) as server:
        retriever = RemoteRetriever(server.url, per_second=10, batch_size=1)
        started = time.monotonic()
        retriever.search([str(number) for number in range(5)], topk=1)
        assert time.monotonic() - started >= 0.4
    with pytest.raises(ToolError, match="per_second"):
        RemotePages(server.url, per_second=0)


def test_when_all_servers_fail_the_last_failure_is_reported():
    with canned(lambda asked: (500, b"one")) as one, canned(lambda asked: (502, b"two")) as two:
        retriever = RemoteRetriever([one.url, two.url], tries=3)
        with pytest.raises(CallFailed, match=r"HTTP 50[02]: (one|two)"):
            retriever.search(["oak"], topk=1)
    assert len(one.asked) + len(two.asked) == 3


def test_a_server_that_hangs_leaves_time_for_the_other():
    never = threading.Event()

    def hang(asked):
        never.wait()
        return 500, b""

    with canned(hang) as hung, canned(echo) as good:
        retriever = RemoteRetriever([hung.url, good.url], deadline_s=1.0)
        for number in range(2):
            assert retriever.search([str(number)], topk=1) == [[Document(str(number), str(number))]]
        never.set()
    assert hung.asked


def test_a_question_that_waited_for_its_turn_fails_over_too():
    broken = threading.Event()

    def slow(asked):
        time.sleep(0.2)
        return echo(asked)

    def breaking(asked):
        return (503, b"down") if broken.is_set() else slow(asked)

    with canned(slow) as good, canned(breaking) as bad, ThreadPoolExecutor(12) as threads:
        retriever = RemoteRetriever([good.url, bad.url], deadline_s=2.0, concurrency=1)
        names = [str(number) for number in range(12)]
        found = [threads.submit(retriever.search, [name], 1) for name in names]
        found[2].result()
        broken.set()
        assert [each.result()[0][0].id for each in found] == names


def test_servers_that_are_all_down_are_asked_until_the_deadline(monkeypatch):
    monkeypatch.setattr(failover, "_FIRST_WAIT_S", 0.2)
    monkeypatch.setattr(failover.random, "uniform", lambda low, high: high)
    back = time.monotonic() + 2.0  # asked after 0, 0.2, 0.6, 1.4 and 3 s

    def restarted(asked):
        return (503, b"starting") if time.monotonic() < back else echo(asked)

    with canned(restarted) as one, canned(restarted) as two:
        retriever = RemoteRetriever([one.url, two.url], deadline_s=4.5)
        assert retriever.search(["oak"], 1)[0][0].id == "oak"


def search_all(retriever, count):
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda n: retriever.search([f"oak {n}"], 2)[0], range(count)))


def expected(count):
    return [documents(f"oak {number}", 2) for number in range(count)]


def test_clients_fail_over_to_the_other_server_and_come_back(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    with served(tmp_path / "a") as first, served(tmp_path / "b") as second:
        urls = [first.url, second.url]
        retriever = RemoteRetriever(urls)
        assert search_all(retriever, 50) == expected(50)
        assert all(each.metrics()["graphpo_queries_total"] > 0 for each in (first, second))
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        assert search_all(retriever, 50) == expected(50)
        port = int(urls[0].rsplit(":", 1)[1])
        with served(tmp_path / "a", port=port) as again:
            while again.url and again.metrics()["graphpo_queries_total"] == 0:
                assert search_all(retriever, 10) == expected(10)


def test_one_server_that_is_killed_and_restarted_loses_no_search(tmp_path):
    gate = tmp_path / "never"
    with served(tmp_path, workers=1) as server, ThreadPoolExecutor(9) as threads:
        url = server.url
        retriever = RemoteRetriever(url)
        held = threads.submit(server.post, "/retrieve", {"queries": [f"wait {gate}"]})
        server.wait_until("graphpo_unanswered_requests", 1)
        waiting = [threads.submit(retriever.search, [f"oak {n}"], 2) for n in range(5)]
        server.wait_until("graphpo_unanswered_requests", 6)
        server.stop(signal.SIGKILL)
        assert held.exception() is not None
        with served(tmp_path, port=int(url.rsplit(":", 1)[1])):
            assert [each.result()[0] for each in waiting] == expected(5)


PAGES = [{"url": "http://wiki/oak", "contents": OAK}, {"url": "http://wiki/void", "contents": " "}]


def test_pages_come_from_a_server_s_access(tmp_path):
    (tmp_path / "pages.jsonl").write_text("\n".join(map(json.dumps, PAGES)))
    with served(tmp_path, pages=str(tmp_path / "pages.jsonl")) as server:
        pages = RemotePages(server.url)
        url = "http://wiki/oak"
        assert pages.read(url) == Document(id=url, contents=OAK, url=url)
        for missing in ("http://wiki/elm", "http://wiki/void"):
            with pytest.raises(CallFailed, match=f"there is no page {missing}") as caught:
                pages.read(missing)
            assert caught.value.kind == "no_result"


@pytest.mark.parametrize("page", [OAK, {"contents": OAK}, {"document": {"contents": OAK}}])
def test_a_page_may_be_a_string_or_a_row(page, tmp_path):
    store = CallStore(tmp_path / "calls.sqlite")
    with canned(answers(page)) as server:
        pages = RemotePages(server.url, store=store)
        assert pages.read("http://a").contents == pages.read("http://a").contents == OAK
    assert [(asked.path, asked.body) for asked in server.asked] == [
        ("/access", {"urls": ["http://a"]})
    ]


def test_they_are_what_they_say():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{unused.getsockname()[1]}"
        assert isinstance(RemoteRetriever(url), Retriever)
        assert isinstance(RemotePages(url), PageReader)
        with pytest.raises(CallFailed, match="refused") as caught:
            RemoteRetriever(url, tries=1).search(["oak"], topk=1)
    assert caught.value.kind == "transient"
