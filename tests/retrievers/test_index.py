import json
import math
import os
import shutil

import numpy as np
import pytest

from graphpo_agent.errors import DataError, ModelError, RunError, ToolError
from retrievers.bm25 import Bm25Retriever
from retrievers.dense import DenseRetriever
from retrievers.index import build_index, describe_index, merge_indexes, open_index
from retrievers.index_memory import estimate_num_docs, predict_memory
from retrievers.index_options import BUILD_OPTIONS, SEARCH_OPTIONS, choose
from tests.retrievers.samples import make_encoder, passages, write_corpus

DENSE = {"kind": "dense", "index": "index.faiss", "factory": "Flat", "dimension": 16}
QUERIES = ["alder0 birch3 cedar1", "oak19", "elm4 elm4", "nothing"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_encoder(tmp_path_factory.mktemp("models") / "tiny-e5")


def build(kind, corpus, out, encoder, **options):
    if kind == "dense":
        options = {"model": str(encoder), **options}
    return build_index(kind, corpus, out, **options)


@pytest.mark.parametrize(("kind", "class_"), [("bm25", Bm25Retriever), ("dense", DenseRetriever)])
def test_an_index_is_built_described_and_opened_by_its_kind(
    tmp_path, encoder, capsys, kind, class_
):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(300))
    manifest = build(kind, corpus, tmp_path / "index", encoder)
    before = capsys.readouterr().err
    assert f"{kind} index of about 300 documents" in before and "memory to build" in before
    described = describe_index(tmp_path / "index")
    assert {name: described[name] for name in manifest} == manifest
    assert json.loads(json.dumps(described)) == described
    retriever = open_index(tmp_path / "index")
    assert isinstance(retriever, class_)
    assert f"{kind} index of 300 documents, up to" in capsys.readouterr().err
    direct = class_(tmp_path / "index").search(QUERIES, 3)
    assert retriever.search(QUERIES, 3) == direct and direct[0]


@pytest.mark.parametrize("manifest", ['{"seed": 0, "command": []}', '{"name": "page"}', "[]", "?"])
def test_a_directory_of_something_else_is_not_replaced(tmp_path, capsys, manifest):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(5))
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "manifest.json").write_text(manifest)
    with pytest.raises(ToolError, match="run: exists and is not an index"):
        build_index("bm25", corpus, run)
    assert capsys.readouterr().err == ""
    assert (run / "checkpoints").is_dir() and (run / "manifest.json").read_text() == manifest


def test_an_index_behind_a_link_is_replaced_where_it_is(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(5))
    place, link = tmp_path / "big" / "disk" / "index", tmp_path / "link"
    place.mkdir(parents=True)
    build_index("bm25", corpus, tmp_path / "first")
    (tmp_path / "first").rename(place)
    link.symlink_to(place)
    build_index("bm25", corpus, link, k1=1.2)
    assert link.is_symlink() and describe_index(place)["options"]["k1"] == 1.2
    assert open_index(link).search(QUERIES, 3) == open_index(place).search(QUERIES, 3)
    more = write_corpus(tmp_path / "more.jsonl", passages(5), first=5)
    for each, shard in ((corpus, "one"), (more, "two")):
        build_index("bm25", each, tmp_path / shard)
    merge_indexes([tmp_path / "one", tmp_path / "two"], link)
    assert link.is_symlink() and describe_index(link)["num_docs"] == 10
    left = {"big", "corpus.jsonl", "link", "more.jsonl", "one", "two"}
    assert set(os.listdir(tmp_path)) == left and os.listdir(place.parent) == ["index"]


@pytest.mark.parametrize("failing", [1, 2])
def test_an_index_that_cannot_take_its_place_leaves_the_old_one(tmp_path, rename_fails, failing):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(5))
    build_index("bm25", corpus, tmp_path / "index")
    rename_fails(failing)
    with pytest.raises(ToolError, match=r"index: cannot be written \(No space left"):
        build_index("bm25", corpus, tmp_path / "index", k1=1.2)
    assert describe_index(tmp_path / "index")["options"]["k1"] == 0.9
    build_index("bm25", corpus, tmp_path / "index", k1=1.2)
    assert describe_index(tmp_path / "index")["options"]["k1"] == 1.2
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]


