import json
import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import DataError, ToolError
from retrievers.bm25 import Bm25Retriever, build_bm25
from tests.retrievers.samples import passages, write_corpus

WORDS = ["alder", "birch", "cedar", "elm", "fir", "maple", "oak", "pine", "spruce", "willow"]


def index_of(directory, contents, **options):
    corpus = write_corpus(directory / "corpus.jsonl", contents)
    build_bm25(corpus, directory / "index", **options)
    return Bm25Retriever(directory / "index")


def lucene_scores(contents, query, k1=0.9, b=0.4):
    """Lucene's BM25, straight from its formula; every word of these texts is a token."""
    documents = [text.replace('"', " ").split() for text in contents]
    mean_length = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score = 0.0
        for word in query.split():
            holding = sum(word in other for other in documents)
            if holding:
                idf = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
                count = words.count(word)
                score += idf * count / (count + k1 * (1 - b + b * len(words) / mean_length))
        scores.append(score)
    return scores


documents_lists = st.lists(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join), min_size=1, max_size=12
)


@settings(max_examples=30, deadline=None)
@given(
    contents=documents_lists,
    query=st.lists(st.sampled_from([*WORDS, "unknown"]), max_size=4).map(" ".join),
    topk=st.integers(1, 15),
)
def test_ranking_is_lucenes_formula(tmp_path_factory, contents, query, topk):
    retriever = index_of(tmp_path_factory.mktemp("bm25"), contents, stemmer=None, stopwords=None)
    [found] = retriever.search([query], topk)
    expected = lucene_scores(contents, query)
    positive = sorted((score for score in expected if score > 0), reverse=True)
    scores = {document.id: document.score for document in found}
    assert list(scores.values()) == pytest.approx(positive[:topk], rel=1e-5)
    assert scores == pytest.approx({id_: expected[int(id_[1:])] for id_ in scores}, rel=1e-5)
    assert all(document.contents == contents[int(document.id[1:])] for document in found)


def test_equal_scores_come_in_corpus_order(tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    few.mkdir()
    many.mkdir()
    retriever = index_of(few, ["oak", "pine", "oak", "oak", "pine", "oak"])
    assert [d.id for d in retriever.search(["oak"], 3)[0]] == ["d0", "d2", "d3"]
    retriever = index_of(many, ["oak oak" if i == 30 else "oak" for i in range(60)])
    found = [d.id for d in retriever.search(["oak"], 40)[0]]
    assert found == ["d30", *(f"d{i}" for i in range(40) if i != 30)]


@pytest.mark.parametrize("query", ["", "   ", "???", "the of", "zzz unknownword", "x", "樹"])
def test_a_query_without_known_words_finds_nothing(tmp_path, query):
    retriever = index_of(tmp_path, ["an oak", "a pine"])
    assert retriever.search([query, "oak", query], 5)[::2] == [[], []]


def test_no_queries_and_more_documents_asked_for_than_there_are(tmp_path):
    retriever = index_of(tmp_path, ["oak", "oak pine"])
    assert retriever.search([], 3) == []
    assert len(retriever.search(["oak"], 100)[0]) == 2


def test_words_are_found_in_other_inflections_unless_the_stemmer_is_off(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert len(index_of(tmp_path / "a", ["running", "pine"]).search(["runs"], 1)[0]) == 1
    off = index_of(tmp_path / "b", ["running", "pine"], stemmer=None)
    assert off.search(["runs"], 1) == [[]]


MIXED = [
    "Vitamin D deficiency",
    "Ford's Model T",
    "中国的首都是北京",
    "東京タワーは東京にある",
    "서울은 한국의 수도",
    "Ada's oak",
]


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("d", ["d0"]),
        ("model t", ["d1"]),
        ("北京", ["d2", "d3"]),
        ("タワー", ["d3"]),
        ("首都", ["d2"]),
        ("한국의", ["d4"]),
        ("Ada", ["d5"]),
        ("s", []),
    ],
)
def test_single_letters_ideographs_and_runs_of_a_script_are_words(tmp_path, query, ids):
    found = index_of(tmp_path, MIXED).search([query], 5)[0]
    assert [document.id for document in found] == ids


def test_an_index_is_searched_by_the_words_it_was_built_with(tmp_path):
    index_of(tmp_path, MIXED)
    path = tmp_path / "index" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "words": "[^ ]+"}))
    read = Bm25Retriever(tmp_path / "index")
    assert [len(found) for found in read.search(["t", "北京", "北", "model-t"], 5)] == [1, 0, 1, 0]
    del manifest["words"]
    path.write_text(json.dumps(manifest))
    untold = Bm25Retriever(tmp_path / "index").search(["T", "北", "model-t"], 5)
    assert [len(found) for found in untold] == [0, 0, 1]


def test_documents_come_back_byte_for_byte_after_blank_lines_and_unicode(tmp_path):
    contents = ['"Ünï"\nfirst ✓ line', '"B"\nsecond\tline\u2028end']
    rows = [
        json.dumps({"id": str(i), "contents": c}, ensure_ascii=False)
        for i, c in enumerate(contents)
    ]
    (tmp_path / "corpus.jsonl").write_text("\n" + rows[0] + "\n\n" + rows[1], encoding="utf-8")
    build_bm25(tmp_path / "corpus.jsonl", tmp_path / "index")
    retriever = Bm25Retriever(tmp_path / "index")
    [[first], [second]] = retriever.search(["first", "second"], 2)
    assert (first.contents, second.contents) == tuple(contents)
    assert (first.title, first.text) == ('"Ünï"', "first ✓ line")


