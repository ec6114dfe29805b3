import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from graphpo_agent.encoder import EncoderEmbedder
from graphpo_agent.errors import ModelError, ToolError
from retrievers.dense import DenseRetriever
from retrievers.dense_build import build_dense
from retrievers.encoders import resolve_encoder
from retrievers.faiss_index import (
    build_faiss,
    flat_vectors,
    map_faiss,
    parse_type,
    search_faiss,
)
from retrievers.index import merge_indexes
from retrievers.torch_flat import TorchFlat
from tests.retrievers.samples import make_encoder, passages, write_corpus
from tests.worlds import ROOT

QUERIES = ["alder0 birch0", "cedar1 alder2 oak3", "", "unknownword", "alder0 birch0", "elm4"]
TYPES = ["Flat", "SQ8", "IVF,SQ8", "IVF7,SQ8", "HNSW", "HNSW16"]
PROGRAM = (
    "import sys; from pathlib import Path; from retrievers.dense_build import build_dense\n"
    "from retrievers.encoders import resolve_encoder\n"
    "build_dense(Path(sys.argv[1]), Path(sys.argv[2]), resolve_encoder(sys.argv[3], preset='e5'), "
    "batch_size=1, index_type='SQ8')"
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("tiny-e5-v1") / "tiny-e5-v1")


@pytest.fixture(scope="module")
def world(tmp_path_factory, encoder):
    directory = tmp_path_factory.mktemp("dense")
    corpus = write_corpus(directory / "corpus.jsonl", [*passages(400), " "])
    for type_ in TYPES:
        build(corpus, directory / type_, model=encoder, index_type=type_, batch_size=8)
    return directory


def build(corpus, directory, model, preset=None, max_tokens=None, **settings):
    encoder = resolve_encoder(model, preset=preset, max_tokens=max_tokens)
    return build_dense(corpus, directory, encoder, **settings)


def expected(encoder, texts, query, topk):
    """All scores by hand, from texts written with E5's prefixes."""
    passages_ = EncoderEmbedder(encoder).embed([f"passage: {text}" for text in texts])
    scores = passages_ @ EncoderEmbedder(encoder).embed([f"query: {query}"])[0]
    return np.sort(scores)[::-1][:topk], scores


def test_flat_is_all_inner_products_of_prefixed_texts(world, encoder):
    texts = passages(400)
    found = DenseRetriever(world / "Flat").search(QUERIES, 5)
    for query, documents in zip(QUERIES, found, strict=True):
        if query.strip():
            best, scores = expected(encoder, texts, query, 5)
            np.testing.assert_allclose([d.score for d in documents], best, atol=1e-5)
            for document in documents:
                row = int(document.id[1:])
                assert document.score == pytest.approx(scores[row], abs=1e-5)
                assert document.contents == texts[row]
    assert found[2] == [] and found[0] == found[4]


@pytest.mark.parametrize("type_", TYPES[1:])
def test_every_type_finds_most_of_what_flat_finds(world, type_):
    queries = [text.split("\n")[1] for text in passages(60, seed=5)]
    exact = DenseRetriever(world / "Flat").search(queries, 10)
    found = DenseRetriever(world / type_, nprobe=1000, ef_search=200).search(queries, 10)
    hits = sum(
        len({d.id for d in x} & {d.id for d in y}) for x, y in zip(exact, found, strict=True)
    )
    assert hits >= 0.9 * sum(map(len, exact))


def write_faiss(path, factory, vectors, ids=None, metric=faiss.METRIC_INNER_PRODUCT):
    """An index as another program makes it."""
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    index.train(vectors)
    if ids is None and factory.startswith("IDMap"):
        ids = np.arange(len(vectors))
    index.add(vectors) if ids is None else index.add_with_ids(vectors, ids)
    faiss.write_index(index, str(path))
    return path


def cluster_vectors(count, dimension, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(40, dimension))
    vectors = centres[rng.integers(40, size=count)] + 0.4 * rng.normal(size=(count, dimension))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


WRAPPED = ["RR24,IVF64,Flat", "L2norm,HNSW8", "IVF64,SQ8,RFlat", "IDMap,OPQ8_24,IVF64,SQ8,RFlat"]


