import json
import threading
from collections import Counter

import pytest

from graphpo_agent.errors import QuotaError, ToolError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.store import CallStore
from graphpo_agent.protocols import PageReader, Retriever
from graphpo_agent.types import Document
from retrievers.together import PartlyFailed
from retrievers.web import BrightDataBingSearch, GoogleCseSearch, SerpApiSearch, SerperSearch
from retrievers.web_pages import JinaReader
from retrievers.web_search import is_chinese
from tests.retrievers.canned import canned

KEY = "sk-very-secret-0123456789"
KEYS = ("SERPER_API_KEY", "SERPAPI_API_KEY", "GOOGLE_API_KEY", "BRIGHTDATA_API_KEY", "JINA_API_KEY")
ENGINES = {
    SerperSearch: ({}, "organic", "snippet"),
    SerpApiSearch: ({}, "organic_results", "snippet"),
    GoogleCseSearch: ({"cse_id": "c1"}, "items", "snippet"),
    BrightDataBingSearch: ({"zone": "z1"}, "organic", "description"),
}


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for name in KEYS:
        monkeypatch.setenv(name, KEY)


def engine(cls, server, **options):
    return cls(**ENGINES[cls][0], base_url=server.url, **{"tries": 1, **options})


def page(cls, *results):
    """An engine's answer; a result is a link, or fields where the snippet is ``snippet``."""
    _, name, snippet = ENGINES[cls]
    rows = [{"link": each, "title": "T"} if isinstance(each, str) else each for each in results]
    return {name: [{snippet if k == "snippet" else k: v for k, v in row.items()} for row in rows]}


def search_one(cls, reply, query="oak", topk=3, status=200, **options):
    with canned(lambda asked: (status, reply)) as server:
        found = engine(cls, server, **options).search([query], topk)
    return found[0]


@pytest.mark.parametrize("cls", ENGINES)
def test_results_are_documents_and_missing_fields_do_no_harm(cls):
    reply = page(
        cls,
        {"link": "http://a", "title": 'The "Oak"', "snippet": "A\n tree."},
        {"link": "http://b", "title": "B"},
        {"link": "http://c", "snippet": "No title."},
        {"title": "no link", "snippet": "x"},
        {"link": "http://d", "title": None, "snippet": ["x"]},
        {"link": "http://a", "title": "again"},
    )
    assert search_one(cls, reply, topk=9) == [
        Document("http://a", '"The ""Oak"""\nA tree.', url="http://a"),
        Document("http://b", '"B"', url="http://b"),
        Document("http://c", '"http://c"\nNo title.', url="http://c"),
        Document("http://d", '"http://d"', url="http://d"),
    ]


@pytest.mark.parametrize("cls", ENGINES)
@pytest.mark.parametrize("reply", [{}, [], {"organic": None}, {"organic": [None, 3, "x"]}])
def test_an_answer_without_results_is_empty(cls, reply):
    assert search_one(cls, reply) == []


@pytest.mark.parametrize("cls", ENGINES)
def test_topk_counts_after_blocked_hosts_are_left_out(cls):
    links = ["http://leak.org/a", "http://a", "http://x.leak.org/b", "http://b", "http://c"]
    found = search_one(cls, page(cls, *links), topk=2, blocked_hosts=["leak.org"])
    assert [document.id for document in found] == ["http://a", "http://b"]


def test_date_and_source_stand_before_the_snippet():
    row = {"link": "http://a", "title": "A", "snippet": "S", "date": "3 May", "source": "News"}
    for cls in (SerperSearch, SerpApiSearch):
        [document] = search_one(cls, page(cls, row))
        assert document.contents == '"A"\nDate published: 3 May\nSource: News\nS'
    row = {"link": "http://a", "title": "A", "snippet": "S", "displayLink": "a.org"}
    [document] = search_one(GoogleCseSearch, page(GoogleCseSearch, row))
    assert document.contents == '"A"\nSource: a.org\nS'


@pytest.mark.parametrize(
    ("cls", "name"), [(SerperSearch, "answerBox"), (SerpApiSearch, "answer_box")]
)
@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ({"answer": "20 m"}, Document("answer:oak", '"oak"\n20 m')),
        (
            {"title": "Oak", "snippet": "Up to 20 m.", "answer": 20, "link": "http://a"},
            Document("answer:http://a", '"Oak"\n20\nUp to 20 m.', url="http://a"),
        ),
        ({"title": "Oak", "type": "image"}, None),
        ([], None),
    ],
)
def test_an_answer_box_comes_first(cls, name, box, expected):
    found = search_one(cls, {name: box, **page(cls, "http://a", "http://b")}, topk=2)
    ids = [document.id for document in found]
    if expected is None:
        assert ids == ["http://a", "http://b"]
    else:
        assert (found[0], ids[1:]) == (expected, ["http://a"])


