"""Builds that are killed, interrupted or run out of disk."""

import json
import os
import pkgutil
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import DataError, ToolError
from retrievers.bm25 import build_bm25
from retrievers.corpus import Corpus
from retrievers.index import build_index, describe_index, open_index
from retrievers.index_build import link
from retrievers.lucene_build import _part_starts
from tests.retrievers.samples import WORDS, passages, write_corpus
from tests.worlds import ROOT

PROGRAM = """
import sys, time
from graphpo_agent.cli import main
from retrievers import bm25_words, index_build, lucene_build
bm25_words._CHUNK_DOCS, lucene_build._PART_BYTES = 100, 80_000
replace = index_build.Path.replace
index_build.Path.replace = lambda *paths: (replace(*paths), time.sleep(0.1))
sys.exit(main(sys.argv[1:]))
"""
"""The command line, with parts that fit a small corpus and a moment's rest after each."""
TEXTS = passages(1200, words=40)


def start(kind, directory, *options, **settings):
    arguments = ["--corpus", str(directory / "corpus.jsonl"), "--out", str(directory / "index")]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "index", "build", kind, *arguments, *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def rows_of(directory):
    """What the checkpoint says, read as another program would."""
    path = directory / ".index.building" / "checkpoint.json"
    return json.loads(path.read_text())["rows"] if path.exists() else 0


def children_of(process):
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Path("/proc") / pid for pid in pids]


def found(index):
    rng = random.Random(1)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    queries = [" ".join(rng.choices(WORDS, weights, k=rng.randint(1, 6))) for _ in range(200)]
    return open_index(index).search(queries, 10)


def same_index(kind, one, other):
    if kind == "lucene":
        return found(one) == found(other)
    return files_of(one) == files_of(other)


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """By kind, the index of an uninterrupted build in one part."""
    directory = tmp_path_factory.mktemp("whole")
    write_corpus(directory / "corpus.jsonl", TEXTS)

    def build(kind):
        if not (directory / kind).exists():
            build_index(kind, directory / "corpus.jsonl", directory / kind)
        return directory / kind

    return build


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("bm25", [(0, signal.SIGKILL), (200, signal.SIGINT), (1199, signal.SIGKILL)]),
        pytest.param(
            "lucene", [(0, signal.SIGINT), (1199, signal.SIGKILL)], marks=pytest.mark.lucene
        ),
    ],
)
def test_a_build_stopped_again_and_again_ends_in_the_same_index(tmp_path, whole, kind, ends):
    write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    reached = 0
    for rows, number in ends:  # the last time, only the final step is missing
        with start(kind, tmp_path) as process:
            while rows_of(tmp_path) <= rows and process.poll() is None:
                time.sleep(0.01)
            children = children_of(process)
            process.send_signal(number)
            errors = process.communicate(timeout=60)[1]
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        assert number != signal.SIGINT or errors.splitlines()[-1] == "graphpo: interrupted"
        assert (f"going on after {reached:,} documents" in errors) == (reached > 0)
        assert bool(children) == (kind == "lucene")
        assert_gone(children)
        assert rows_of(tmp_path) > max(rows, reached) and not (tmp_path / "index").exists()
        reached = rows_of(tmp_path)
        with pytest.raises(ToolError, match=f"no index yet: .* {reached:,} of 1,200 documents"):
            describe_index(tmp_path / "index")
    with start(kind, tmp_path) as process:
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0 and "going on after 1,200 documents" in errors
    assert same_index(kind, tmp_path / "index", whole(kind))
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]
    assert describe_index(tmp_path / "index")["num_docs"] == 1200


def assert_gone(processes):
    deadline = time.monotonic() + 10
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(process):
    try:
        return (process / "stat").read_text().rsplit(")")[-1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("kind", "most", "options"),
    [
        ("bm25", 50_000, []),
        pytest.param("lucene", 20_000, ["threads=8"], marks=pytest.mark.lucene),
    ],
)
def test_a_full_disk_is_one_line_and_the_build_goes_on_when_there_is_room(
    tmp_path, whole, kind, most, options
):
    write_corpus(tmp_path / "corpus.jsonl", TEXTS)

    def limit():  # no file may grow further: writing fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    with start(kind, tmp_path, *options, preexec_fn=limit) as process:
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and "Traceback" not in errors
    assert "cannot be written (File too large)" in errors.splitlines()[-1]
    assert errors.endswith("repeat the command, it goes on where it stopped\n")
    assert not (tmp_path / "index").exists()
    reached = rows_of(tmp_path)
    assert reached > 0
    with start(kind, tmp_path) as process:
        assert f"going on after {reached:,} documents" in process.communicate(timeout=120)[1]
    assert same_index(kind, tmp_path / "index", whole(kind))


MOMENTS = [
    ("retrievers.index_build.os.fsync", 8),
    ("retrievers.index_build.Path.replace", 1),
    ("retrievers.index_build.Path.replace", 5),
    ("bm25s.BM25.save", 1),
    ("retrievers.index_files.np.save", 1),
    ("retrievers.index_build.replace_directory", 1),
    ("graphpo_agent.atomic.os.rename", 1),
    ("graphpo_agent.atomic.os.rename", 2),
    ("retrievers.index_build.shutil.rmtree", 3),
]
"""What is called in a build, and which of its calls."""