def test_threads_get_what_one_thread_gets(tmp_path):
    rng = random.Random(0)
    contents = [" ".join(rng.choices(WORDS, k=6)) + f" number{i}s" for i in range(300)]
    retriever = index_of(tmp_path, contents)
    queries = [f"{rng.choice(WORDS)} number{rng.randrange(300)}s" for _ in range(200)]
    expected = [retriever.search([query], 3)[0] for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: retriever.search([query], 3)[0], queries)) == expected


def test_a_bad_corpus_line_is_named_and_nothing_is_written(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["oak"])
    corpus.write_text(corpus.read_text() + "\n{}\n")
    with pytest.raises(DataError) as caught:
        build_bm25(corpus, tmp_path / "index")
    assert str(caught.value).startswith(f"{corpus}:3: field 'id'")
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["the", "?"])
    with pytest.raises(DataError, match="no document has a word to index"):
        build_bm25(corpus, tmp_path / "index")
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k1": -1.0}, "k1 must be at least 0"),
        ({"k1": math.nan}, "k1 must be at least 0"),
        ({"b": 1.5}, r"b must be in \[0, 1\]"),
        ({"stemmer": "klingon"}, "stemmer must be none or one of arabic"),
        ({"stopwords": "klingon"}, "no stop word list 'klingon'"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, message):
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["oak"])
    with pytest.raises(ToolError, match=message):
        build_bm25(corpus, tmp_path / "index", **options)
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_a_failing_build_leaves_the_index_that_was_there(tmp_path):
    retriever = index_of(tmp_path, ["oak"])
    with pytest.raises(ToolError, match="k1"):
        build_bm25(tmp_path / "corpus.jsonl", tmp_path / "index", k1=-1.0)
    assert retriever.search(["oak"], 1) == Bm25Retriever(tmp_path / "index").search(["oak"], 1)


def test_a_corpus_inside_the_index_that_would_be_replaced_is_safe(tmp_path):
    index_of(tmp_path, ["oak"])
    (tmp_path / "corpus.jsonl").rename(tmp_path / "index" / "corpus.jsonl")
    with pytest.raises(ToolError, match="which is to be replaced"):
        build_bm25(tmp_path / "index" / "corpus.jsonl", tmp_path / "index")
    assert (tmp_path / "index" / "corpus.jsonl").exists()


def test_two_processes_do_not_build_the_same_index(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["oak"])
    program = (
        "import sys; from pathlib import Path\n"
        "from retrievers.index_build import build_directory\n"
        "with build_directory(Path(sys.argv[1])): print('inside', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "index")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"inside\n"
        with pytest.raises(ToolError, match="another process is building it"):
            build_bm25(corpus, tmp_path / "index")
        other.kill()
    build_bm25(corpus, tmp_path / "index")
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]


def test_every_backend_finds_the_same(tmp_path, monkeypatch):
    contents = passages(300)
    retriever = index_of(tmp_path, contents)
    queries = [" ".join(random.Random(i).sample(contents[i].split(), 3)) for i in range(100)]
    expected = retriever.search(["", *queries], 7)
    assert Bm25Retriever(tmp_path / "index", backend="auto").search(["", *queries], 7) == expected
    with pytest.raises(ToolError, match="backend must be auto, numpy or numba"):
        Bm25Retriever(tmp_path / "index", backend="jax")  # pyright: ignore
    monkeypatch.setattr(bm25s, "NUMBA_AVAILABLE", False)
    assert Bm25Retriever(tmp_path / "index", backend="auto").search(["", *queries], 7) == expected
    with pytest.raises(ToolError, match="pip install numba"):
        Bm25Retriever(tmp_path / "index", backend="numba")


def test_an_empty_or_missing_corpus_is_refused(tmp_path):
    (tmp_path / "corpus.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no documents"):
        build_bm25(tmp_path / "corpus.jsonl", tmp_path / "index")
    with pytest.raises(DataError, match="cannot be read"):
        build_bm25(tmp_path / "none.jsonl", tmp_path / "index")


def test_an_index_is_replaced_whole_and_other_directories_are_left_alone(tmp_path):
    index_of(tmp_path, ["oak"])
    assert index_of(tmp_path, ["pine", "fir"]).search(["oak pine"], 5)[0][0].id == "d0"
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(ToolError, match="is not an index"):
        build_bm25(tmp_path / "corpus.jsonl", tmp_path / "mine")


def test_the_world_may_move_with_its_index(tmp_path):
    (tmp_path / "here").mkdir()
    index_of(tmp_path / "here", ["oak"])
    (tmp_path / "here").rename(tmp_path / "there")
    assert Bm25Retriever(tmp_path / "there" / "index").search(["oak"], 1)[0][0].contents == "oak"


def test_a_missing_index_a_missing_corpus_and_a_changed_corpus_are_told_apart(tmp_path):
    with pytest.raises(ToolError, match="holds no index"):
        Bm25Retriever(tmp_path / "index")
    index_of(tmp_path, ["oak"])
    write_corpus(tmp_path / "corpus.jsonl", ["oaks"])
    with pytest.raises(ToolError, match="has changed since it was indexed"):
        Bm25Retriever(tmp_path / "index")
    (tmp_path / "corpus.jsonl").unlink()
    with pytest.raises(ToolError, match="cannot be read"):
        Bm25Retriever(tmp_path / "index")


def test_jax_is_left_alone(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("print('jax is imported')\n")
    (tmp_path / "jax/lax.py").write_text("def top_k(*_):\n    print('jax runs')\n")
    program = "import retrievers.bm25, sys; print('jax' in sys.modules); import jax.lax"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["False", "jax is imported", ""]