def asked_of(cls, query, topk=3, **options):
    with canned(lambda asked: (200, {})) as server:
        engine(cls, server, **options).search([query], topk)
    [asked] = server.asked
    return asked


def test_serper_is_asked_as_it_wants():
    asked = asked_of(SerperSearch, "  oak \n height ")
    assert (asked.method, asked.headers["x-api-key"]) == ("POST", KEY)
    assert asked.body == {"q": "oak height", "num": 10, "gl": "us", "hl": "en"}
    assert asked_of(SerperSearch, "oak", topk=30).body["num"] == 30
    assert asked_of(SerperSearch, "橡树 有多高").body == {
        "q": "橡树 有多高",
        "num": 10,
        "gl": "cn",
        "hl": "zh-cn",
    }
    assert asked_of(SerperSearch, "橡树", gl="de", hl="de").body["gl"] == "de"
    assert len(asked_of(SerperSearch, "oak " * 3000).body["q"]) == 2000


def test_serpapi_is_asked_as_it_wants():
    asked = asked_of(SerpApiSearch, "oak", engine="bing")
    assert asked.method == "GET"
    expected = {"engine": "bing", "q": "oak", "gl": "us", "hl": "en", "api_key": KEY}
    assert asked.params == expected
    assert asked_of(SerpApiSearch, "橡树", topk=20).params["num"] == "20"


def test_google_is_asked_as_it_wants():
    asked = asked_of(GoogleCseSearch, "oak")
    expected = {"cx": "c1", "q": "oak", "num": "10", "gl": "us", "hl": "en", "key": KEY}
    assert (asked.method, asked.params) == ("GET", expected)


def test_bing_is_asked_through_the_proxy():
    asked = asked_of(BrightDataBingSearch, "oak & elm")
    assert (asked.method, asked.headers["authorization"]) == ("POST", f"Bearer {KEY}")
    assert asked.body == {
        "zone": "z1",
        "format": "raw",
        "url": "https://www.bing.com/search?q=oak+%26+elm&mkt=en-US&setLang=en&brd_json=1&cc=US",
    }
    assert (
        "mkt=zh-CN&setLang=zh&brd_json=1&cc=CN" in asked_of(BrightDataBingSearch, "橡").body["url"]
    )
    assert "mkt=de-DE" in asked_of(BrightDataBingSearch, "oak", market="de-DE").body["url"]


@pytest.mark.parametrize(
    ("query", "chinese"),
    [
        ("橡树", True),
        ("oak 橡", True),
        ("oak", False),
        ("", False),
        ("東京タワー", False),
        ("樹 나무", False),
    ],
)
def test_chinese_is_told_from_japanese(query, chinese):
    assert is_chinese(query) == chinese


def google_error(status, reason, message):
    return status, {
        "error": {"code": status, "message": message, "errors": [{"reason": reason, "x": 1}]}
    }


PER_DAY = "Quota exceeded for quota metric 'Queries' and limit 'Queries per day' of service"
PER_MINUTE = "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute' of service"
REFUSALS = [
    (SerperSearch, 403, {"message": "Unauthorized.", "statusCode": 403}, ToolError),
    (SerperSearch, 400, {"message": "Not enough credits", "statusCode": 400}, QuotaError),
    (SerperSearch, 400, {"message": "Missing query", "statusCode": 400}, "bad_arguments"),
    (SerperSearch, 429, {"message": "slow down"}, "rate_limit"),
    (SerperSearch, 500, {}, "transient"),
    (SerperSearch, 200, b"<html>maintenance", "transient"),
    (SerpApiSearch, 401, {"error": "Invalid API key."}, ToolError),
    (SerpApiSearch, 429, {"error": "Your account has run out of searches."}, QuotaError),
    (SerpApiSearch, 429, {"error": "Hourly throughput limit exceeded."}, "rate_limit"),
    (SerpApiSearch, 200, {"error": "The search failed."}, "transient"),
    (GoogleCseSearch, *google_error(403, "dailyLimitExceeded", "Daily Limit"), QuotaError),
    (GoogleCseSearch, *google_error(403, "quotaExceeded", "Quota"), QuotaError),
    (GoogleCseSearch, *google_error(429, "rateLimitExceeded", PER_DAY), QuotaError),
    (GoogleCseSearch, *google_error(429, "rateLimitExceeded", PER_MINUTE), "rate_limit"),
    (GoogleCseSearch, *google_error(403, "userRateLimitExceeded", "Too fast"), "rate_limit"),
    (GoogleCseSearch, *google_error(403, "accessNotConfigured", "Enable it"), ToolError),
    (GoogleCseSearch, *google_error(400, "badRequest", "API key not valid."), ToolError),
    (GoogleCseSearch, *google_error(400, "badRequest", "Invalid argument."), "bad_arguments"),
    (GoogleCseSearch, 403, {}, ToolError),
    (GoogleCseSearch, 429, b"<html>slow down", "rate_limit"),
    (GoogleCseSearch, 502, b"", "transient"),
    (BrightDataBingSearch, 401, b"Invalid credentials", ToolError),
    (BrightDataBingSearch, 400, b"zone not found", ToolError),
    (BrightDataBingSearch, 402, b"no balance", QuotaError),
    (BrightDataBingSearch, 200, b"<html>raw page", "transient"),
]