@pytest.mark.parametrize("type_", ["IVF64,SQ8", "HNSW8", *WRAPPED])
def test_looking_further_finds_more(tmp_path, type_):
    vectors, queries = cluster_vectors(3000, 24), cluster_vectors(100, 24, seed=1)
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    if type_ in WRAPPED:
        write_faiss(tmp_path / "index", type_, vectors)
    else:
        build_faiss(vectors, parse_type(type_, len(vectors)), tmp_path / "index")
    index = map_faiss(tmp_path / "index")

    def recall(nprobe, ef_search):
        _, rows = search_faiss(index, queries, 10, nprobe, ef_search)
        return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(exact, rows, strict=True)])

    assert recall(1, 1) < recall(64, 400) and recall(64, 400) >= 0.9


@pytest.mark.parametrize("block", [7, 1 << 18])
def test_torch_finds_what_flat_faiss_finds(tmp_path, monkeypatch, block):
    monkeypatch.setattr("retrievers.torch_flat._BLOCK_ROWS", block)
    vectors, queries = cluster_vectors(500, 8), cluster_vectors(20, 8, seed=1)
    build_faiss(vectors, parse_type("Flat", 500), tmp_path / "index")
    index = map_faiss(tmp_path / "index")
    np.testing.assert_array_equal(flat_vectors(index), vectors)
    scores, rows = TorchFlat(flat_vectors(index), "cpu").search(queries, 9)
    flat_scores, flat_rows = search_faiss(index, queries, 9, 1, 1)
    np.testing.assert_allclose(scores, flat_scores, atol=1e-5)
    assert (rows == flat_rows).mean() > 0.99
    assert TorchFlat(flat_vectors(index), "cpu").search(queries, 900)[1].shape == (20, 500)
    with pytest.raises(ToolError, match="vectors do not go to 'cuda:77'"):
        TorchFlat(vectors, "cuda:77")


@pytest.mark.parametrize("type_", TYPES)
def test_more_asked_for_than_there_is(world, type_):
    [found] = DenseRetriever(world / type_, nprobe=1000).search(["alder0"], 1000)
    ids = [document.id for document in found]
    assert len(ids) == len(set(ids)) and 380 <= len(ids) <= 401
    assert DenseRetriever(world / type_).search([], 3) == []


def test_remembered_queries_change_nothing_and_threads_may_share(world):
    queries = [text.split("\n")[1] for text in passages(50, seed=9)]
    expected_ = DenseRetriever(world / "Flat", cached_queries=0).search(queries, 3)
    retriever = DenseRetriever(world / "Flat", cached_queries=7)

    def ids(found):
        return [[document.id for document in each] for each in found]

    with ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda i: ids(retriever.search([queries[i % 50]], 3)), range(200))
        assert list(results) == [[ids(expected_)[i % 50]] for i in range(200)]
    assert ids(retriever.search(queries, 3)) == ids(expected_)


def test_a_killed_build_goes_on_where_it_stopped(tmp_path, encoder, capsys):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(500))
    whole = build(
        corpus, tmp_path / "whole", model=encoder, preset="e5", batch_size=1, index_type="SQ8"
    )
    command = [sys.executable, "-c", PROGRAM, str(corpus), str(tmp_path / "index"), str(encoder)]
    checkpoint = tmp_path / ".index.building" / "checkpoint.json"
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        while not checkpoint.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    rows = json.loads(checkpoint.read_text())["rows"]
    assert 0 < rows < 500 and not (tmp_path / "index").exists()
    with (tmp_path / ".index.building" / "vectors.f32").open("ab") as file:
        file.write(b"half a row that was not finished")
    capsys.readouterr()
    settings = {"model": encoder, "preset": "e5", "batch_size": 1, "index_type": "SQ8"}
    assert build(corpus, tmp_path / "index", **settings) == whole
    assert f"going on after {rows:,} documents" in capsys.readouterr().err
    for name in ("index.faiss", "vectors.f32", "offsets.npy"):
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index", "whole"]


