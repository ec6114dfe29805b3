import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ToolError
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.types import Document
from retrievers.bm25 import Bm25Retriever, build_bm25
from retrievers.hybrid import HybridRetriever, fuse
from retrievers.together import PartlyFailed, settle
from tests.retrievers.samples import passages, write_corpus


class Fixed:
    """Finds the same ids for every query, and remembers how many it was asked for."""

    def __init__(self, *ids):
        self.ids = ids
        self.depths = []

    def search(self, queries, topk):
        self.depths.append(topk)
        return [[Document(id_, f"{id_} {query}", 1.0) for id_ in self.ids] for query in queries]


rankings = st.lists(
    st.permutations("abcdef").flatmap(lambda p: st.integers(0, 6).map(lambda n: p[:n]))
)


@given(rankings=rankings, k=st.sampled_from([0, 1, 60]))
def test_fusion_is_the_formula(rankings, k):
    found = fuse([[Document(id_, id_) for id_ in ranking] for ranking in rankings], k)
    exact = {}
    for ranking in rankings:
        for rank, id_ in enumerate(ranking, start=1):
            exact[id_] = exact.get(id_, Fraction(0)) + Fraction(1, k + rank)
    assert {d.id: d.score for d in found} == pytest.approx({i: float(s) for i, s in exact.items()})
    scores = [d.score for d in found]
    assert scores == sorted(scores, reverse=True)


def test_equal_sums_are_in_the_order_in_which_they_were_met():
    fused = HybridRetriever([Fixed("c", "a"), Fixed("b", "a")], k=1).search(["q"], 3)
    assert [d.id for d in fused[0]] == ["a", "c", "b"]


def test_sums_of_the_same_terms_are_equal_whatever_their_order():
    def ranked(**ranks):
        filler = {rank: f"{rank}" for rank in range(1, 8)}
        names = filler | {rank: name for name, rank in ranks.items()}
        return [Document(name, name) for _, name in sorted(names.items())]

    rankings = [ranked(a=1, b=7), ranked(a=7, b=2), ranked(a=2, b=1)]
    found = [d for d in fuse(rankings, 60) if d.id in "ab"]
    assert [d.id for d in found] == ["a", "b"] and found[0].score == found[1].score


def test_each_query_has_its_own_ranking_and_depth_is_at_least_topk():
    first, second = Fixed("a", "b"), Fixed("b")
    hybrid = HybridRetriever([first, second], depth=5)
    found = hybrid.search(["x", "y"], 1)
    assert [[d.contents for d in each] for each in found] == [["b x"], ["b y"]]
    assert len(hybrid.search(["x"], 9)[0]) == 2
    assert first.depths == second.depths == [5, 9]
    assert hybrid.search([], 3) == []


class Failing(Fixed):
    """Gives no answer to the query ``down``, in one of the two ways."""

    def search(self, queries, topk):
        if queries == ["down"]:
            raise CallFailed("rate_limit", "later")
        found = super().search(queries, topk)
        answers = [
            CallFailed("rate_limit", "later") if q == "down" else f
            for q, f in zip(queries, found, strict=True)
        ]
        return settle(answers)


@pytest.mark.parametrize("failing_first", [True, False])
def test_a_query_that_one_of_them_fails_at_fails_alone(failing_first):
    parts = [Failing("a", "b", "c"), Fixed("c", "b")]
    hybrid = HybridRetriever(parts if failing_first else parts[::-1], depth=5)
    with pytest.raises(PartlyFailed) as caught:
        hybrid.search(["x", "down", "y"], 2)
    first, second, third = caught.value.answers
    assert isinstance(second, CallFailed) and second.kind == "rate_limit"
    assert [d.id for d in first] == [d.id for d in third]
    assert sorted(d.id for d in first) == ["b", "c"]
    with pytest.raises(CallFailed, match="later"):
        hybrid.search(["down"], 2)


def test_two_real_rankings_are_fused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(100))
    parts = []
    for k1 in (0.1, 3.0):
        build_bm25(corpus, tmp_path / f"k{k1}", k1=k1, b=1.0)
        parts.append(Bm25Retriever(tmp_path / f"k{k1}"))
    query = "alder0 birch0 cedar3"
    [fused] = HybridRetriever(parts, depth=10).search([query], 5)
    rankings = [[d.id for d in part.search([query], 10)[0]] for part in parts]
    score = {
        id_: sum(1 / (61 + ranking.index(id_)) for ranking in rankings if id_ in ranking)
        for ranking in rankings
        for id_ in ranking
    }
    assert [d.score for d in fused] == pytest.approx(sorted(score.values(), reverse=True)[:5])
    assert {d.id: d.score for d in fused} == pytest.approx({d.id: score[d.id] for d in fused})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"retrievers": [Fixed("a")]}, "at least 2 retrievers, found 1"),
        ({"retrievers": [Fixed("a"), "bm25"]}, "'bm25' has no search method"),
        (
            {"retrievers": [Fixed("a"), Fixed("b")], "depth": 0},
            "depth must be a whole number of at least 1",
        ),
        ({"retrievers": [Fixed("a"), Fixed("b")], "k": -1}, "k must not be below 0"),
        ({"retrievers": [Fixed("a"), Fixed("b")], "k": math.nan}, "k must not be below 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ToolError, match=message):
        HybridRetriever(**arguments)