@pytest.mark.parametrize(("function", "call"), MOMENTS)
def test_no_moment_of_a_kill_leaves_half_an_index(tmp_path, whole, monkeypatch, function, call):
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    build_bm25(corpus, tmp_path / "index", k1=2.0)
    old = files_of(tmp_path / "index")
    monkeypatch.setattr("retrievers.bm25_words._CHUNK_DOCS", 250)
    child = os.fork()
    if child == 0:
        try:
            die_at(monkeypatch, function, call)
            build_bm25(corpus, tmp_path / "index")
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    new = files_of(whole("bm25"))
    if (tmp_path / "index").exists():
        assert files_of(tmp_path / "index") in (old, new)
    build_bm25(corpus, tmp_path / "index")
    assert files_of(tmp_path / "index") == new
    assert sorted(os.listdir(tmp_path)) == ["corpus.jsonl", "index"]


def die_at(monkeypatch, function, call):
    calls = []
    usual = pkgutil.resolve_name(function)

    def dying(*arguments, **options):
        calls.append(function)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*arguments, **options)

    monkeypatch.setattr(function, dying)


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """The corpus of a bm25 build that was stopped after 200 documents."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    monkeypatch.setattr("retrievers.bm25_words._CHUNK_DOCS", 100)
    texts = Corpus.texts

    def stopped(self, start, stop):
        if start == 200:
            raise KeyboardInterrupt
        return texts(self, start, stop)

    with monkeypatch.context() as patched:
        patched.setattr(Corpus, "texts", stopped)
        with pytest.raises(KeyboardInterrupt):
            build_bm25(corpus, tmp_path / "index")
    assert rows_of(tmp_path) == 200
    return corpus


def test_what_the_finished_part_does_not_depend_on_may_change(interrupted, tmp_path, capsys):
    build_bm25(interrupted, tmp_path / "index", k1=2.0)
    assert "going on after 200 documents" in capsys.readouterr().err
    build_bm25(interrupted, tmp_path / "fresh", k1=2.0)
    assert files_of(tmp_path / "index") == files_of(tmp_path / "fresh")


@pytest.mark.parametrize("change", ["corpus", "option", "pattern", "words", "checkpoint"])
def test_what_is_left_of_another_build_is_not_used(
    interrupted, tmp_path, capsys, monkeypatch, change
):
    left, options = tmp_path / ".index.building", {}
    said = "an interrupted build of another corpus or other options is here: starting over"
    if change == "corpus":  # of the same size, with the same beginning
        interrupted.write_text(interrupted.read_text()[:-10] + 'xyzzyx"}\n'.rjust(10, "q"))
    elif change == "option":
        options = {"stemmer": None}
    elif change == "pattern":
        monkeypatch.setattr("retrievers.bm25._WORDS", "[a-z]+")
    elif change == "words":
        os.truncate(left / "words.i32", 10)
        said = "an interrupted build is here and has lost files: starting over"
    else:
        (left / "checkpoint.json").write_text("")
        said = ""
    build_bm25(interrupted, tmp_path / "index", **options)
    errors = capsys.readouterr().err
    assert said in errors and "going on" not in errors
    build_bm25(interrupted, tmp_path / "fresh", **options)
    assert files_of(tmp_path / "index") == files_of(tmp_path / "fresh")


@pytest.mark.parametrize("moment", ["words", "digest"])
def test_a_corpus_that_is_replaced_during_a_build_makes_no_index(tmp_path, monkeypatch, moment):
    corpus = write_corpus(tmp_path / "corpus.jsonl", TEXTS)
    new = write_corpus(tmp_path / "new.jsonl", TEXTS[::-1])
    function = {"words": "bm25s.BM25.index", "digest": "retrievers.index_build.hashlib.file_digest"}
    usual = pkgutil.resolve_name(function[moment])

    def replaced(*arguments, **options):
        new.replace(corpus)
        return usual(*arguments, **options)

    monkeypatch.setattr(function[moment], replaced)
    with pytest.raises(DataError, match=r"corpus\.jsonl: has changed since it was opened; start"):
        build_bm25(corpus, tmp_path / "index")
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_half_a_part_is_cut_off(interrupted, tmp_path, whole):
    for name in ("words.i32", "lengths.i32", "vocabulary.txt"):
        with (tmp_path / ".index.building" / name).open("ab") as file:
            file.write(b"alder1\nwhat a dying process wrote")
    build_bm25(interrupted, tmp_path / "index")
    assert files_of(tmp_path / "index") == files_of(whole("bm25"))


def test_files_are_copied_where_they_cannot_be_linked(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    (tmp_path / "a").write_bytes(b"data")
    link(tmp_path / "a", tmp_path / "linked")
    monkeypatch.setattr(os, "link", refuse)
    link(tmp_path / "a", tmp_path / "copied")
    assert (tmp_path / "linked").samefile(tmp_path / "a")
    assert not (tmp_path / "copied").samefile(tmp_path / "a")
    assert (tmp_path / "copied").read_bytes() == b"data"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 60))
def test_parts_take_as_many_rows_as_fit(sizes, most):
    ends = np.cumsum(sizes)
    corpus = Corpus(Path(__file__), np.stack([ends - sizes, ends], axis=1))
    expected, held = [0], sizes[0]
    for row in range(1, len(sizes)):
        if held + sizes[row] > most:
            expected.append(row)
            held = 0
        held += sizes[row]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("retrievers.lucene_build._PART_BYTES", most)
        assert _part_starts(corpus) == expected