@pytest.mark.parametrize("change", ["corpus", "setting", "encoder"])
def test_what_is_left_of_another_build_is_not_used(tmp_path, encoder, capsys, monkeypatch, change):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(60))
    model = tmp_path / "e5"
    model.mkdir()
    for file in encoder.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    embed, calls = EncoderEmbedder.embed, []

    def interrupted(self, texts):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embed(self, texts)

    monkeypatch.setattr(EncoderEmbedder, "embed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(corpus, tmp_path / "index", model=model, batch_size=1)
    assert (tmp_path / ".index.building").exists()
    if change == "corpus":
        write_corpus(corpus, passages(60, seed=1))
    if change == "encoder":
        os.utime(model / "config.json", (0, 0))
    settings = {"max_tokens": 9} if change == "setting" else {}
    build(corpus, tmp_path / "index", model=model, batch_size=1, **settings)
    assert "starting over" in capsys.readouterr().err
    build(corpus, tmp_path / "fresh", model=model, batch_size=1, **settings)
    new, fresh = (tmp_path / name / "index.faiss" for name in ("index", "fresh"))
    assert new.read_bytes() == fresh.read_bytes()


def test_an_index_that_does_not_fit_on_the_disk_is_an_error_not_half_an_index(tmp_path):
    child = (
        "import resource, sys\nfrom pathlib import Path\nimport numpy as np\n"
        "from retrievers.faiss_index import build_faiss, parse_type\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "vectors = np.ones((1000, 16), np.float32)\n"
        "build_faiss(vectors, parse_type('Flat', 1000), Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", child, str(tmp_path / "index.faiss")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "OSError: [Errno 27] File too large" in done.stderr


def test_search_r1s_own_index_is_opened_where_it_is(tmp_path, encoder):
    texts = passages(50)
    corpus = write_corpus(tmp_path / "wiki.jsonl", texts)
    vectors = EncoderEmbedder(encoder).embed([f"passage: {text}" for text in texts])
    write_faiss(tmp_path / "e5_Flat.index", "Flat", vectors)
    settings = {"model": encoder, "faiss_index": tmp_path / "e5_Flat.index"}
    build(corpus, tmp_path / "index", **settings)
    assert sorted(os.listdir(tmp_path / "index")) == ["manifest.json", "offsets.npy"]
    [found] = DenseRetriever(tmp_path / "index").search(["alder0 birch0"], 3)
    build(corpus, tmp_path / "own", model=encoder)
    [own] = DenseRetriever(tmp_path / "own").search(["alder0 birch0"], 3)
    assert [document.id for document in found] == [document.id for document in own]
    more = write_corpus(tmp_path / "more.jsonl", texts, first=50)
    build(more, tmp_path / "second", **settings)
    merge_indexes([tmp_path / "index", tmp_path / "second"], tmp_path / "merged")
    assert len(DenseRetriever(tmp_path / "merged").search(["alder0"], 1000)[0]) == 100
    inside = tmp_path / "index" / "e5_Flat.index"
    shutil.copyfile(tmp_path / "e5_Flat.index", inside)
    with pytest.raises(ToolError, match=r"lies in .*, which is to be replaced"):
        build(corpus, tmp_path / "index", model=encoder, faiss_index=inside)
    nested = write_corpus(tmp_path / "index" / "corpus.jsonl", texts)
    with pytest.raises(ToolError, match=r"lies in .*, which is to be replaced"):
        build(nested, tmp_path / "index", model=encoder)
    assert inside.exists() and nested.exists()
    shorter = write_corpus(tmp_path / "short.jsonl", texts[:-1])
    with pytest.raises(ToolError, match=r"holds 50 vectors but .* has 49 rows"):
        build(shorter, tmp_path / "other", **settings)
    (tmp_path / "e5_Flat.index").write_bytes(b"no index")
    with pytest.raises(ToolError, match="faiss index cannot be read"):  # told before the corpus
        build(tmp_path / "none.jsonl", tmp_path / "other", **settings)
    with pytest.raises(ToolError, match="faiss index cannot be read") as caught:
        DenseRetriever(tmp_path / "index")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "ids", "metric", "message"),
    [
        ("Flat", None, faiss.METRIC_L2, "another metric than the inner product .*metric 1"),
        ("HNSW8", None, faiss.METRIC_L2, "another metric than the inner product"),
        ("IDMap,Flat", range(7, 57), faiss.METRIC_INNER_PRODUCT, "numbers its vectors otherwise"),
        ("IDMap2,SQ8", range(49, -1, -1), faiss.METRIC_INNER_PRODUCT, "numbers its vectors other"),
    ],
)
def test_a_faiss_file_that_would_give_other_documents_is_refused(
    tmp_path, encoder, factory, ids, metric, message
):
    corpus = write_corpus(tmp_path / "wiki.jsonl", passages(50))
    settings = {"model": encoder, "faiss_index": tmp_path / "wiki.index"}
    vectors = cluster_vectors(50, 16)
    write_faiss(settings["faiss_index"], "IDMap,Flat", vectors)
    build(corpus, tmp_path / "index", **settings)
    assert len(DenseRetriever(tmp_path / "index").search(["alder0"], 3)[0]) == 3
    write_faiss(settings["faiss_index"], factory, vectors, ids and np.array(ids), metric)
    for use in (
        lambda: build(corpus, tmp_path / "other", **settings),
        lambda: DenseRetriever(tmp_path / "index"),
    ):
        with pytest.raises(ToolError, match=rf"wiki\.index: .*{message}") as caught:
            use()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "other").exists()