@pytest.mark.parametrize("name", ["data.csc.index.npy", "vocab.index.json", "offsets.npy"])
@pytest.mark.parametrize("content", [None, b""])
def test_an_index_with_a_damaged_file_is_not_told_as_one(tmp_path, name, content):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(10))
    build_index("bm25", corpus, tmp_path / "index", stemmer="none")
    (tmp_path / "index" / name).unlink()
    if content is not None:
        (tmp_path / "index" / name).write_bytes(content)
    for use in (open_index, describe_index):
        with pytest.raises(ToolError, match="the index cannot be read"):
            use(tmp_path / "index")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bm25", {}),
        ("dense", {"index_type": "Flat"}),
        ("dense", {"index_type": "SQ8"}),
        ("dense", {"index_type": "IVF,SQ8", "keep_vectors": False}),
        ("dense", {"index_type": "HNSW8"}),
    ],
)
def test_what_was_predicted_is_about_what_it_takes(tmp_path, encoder, kind, options):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(4000, words=60))
    build(kind, corpus, tmp_path / "index", encoder, **options)
    described = describe_index(tmp_path / "index")
    factor = 2 if kind == "bm25" else 1.2
    for what in ("disk_bytes", "search_bytes"):
        ratio = described["predicted"][what] / described["actual"][what]
        assert 1 / factor < ratio < factor, (what, described)


def test_predictions_for_wikipedia_are_the_published_sizes():
    def gigabytes(index_type):
        options = {"index_type": index_type, "keep_vectors": False}
        needs = predict_memory(
            "dense", num_docs=21_000_000, corpus_bytes=14 * 10**9, options=options, dimension=768
        )
        return round(needs.search_bytes / 1e9, 1)

    assert gigabytes("Flat") == 64.5
    assert gigabytes("SQ8") == 16.1
    assert 16.1 < gigabytes("IVF,SQ8") < 17
    assert 70 < gigabytes("HNSW32") < 72


def test_the_number_of_documents_is_guessed_from_the_head_of_the_file(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(30_000))
    assert corpus.stat().st_size > 2 * 2**20
    assert estimate_num_docs(corpus) == pytest.approx(30_000, rel=0.05)
    (tmp_path / "one.jsonl").write_text('{"id": "0", "contents": "no line end"}')
    assert estimate_num_docs(tmp_path / "one.jsonl") == 1
    with pytest.raises(DataError, match="cannot be read"):
        estimate_num_docs(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bm25", {"k1": 1.2, "stopwords": "none"}),
        ("dense", {}),
        ("dense", {"index_type": "SQ8"}),
        ("dense", {"index_type": "IVF,SQ8"}),
    ],
)
def test_merged_shards_are_the_index_of_the_whole_corpus(
    tmp_path, encoder, monkeypatch, kind, options
):
    texts = passages(300)
    whole = write_corpus(tmp_path / "whole.jsonl", texts)
    build(kind, whole, tmp_path / "whole", encoder, **options)
    for name, first, last in (("a", 0, 110), ("b", 110, 111), ("c", 111, 300)):
        shard = write_corpus(tmp_path / f"{name}.jsonl", texts[first:last], first)
        shard.write_text("\n" + shard.read_text().rstrip("\n"))
        build(kind, shard, tmp_path / name, encoder, **options)

    def encode(*_):
        raise AssertionError("nothing may be encoded again")

    monkeypatch.setattr("retrievers.dense_build._encode", encode)
    monkeypatch.setattr("retrievers.dense_build._BLOCK_ROWS", 50)
    merged = merge_indexes([tmp_path / name for name in "abc"], tmp_path / "merged")
    assert merged["num_docs"] == 300
    expected = open_index(tmp_path / "whole").search(QUERIES, 20)
    for directory in ("a", "b", "c"):
        (tmp_path / directory).rename(tmp_path / f"gone-{directory}")
        (tmp_path / f"{directory}.jsonl").unlink()
    found = open_index(tmp_path / "merged").search(QUERIES, 20)
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_allclose([d.score for d in each], [d.score for d in other], atol=2e-3)
        assert len({d.id for d in each} & {d.id for d in other}) >= 0.9 * len(other)
    assert describe_index(tmp_path / "merged")["corpus"] == "corpus.jsonl"


