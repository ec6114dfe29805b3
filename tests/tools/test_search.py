import threading
from dataclasses import replace

import pytest

from graphpo_agent.errors import QuotaError, ToolError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.protocols import Tool
from graphpo_agent.types import Document, Finding, ToolResult
from retrievers.together import PartlyFailed
from tools.search import SearchTool

OAK = Document("1", '"Oak"\nan oak is a tree\nwith leaves', 2.0)
FIR = Document("2", '"Fir"\na fir is a tree', 1.0, url="https://trees.example/fir")


class FixedRetriever:
    """Finds the documents whose title is in the query, and remembers what it was asked."""

    def __init__(self):
        self.requests = []

    def search(self, queries, topk):
        self.requests.append((list(queries), topk))
        return [[d for d in (OAK, FIR) if d.title.strip('"') in q][:topk] for q in queries]


class BrokenRetriever:
    def __init__(self, error):
        self.error = error

    def search(self, queries, topk):
        raise self.error


def test_it_is_a_tool():
    assert isinstance(SearchTool(FixedRetriever()), Tool)


def test_all_calls_are_one_request_and_equal_queries_are_asked_once():
    retriever = FixedRetriever()
    tool = SearchTool(retriever, topk=2)
    calls = [{"query": "Oak"}, {"query": "Fir Oak"}, {"query": " Oak\n"}, {"query": ["Fir", "Oak"]}]
    results = tool.run(calls)
    assert retriever.requests == [(["Oak", "Fir Oak", "Fir"], 2)]
    assert results == [
        ToolResult(findings=(Finding("Oak", (OAK,)),)),
        ToolResult(findings=(Finding("Fir Oak", (OAK, FIR)),)),
        ToolResult(findings=(Finding("Oak", (OAK,)),)),
        ToolResult(findings=(Finding("Fir", (FIR,)), Finding("Oak", (OAK,)))),
    ]


