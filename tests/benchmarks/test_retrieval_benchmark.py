"""What the retrieval benchmark compares gives the same answers, and its measures are right."""

import json

import numpy as np
import pytest
import requests

from benchmarks.retrieval_parts.corpus import make_queries, make_vectors, write_corpus
from benchmarks.retrieval_parts.indexes import agreement, apart, recall
from benchmarks.retrieval_parts.load import CLIENTS, drive_client, drive_server
from benchmarks.retrieval_parts.servers import NAMES, cpu_seconds, resident_mb, running
from retrievers.index import build_index
from tests.retrievers.canned import canned


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("retrieval")
    documents = write_corpus(directory / "corpus.jsonl", 300)
    queries = make_queries(documents, 40)
    build_index("bm25", directory / "corpus.jsonl", directory / "bm25")
    return directory, queries


def test_both_servers_and_both_clients_give_the_same_answers(made):
    directory, queries = made
    answers = []
    for name in NAMES:
        with running(name, directory / "bm25", directory) as (address, pid):
            body = {"queries": queries, "topk": 3, "return_scores": True}
            answers.append(requests.post(f"http://{address}/retrieve", json=body).json())
            found = CLIENTS["ours"](address, 2)(queries)
            bare = CLIENTS["stand-in"](address, 2)(queries)
            assert [[d.contents for d in each] for each in found] == [
                [hit["document"]["contents"] for hit in each] for each in bare
            ]
            load = drive_server(address, queries, clients=3, per_request=4, seconds=0.2)
            assert load.errors == 0
            assert load.queries == 4 * len(load.waits_s) > 0
            assert cpu_seconds(pid) > 0 and resident_mb(pid)["private"] > 1
    assert answers[0] == answers[1]
    assert all(answers[0]["result"])


def test_errors_are_counted():
    with canned(lambda asked: (503, {"error": "busy"})) as server:
        load = drive_server(server.url.removeprefix("http://"), ["oak"], 2, 1, seconds=0.1)
    assert load.errors == len(load.waits_s) > 0


def test_every_query_of_a_client_is_counted_once():
    asked = []
    load = drive_client(asked.append, [str(n) for n in range(7)], 4, 3, seconds=0.05)
    assert load.queries == 3 * len(asked) == 3 * len(load.waits_s) > 0
    assert all(len(batch) == 3 for batch in asked)


def test_an_index_is_built_and_searched_apart(made):
    directory, queries = made
    (directory / "queries.json").write_text(json.dumps(queries))
    vectors, asked = make_vectors(300, 20, 16)
    np.save(directory / "vectors.npy", vectors)
    np.save(directory / "queries.npy", asked)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    cases = {"bm25": ("corpus.jsonl", "queries.json"), "Flat": ("vectors.npy", "queries.npy")}
    for kind, (source, file) in cases.items():
        index = str(directory / f"apart-{kind}")
        row = apart(do="build", kind=kind, source=str(directory / source), out=index)
        assert row["disk_mb"] > 0 and row["build_mb"] > row["disk_mb"]
        paths = {"queries": str(directory / file), "found": str(directory / "found.json")}
        row = apart(do="search", kind=kind, index=index, **paths)
        assert row["queries_per_s"] > 0
        found = json.loads((directory / "found.json").read_text())
        assert all(0 < len(each) <= 10 for each in found)
    exact = np.argsort(-(asked @ vectors.T), axis=1)[:, :10]
    assert recall(found, exact.tolist()) == 1.0


def test_recall_and_agreement():
    assert recall([[1, 2], [3, 4]], [[2, 1], [5, 4]]) == 0.75
    alike = agreement([["a", "b"], ["c"], [], ["d"]], [["b", "a"], ["c"], [], ["e", "d"]])
    assert alike == {
        "overlap@10": pytest.approx((1 + 1 + 0.5) / 3),
        "top1": pytest.approx(1 / 3),
        "identical": pytest.approx(1 / 3),
        "queries": 3,
    }


def test_the_corpus_is_the_same_each_time_and_holds_its_queries(tmp_path):
    documents = write_corpus(tmp_path / "a", 50)
    assert write_corpus(tmp_path / "b", 50) == documents
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert [row["id"] for row in rows] == [str(n) for n in range(50)]
    queries = make_queries(documents, 30)
    assert len(set(queries)) == 30
    holding = [{*words} for words in documents]
    assert all(any({*query.split()} <= words for words in holding) for query in queries)