def test_indexes_that_do_not_go_together_are_not_merged(tmp_path, encoder):
    corpus = write_corpus(tmp_path / "a.jsonl", passages(40))
    other = write_corpus(tmp_path / "b.jsonl", passages(40), first=39)
    places = {name: tmp_path / name for name in ("a", "b", "k1", "d1", "d2", "out")}
    build_index("bm25", corpus, places["a"])
    build_index("bm25", other, places["b"])
    build_index("bm25", other, places["k1"], k1=2.0)
    for name, file in (("d1", corpus), ("d2", other)):
        build("dense", file, places[name], encoder, index_type="SQ8", keep_vectors=False)
    shutil.copytree(places["a"], tmp_path / "torn")
    (tmp_path / "torn" / "offsets.npy").unlink()
    for names, error, message in [
        ("a", ToolError, "at least 2 indexes, found 1"),
        ("a k1", ToolError, "differ in options"),
        ("a d1", ToolError, "differ in kind"),
        ("a nothing", ToolError, r"holds no index \(manifest.json: No such file"),
        ("a torn", ToolError, r"the index cannot be read \(offsets.npy: No such file"),
        ("a b", DataError, "do not go together .*field 'id' repeats 'd39'"),
        ("d1 d2", ToolError, "has not kept its vectors"),
    ]:
        with pytest.raises(error, match=message) as caught:
            merge_indexes([tmp_path / name for name in names.split()], places["out"])
        assert "\n" not in str(caught.value)
    (tmp_path / "link").symlink_to(places["b"])
    for same in ("b", "link"):
        with pytest.raises(ToolError, match="is one of the merged"):
            merge_indexes([places["a"], tmp_path / same], places["b"])
    corpus.write_text(corpus.read_text() + "\n")
    with pytest.raises(ToolError, match="has changed since it was indexed"):
        merge_indexes([places["a"], places["b"]], places["out"])
    assert not [name for name in os.listdir(tmp_path) if "out" in name]


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("bm26", {}, ToolError, "kind must be one of bm25, lucene, dense"),
        ("bm25", {"nprobe": 3}, ToolError, "no option 'nprobe'; choose from k1, b"),
        ("bm25", {"k1": math.inf}, ToolError, "k1 must be at least 0"),
        ("bm25", {"b": "0.4"}, ToolError, "b must be of type float, found '0.4'"),
        ("dense", {}, ToolError, "needs model"),
        (
            "dense",
            {"model": "/no/e5"},
            ModelError,
            "'/no/e5' cannot be loaded: there is no such directory$",
        ),
        ("dense", {"model": "/no/model"}, ToolError, "preset must be one of e5"),
        ("dense", {"model": "/no/e5", "batch_size": 0}, ToolError, "batch_size must be a whole"),
        ("dense", {"model": "/no/e5", "device": "abacus"}, ToolError, "device 'abacus' cannot be"),
        ("lucene", {"threads": 0}, ToolError, "threads must be a whole number of at least 1"),
        ("lucene", {"heap": "2 GB"}, ToolError, "heap must be a size"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_no_directory(
    tmp_path, capsys, kind, options, error, message
):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(10))
    with pytest.raises(error, match=message) as caught:
        build_index(kind, corpus, tmp_path / "index", **options)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["corpus.jsonl"] and capsys.readouterr().err == ""


def test_the_least_values_and_none_where_it_is_the_default_are_options(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(5))
    build_index("bm25", corpus, tmp_path / "index", k1=0, b=0)
    options = describe_index(tmp_path / "index")["options"]
    assert (options["k1"], options["b"]) == (0, 0)
    assert choose(BUILD_OPTIONS, "dense", {"preset": None})["preset"] is None


def test_an_index_of_another_kind_is_not_searched(tmp_path, encoder):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(5))
    build("dense", corpus, tmp_path / "index", encoder)
    with pytest.raises(ToolError, match="field 'kind' must be bm25, found dense"):
        Bm25Retriever(tmp_path / "index")


