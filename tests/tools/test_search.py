import pytest

from graphpo_agent.errors import ToolError
from graphpo_agent.types import Document
from tools.search import SearchTool, format_documents

OAK = Document("1", '"Oak"\nan oak is a tree\nwith leaves', 2.0)
FIR = Document("2", '"Fir"\na fir is a tree', 1.0)


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


def test_documents_are_formatted_as_search_r1_does():
    assert format_documents([OAK, FIR]) == (
        'Doc 1(Title: "Oak") an oak is a tree\nwith leaves\nDoc 2(Title: "Fir") a fir is a tree\n'
    )


def test_all_calls_are_one_request_and_equal_queries_are_asked_once():
    retriever = FixedRetriever()
    tool = SearchTool(retriever, topk=2)
    calls = [{"query": "Oak"}, {"query": "Fir Oak"}, {"query": "Oak"}, {"query": ["Fir", "Oak"]}]
    results = tool.run(calls)
    assert retriever.requests == [(["Oak", "Fir Oak", "Fir"], 2)]
    assert [result.documents for result in results] == [(OAK,), (OAK, FIR), (OAK,), (FIR, OAK)]
    assert [result.text for result in results] == [format_documents(r.documents) for r in results]
    assert [result.error for result in results] == [None] * 4


def test_a_document_found_by_two_queries_of_a_call_is_shown_once():
    [result] = SearchTool(FixedRetriever()).run([{"query": ["Oak", "Oak Fir"]}])
    assert result.documents == (OAK, FIR)


@pytest.mark.parametrize("query", ["", "  \n", [], ["", " "], "nothing"])
def test_an_empty_query_or_result_is_no_error(query):
    [result] = SearchTool(FixedRetriever()).run([{"query": query}])
    assert (result.text, result.documents, result.error) == ("", (), None)


@pytest.mark.parametrize("call", [{}, {"query": 3}, {"query": ["a", 3]}, {"query": "a", "k": 1}])
def test_arguments_that_do_not_fit_are_an_error_of_that_call_only(call):
    bad, good = SearchTool(FixedRetriever()).run([call, {"query": "Oak"}])
    assert bad.error is not None and bad.text == bad.error
    assert good.documents == (OAK,)


def test_a_retriever_that_cannot_be_reached_is_data():
    tool = SearchTool(BrokenRetriever(ConnectionError("refused")))
    results = tool.run([{"query": "a"}, {"query": "b"}])
    assert [result.error for result in results] == ["search failed: refused"] * 2


@pytest.mark.parametrize("error", [ToolError("no index"), ZeroDivisionError("a bug")])
def test_misconfiguration_and_bugs_are_not_hidden(error):
    with pytest.raises(type(error)):
        SearchTool(BrokenRetriever(error)).run([{"query": "a"}])


def test_topk_must_be_positive():
    with pytest.raises(ToolError, match="topk must be at least 1, found 0"):
        SearchTool(FixedRetriever(), topk=0)