@pytest.mark.parametrize(("cls", "status", "reply", "expected"), REFUSALS)
def test_every_refusal_is_of_its_kind_and_shows_no_key(cls, status, reply, expected):
    with pytest.raises((ToolError, CallFailed)) as caught:
        search_one(cls, reply, status=status)
    if isinstance(expected, str):
        assert isinstance(caught.value, CallFailed) and caught.value.kind == expected
    else:
        assert type(caught.value) is expected
    assert KEY not in str(caught.value) and "\n" not in str(caught.value)


def test_a_search_that_found_nothing_is_no_failure_of_serpapi():
    reply = {"error": "Google hasn't returned any results for this query."}
    assert search_one(SerpApiSearch, reply) == []


def found_for(asked):
    return 200, page(SerperSearch, f"http://x/{asked.body['q']}")


def test_queries_are_asked_at_once_each_of_them_once_and_blank_ones_never():
    together = threading.Barrier(3)  # passes only when three requests are under way

    def answer(asked):
        together.wait(60)
        return found_for(asked)

    with canned(answer) as server:
        retriever = engine(SerperSearch, server, concurrency=3)
        found = retriever.search(["c", "a", " ", "a ", "b", ""], topk=3)
        assert retriever.search([], 3) == []
    ids = [[document.id for document in documents] for documents in found]
    assert ids == [["http://x/c"], ["http://x/a"], [], ["http://x/a"], ["http://x/b"], []]
    assert Counter(asked.body["q"] for asked in server.asked) == Counter("abc")


def test_no_more_than_the_allowed_number_is_under_way():
    lock, most, under_way = threading.Lock(), 0, 0

    def answer(asked):
        nonlocal most, under_way
        with lock:
            under_way += 1
            most = max(most, under_way)
        threading.Event().wait(0.01)
        with lock:
            under_way -= 1
        return found_for(asked)

    with canned(answer) as server:
        engine(SerperSearch, server, concurrency=2).search(list("abcdefgh"), topk=3)
    assert 1 <= most <= 2 and len(server.asked) == 8


def test_one_query_that_fails_does_not_cost_the_others_their_answers():
    def answer(asked):
        return (429, b"slow down") if asked.body["q"] == "b" else found_for(asked)

    with canned(answer) as server, pytest.raises(PartlyFailed, match="429: slow down") as caught:
        engine(SerperSearch, server).search(["a", "b", "", "a"], topk=3)
    first, second, blank, again = caught.value.answers
    assert [document.id for document in first] == ["http://x/a"]
    assert isinstance(second, CallFailed)
    assert caught.value.kind == second.kind == "rate_limit"
    assert (blank, again) == ([], first)


def test_a_used_up_account_stops_the_queries_that_have_not_been_asked():
    with (
        canned(lambda asked: (400, {"message": "Not enough credits"})) as server,
        pytest.raises(QuotaError),
    ):
        engine(SerperSearch, server, concurrency=1).search([f"q{n}" for n in range(500)], 3)
    assert len(server.asked) < 500


@pytest.mark.parametrize("cls", ENGINES)
def test_recorded_answers_need_no_network_and_hold_no_key(cls, tmp_path, monkeypatch):
    path = tmp_path / "calls.sqlite"
    with canned(lambda asked: (200, page(cls, f"http://a/{KEY}"))) as server:
        first = engine(cls, server, store=CallStore(path)).search(["oak", "橡树"], topk=3)
        assert len(server.asked) == 2
    assert KEY.encode() not in b"".join(each.read_bytes() for each in tmp_path.iterdir())
    for name in KEYS:
        monkeypatch.delenv(name)
    replayed = engine(cls, server, store=CallStore(path, "strict"))
    assert replayed.search(["橡树", "oak"], topk=2) == first[::-1]