def test_an_index_that_cannot_be_opened_is_told(tmp_path):
    with pytest.raises(ToolError, match="holds no index"):
        open_index(tmp_path)
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(10))
    build_index("bm25", corpus, tmp_path / "index", stemmer="none")
    with pytest.raises(ToolError, match="no option 'k1'; choose from backend"):
        open_index(tmp_path / "index", k1=1.0)
    corpus.unlink()
    for use in (open_index, describe_index):
        with pytest.raises(ToolError, match=r"its corpus .* cannot be read"):
            use(tmp_path / "index")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "field 'kind' must be bm25, lucene, dense, found None"),
        ({"kind": None}, "field 'kind' must be"),
        ({"kind": "web"}, "field 'kind' must be bm25, lucene, dense, found web"),
        ({"kind": "dense"}, "field 'index' must be a str"),
        ({"options": None}, "field 'options' must be a dict"),
        ({"options": {}}, "field 'options.k1' must be a float"),
        ({"options": {"k1": 1, "b": 0}}, r"field 'options.stemmer' must be a str \| None"),
        ({"kind": "lucene", "index": "l", "options": {}}, "field 'options.threads' must be a int"),
        (
            DENSE | {"options": {"index_type": None, "keep_vectors": True}},
            "field 'options.encoder.model' must be a str",
        ),
        (DENSE | {"dimension": None}, "field 'dimension' must be a int"),
        ({"corpus": 5}, "field 'corpus' must be a str"),
        ({"corpus_head_sha256": None}, "field 'corpus_head_sha256' must be a str"),
        ({"num_docs": "10"}, "field 'num_docs' must be a int"),
    ],
)
def test_a_manifest_of_something_else_is_one_line(tmp_path, change, message):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(10))
    build_index("bm25", corpus, tmp_path / "index")
    file = tmp_path / "index" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | change if isinstance(change, dict) else change))
    for use in (open_index, describe_index):
        with pytest.raises(ToolError, match=message) as caught:
            use(tmp_path / "index")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [b"", b"\x93NUMPY", b"junk"])
def test_damaged_byte_ranges_are_one_line(tmp_path, damage):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(10))
    build_index("bm25", corpus, tmp_path / "index")
    (tmp_path / "index" / "offsets.npy").write_bytes(damage)
    for use in (open_index, describe_index):
        with pytest.raises(ToolError, match=r"the index cannot be read .* build it with") as caught:
            use(tmp_path / "index")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["bm25", "dense"])
def test_an_empty_file_and_one_of_another_index_are_told_before_a_search(tmp_path, encoder, kind):
    for name, count in [("index", 10), ("other", 30)]:
        corpus = write_corpus(tmp_path / f"{name}.jsonl", passages(count))
        build(kind, corpus, tmp_path / name, encoder)
    files = [each for each in (tmp_path / "index").iterdir() if each.name != "vectors.f32"]
    for file in files:
        content = file.read_bytes()
        for wrong in (b"", (tmp_path / "other" / file.name).read_bytes()):
            file.write_bytes(wrong)
            with pytest.raises(ToolError, match=r"cannot be read|holds no index|holds 30 vec"):
                open_index(tmp_path / "index")
        file.write_bytes(content)
    assert open_index(tmp_path / "index").search(QUERIES, 3)


@pytest.mark.parametrize("place", ["x" * 300, "corpus.jsonl/index", "/proc/nowhere/index"])
def test_a_place_where_no_directory_can_be_made_is_told_first(tmp_path, capsys, place):
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages(10))
    with pytest.raises(RunError) as caught:
        build_index("bm25", corpus, tmp_path / place)
    assert str(tmp_path / place) in str(caught.value) and capsys.readouterr().err == ""


def test_every_kind_has_options_with_help():
    for table in (BUILD_OPTIONS, SEARCH_OPTIONS):
        assert list(table) == ["bm25", "lucene", "dense"]
        for options in table.values():
            assert all(option.help for option in options)
            assert all(
                option.default is None or type(option.default) is option.type for option in options
            )