class HangingRetriever(FixedRetriever):
    """Answers a query for firs only when the gate opens."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def search(self, queries, topk):
        assert "Fir" not in queries or self.gate.wait(60)
        return super().search(queries, topk)


def test_a_retriever_that_hangs_fails_the_call_and_no_later_one():
    retriever = HangingRetriever()
    tool = SearchTool(retriever, deadline_s=0.2)
    failed = ToolResult(text="search failed: no answer within 0.2 s", failure="transient")
    assert tool.run([{"query": "Fir"}, {"query": ""}]) == [
        failed,
        ToolResult(findings=(Finding("", ()),)),
    ]
    retriever.gate.set()
    assert SearchTool(retriever, deadline_s=60).run([{"query": "Fir"}])[0].documents == (FIR,)
    with pytest.raises(ToolError, match="search tool: deadline_s must be a number above 0"):
        SearchTool(retriever, deadline_s=0)


@pytest.mark.parametrize("name", ["query", "queries", "query_list"])
@pytest.mark.parametrize("value", ["Oak", ["Oak"]])
def test_other_spellings_of_the_argument(name, value):
    [result] = SearchTool(FixedRetriever()).run([{name: value}])
    assert result.documents == (OAK,)


@pytest.mark.parametrize("query", ["", "  \n", ["", " "], "nothing"])
def test_an_empty_query_or_result_is_a_finding_without_documents(query):
    retriever = FixedRetriever()
    [result] = SearchTool(retriever).run([{"query": query}])
    count = len(query) if isinstance(query, list) else 1
    assert [finding.documents for finding in result.findings] == [()] * count
    assert result.failure is None
    assert retriever.requests in ([], [(["nothing"], 3)])


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"query": 3},
        {"query": None},
        {"query": []},
        {"query": ["a", 3]},
        {"query": "a", "k": 1},
        {"query": "a", "queries": "a"},
        {"q": "a"},
    ],
)
def test_arguments_that_do_not_fit_are_a_failure_of_that_call_only(call):
    bad, good = SearchTool(FixedRetriever()).run([call, {"query": "Oak"}])
    assert bad.failure == "bad_arguments"
    assert bad.text and not bad.findings
    assert good.documents == (OAK,)


def test_queries_beyond_the_limit_are_left_out_and_that_is_said():
    retriever = FixedRetriever()
    tool = SearchTool(retriever, max_queries=2)
    assert tool.schema["properties"]["query"]["anyOf"][1]["maxItems"] == 2
    whole, cut = tool.run([{"query": ["Oak", "Fir"]}, {"query": ["Fir", "Oak", "Elm", "Ash"]}])
    assert whole.documents == (OAK, FIR) and whole.text == ""
    assert [finding.query for finding in cut.findings] == ["Fir", "Oak"]
    assert cut.failure is None
    assert cut.text == "2 more not searched: at most 2 queries a call."
    assert retriever.requests == [(["Oak", "Fir"], 3)]


def test_a_call_of_five_queries_is_answered_in_full():
    queries = ["Oak", "Fir", "Elm", "Ash", "Yew"]
    [result] = SearchTool(FixedRetriever()).run([{"query": queries}])
    assert [finding.query for finding in result.findings] == queries
    assert result.text == "" and result.failure is None


@pytest.mark.parametrize("kind", ["rate_limit", "transient", "no_result", "bad_arguments"])
def test_an_outage_fails_the_calls_that_asked(kind):
    tool = SearchTool(BrokenRetriever(CallFailed(kind, "the server is busy")))
    first, second, blank, bad = tool.run(
        [{"query": "a"}, {"query": ["b", ""]}, {"query": ""}, {"query": 3}]
    )
    assert first == second == ToolResult("search failed: the server is busy", failure=kind)
    assert blank == ToolResult(findings=(Finding("", ()),))
    assert bad.failure == "bad_arguments"


@pytest.mark.parametrize(
    "error", [ToolError("no index"), QuotaError("used up"), ZeroDivisionError("a bug")]
)
def test_misconfiguration_and_bugs_are_not_hidden(error):
    with pytest.raises(type(error)):
        SearchTool(BrokenRetriever(error)).run([{"query": "a"}])


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([[OAK]], "Strange.search returned 1 lists for 2 queries"),
        (None, "Strange.search returned NoneType, no list of lists"),
        ([["oak"], []], "Strange.search found 'oak', which is no Document"),
        ([OAK, OAK], "Strange.search found Document.*, want a list of Documents"),
        ([None, []], "Strange.search found None, want a list of Documents"),
        ([[Document(7, "Oak")], []], "Strange.search found Document.*: id is of type int"),  # type: ignore[arg-type]
        ([[replace(OAK, contents={})], []], "Document.*: contents is of type dict"),
    ],
)
def test_a_retriever_that_does_not_return_documents_is_named(found, says):
    class Strange:
        def search(self, queries, topk):
            return found

    with pytest.raises(ToolError, match=says):
        SearchTool(Strange()).run([{"query": ["oak", "fir"]}])


def test_documents_of_blocked_hosts_are_left_out():
    tool = SearchTool(FixedRetriever(), blocked_hosts=["trees.example"])
    [result] = tool.run([{"query": "Fir Oak"}])
    assert result == ToolResult(findings=(Finding("Fir Oak", (OAK,)),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 0}, "topk must be a whole number of at least 1, found 0"),
        ({"topk": True}, "topk"),
        ({"max_queries": "3"}, "max_queries"),
        ({"blocked_hosts": "example.org"}, "blocked_hosts"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(ToolError, match=message):
        SearchTool(FixedRetriever(), **options)


def test_a_retriever_must_search():
    with pytest.raises(ToolError, match="search method"):
        SearchTool("bm25")  # pyright: ignore[reportArgumentType]


def test_a_failed_query_fails_only_the_calls_that_ask_it():
    class Patchy:
        def search(self, queries, topk):
            raise PartlyFailed(
                [CallFailed("rate_limit", "429") if q == "bad" else [OAK] for q in queries]
            )

    tool = SearchTool(Patchy())
    calls = [{"query": "oak"}, {"query": ["oak", "bad"]}, {"query": "bad"}, {"query": " "}]
    fine, mixed, failed, blank = tool.run(calls)
    assert (fine.failure, fine.documents) == (None, (OAK,))
    assert mixed.failure == failed.failure == "rate_limit" and not mixed.findings
    assert (blank.failure, blank.documents) == (None, ())