@pytest.mark.parametrize("cls", [*ENGINES, JinaReader])
def test_a_missing_key_is_named(cls, monkeypatch, tmp_path):
    arguments = ENGINES[cls][0] if cls in ENGINES else {}
    with pytest.raises(ToolError, match="MY_KEY"):
        cls(**arguments, api_key_env="MY_KEY")
    for name in KEYS:
        monkeypatch.delenv(name)
    store = CallStore(tmp_path / "calls.sqlite")
    with pytest.raises(ToolError, match="_API_KEY is not set"):
        cls(**arguments, store=store)
    cls(**arguments, store=CallStore(tmp_path / "calls.sqlite", "strict"))


def test_settings_that_cannot_be_used_are_refused():
    for make in (
        lambda: GoogleCseSearch(cse_id=""),
        lambda: BrightDataBingSearch(zone="z", market="german"),
        lambda: SerperSearch(concurrency=0),
        lambda: SerperSearch(blocked_hosts=["http://scheme.org"]),
    ):
        with pytest.raises(ToolError):
            make()


@pytest.mark.parametrize("cls", ENGINES)
def test_the_engines_are_retrievers(cls):
    assert isinstance(cls(**ENGINES[cls][0]), Retriever)


def read(reply, status=200, url="https://a.org/?q=1#part", **options):
    with canned(lambda asked: (status, reply)) as server:
        document = JinaReader(base_url=server.url, tries=1, **options).read(url)
    return document, server.asked


def test_jina_reads_a_page():
    reply = {"code": 200, "data": {"url": "u", "title": 'An "Oak"', "content": "# Oak\n\ntext"}}
    url = "https://a.org/?q=1#part"
    document, [asked] = read(reply)
    assert document == Document(id=url, contents='"An ""Oak"""\n# Oak\n\ntext', url=url)
    assert (asked.method, asked.body) == ("POST", {"url": url})
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["accept"] == "application/json"
    document, _ = read({"data": {"content": "text"}}, url="HTTPS://a.org")
    assert document.contents == '"HTTPS://a.org"\ntext'
    document, [asked] = read(reply, api_key_env=None)
    assert "authorization" not in asked.headers
    assert isinstance(JinaReader(), PageReader)


@pytest.mark.parametrize(
    ("status", "reply", "expected"),
    [
        (200, {"code": 200, "data": {"title": "x", "content": " \n"}}, "no_result"),
        (200, {"code": 200, "data": None}, "no_result"),
        (200, [], "no_result"),
        (200, b"<html>", "transient"),
        (400, {"code": 400}, "no_result"),
        (403, {"code": 403}, "no_result"),
        (404, {"code": 404}, "no_result"),
        (422, {"code": 422}, "no_result"),
        (451, {"code": 451, "name": "SecurityCompromiseError"}, "no_result"),
        (408, {}, "transient"),
        (429, {"code": 429}, "rate_limit"),
        (503, {"code": 503}, "transient"),
        (401, {"code": 401}, ToolError),
        (407, {}, ToolError),
        (402, {"code": 402, "name": "InsufficientBalanceError"}, QuotaError),
    ],
)
def test_what_the_reader_refuses_is_of_its_kind(status, reply, expected):
    with pytest.raises((ToolError, CallFailed)) as caught:
        read(reply, status)
    if isinstance(expected, str):
        assert isinstance(caught.value, CallFailed) and caught.value.kind == expected
    else:
        assert type(caught.value) is expected
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "ftp://a.org", "a.org"])
def test_only_http_addresses_are_read(url):
    with pytest.raises(CallFailed, match="no http address") as caught:
        read({}, url=url)
    assert caught.value.kind == "bad_arguments"


def test_json_of_every_answer_can_be_recorded(tmp_path):
    reply = {"data": {"title": "t", "content": json.dumps({"key": KEY})}}
    store = CallStore(tmp_path / "calls.sqlite")
    with canned(lambda asked: (200, reply)) as server:
        reader = JinaReader(base_url=server.url, store=store)
        assert reader.read("http://a") == reader.read("http://a")
    assert len(server.asked) == 1
    assert KEY not in reader.read("http://a").contents
