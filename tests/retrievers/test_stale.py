import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import DataError
from retrievers.stale import StaleRetriever
from tests.retrievers.samples import write_corpus
from tools.search import SearchTool

CONTENTS = [
    '"old"\noak height : 4',
    '"new"\noak age : 7',
    '"new"\noak height : 9',
]


@pytest.fixture
def retriever(tmp_path):
    return StaleRetriever(write_corpus(tmp_path / "corpus.jsonl", CONTENTS))


def ids(found):
    return [[document.id for document in documents] for documents in found]


def test_the_first_answer_may_be_old_and_who_names_it_gets_the_next(retriever):
    queries = ["oak height", "not 4 : oak height", "oak age", "not 5 : oak height"]
    assert ids(retriever.search(queries, 1)) == [["d0"], ["d2"], ["d1"], ["d0"]]
    assert ids(retriever.search(["oak height"], 5)) == [["d0", "d2"]]


@pytest.mark.parametrize(
    "query",
    ["", "oak", "not 4", "not 4 oak height", "elm height", "not 7 : oak age", "not 4 : not 9 : x"],
)
def test_what_is_not_stated_is_not_found(retriever, query):
    assert ids(retriever.search([query], 1)) == [[]]


@given(
    st.lists(
        st.sampled_from(["oak height", "not 4 : oak height", "oak age", "not 4 : oak age"]),
        max_size=8,
    )
)
def test_an_answer_depends_on_its_query_alone(tmp_path_factory, queries):
    corpus = write_corpus(tmp_path_factory.mktemp("stale") / "corpus.jsonl", CONTENTS)
    tool = SearchTool(StaleRetriever(corpus), topk=1)
    together = tool.run([{"query": query} for query in queries])
    alone = [tool.run([{"query": query}])[0] for query in reversed(queries)]
    assert together == alone[::-1]


@pytest.mark.parametrize("contents", ['"new"\noak height', '"new"\n : 4', '"new"\nnot b : 4'])
def test_a_document_that_states_nothing_is_refused(tmp_path, contents):
    corpus = write_corpus(tmp_path / "corpus.jsonl", [*CONTENTS, contents])
    with pytest.raises(DataError, match=r"document d3 must have the text 'subject : value'"):
        StaleRetriever(corpus)