def test_settings_come_from_the_preset_that_is_named_or_told_by_the_name():
    e5 = resolve_encoder("intfloat/e5-base-v2")
    assert (e5.pooling, e5.query_prefix, e5.passage_prefix) == ("mean", "query: ", "passage: ")
    assert (e5.normalize, e5.max_tokens) == (True, 256)
    bge = resolve_encoder("BAAI/BGE-small-en")
    assert bge.pooling == "cls" and bge.query_prefix.startswith("Represent this sentence")
    assert resolve_encoder("x/e5-like", preset="plain", pooling="last").pooling == "last"
    assert resolve_encoder("my/bge", query_prefix="", normalize=False).query_prefix == ""
    for name in ("my/encoder", "snapshots/a3e5f0b6e51", "e5/model"):
        with pytest.raises(ToolError, match="preset must be one of e5, bge, plain"):
            resolve_encoder(name)
    with pytest.raises(ToolError, match="pooling must be one of mean, cls, last, found 'max'"):
        resolve_encoder("e5", pooling="max")
    with pytest.raises(ToolError, match="max_tokens must be at least 1, found 0"):
        resolve_encoder("e5", max_tokens=0)


def test_an_encoder_is_loaded_as_its_settings_say_from_wherever_it_was_named(encoder, monkeypatch):
    monkeypatch.chdir(encoder.parent)
    settings = resolve_encoder(encoder.name, preset="bge", normalize=False, max_tokens=6)
    assert settings.model == str(encoder.resolve())
    texts = passages(5)
    same = EncoderEmbedder(encoder, pooling="cls", normalize=False, prefix="oak ", max_tokens=6)
    loaded = settings.load("oak ", 2, "cpu")
    np.testing.assert_allclose(loaded.embed(texts), same.embed(texts), atol=1e-5)


def test_an_encoder_that_gives_no_numbers_makes_no_index(tmp_path, encoder):
    shutil.copytree(encoder, tmp_path / "e5")
    weights = load_file(tmp_path / "e5" / "model.safetensors")
    weights["embeddings.word_embeddings.weight"].fill_(float("nan"))
    save_file(weights, tmp_path / "e5" / "model.safetensors", {"format": "pt"})
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(20))
    with pytest.raises(ModelError, match="not finite for rows 0 to 15 of"):
        build(corpus, tmp_path / "index", model=tmp_path / "e5", batch_size=1)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("name", ["flat", "PQ8", "IVF,Flat", "IVF0,SQ8", "IVF61,SQ8", "HNSW1", ""])
def test_types_that_cannot_be_are_refused_before_anything_is_encoded(tmp_path, encoder, name):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(60))
    with pytest.raises(ToolError, match="dense index: ") as caught:
        build(corpus, tmp_path / "index", model=encoder, index_type=name)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_another_encoder_at_search_time_is_noticed(world, tmp_path, encoder):
    for file in encoder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    moved = DenseRetriever(world / "Flat", model=str(tmp_path))
    assert moved.search(QUERIES, 2) == DenseRetriever(world / "Flat").search(QUERIES, 2)
    with pytest.raises(ModelError, match="cannot be loaded"):
        DenseRetriever(world / "Flat", model=str(tmp_path / "nothing"))
    with pytest.raises(ToolError, match="only type Flat has the vectors"):
        DenseRetriever(world / "SQ8", index_device="cuda")
    with pytest.raises(ToolError, match="device 'cuda:77' cannot be used"):
        DenseRetriever(world / "Flat", device="cuda:77")
    with pytest.raises(ToolError, match="cached_queries must be a whole number of at least 0"):
        DenseRetriever(world / "Flat", cached_queries=-1)
    with pytest.raises(ToolError, match="nprobe must be a whole number of at least 1"):
        DenseRetriever(world / "IVF,SQ8", nprobe=0)
    (world / "HNSW16" / "index.faiss").rename(world / "HNSW16" / "elsewhere")
    with pytest.raises(ToolError, match="there is no faiss index"):
        DenseRetriever(world / "HNSW16")


def test_without_faiss_the_message_names_what_can_be_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolError, match=r"needs faiss-cpu: pip install faiss-cpu$"):
        map_faiss(tmp_path / "index")
