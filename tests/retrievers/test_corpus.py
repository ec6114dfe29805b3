import gzip
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrievers.corpus as corpus_module
from graphpo_agent.errors import DataError
from retrievers.corpus import Corpus, line_ranges, read_corpus, scan_corpus
from tests.retrievers.samples import write_corpus

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
lines = st.lists(
    st.one_of(st.sampled_from(["", "  ", None]), st.tuples(any_text, st.none() | any_text)),
    max_size=12,
).filter(lambda each: any(isinstance(line, tuple) for line in each))


@settings(max_examples=60, deadline=None)
@given(lines=lines, end=st.sampled_from(["\n", "\r\n"]), ends=st.booleans(), ascii_=st.booleans())
def test_rows_are_what_a_plain_reader_reads(tmp_path_factory, lines, end, ends, ascii_):
    rows = [
        {"id": f"{number}", "contents": line[0], "extra": [1], "url": line[1]}
        for number, line in enumerate(lines)
        if isinstance(line, tuple)
    ]
    left = iter(rows)
    texts = [
        json.dumps(next(left), ensure_ascii=ascii_) if isinstance(line, tuple) else line or ""
        for line in lines
    ]
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_bytes((end.join(texts) + (end if ends else "")).encode())
    corpus = read_corpus(path)
    read = [corpus.document(row) for row in range(len(corpus))]
    assert [(each.id, each.contents, each.url) for each in read] == [
        (row["id"], row["contents"], row["url"]) for row in rows
    ]
    assert corpus.texts(1, 100) == [row["contents"] for row in rows[1:]]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 24])
@pytest.mark.parametrize("text", ["{}\n\n\r\n{ }\r\n", "\n{  }", "abc\n" * 40, "\n\nabc\n\n"])
def test_finding_lines_agrees_with_reading_them(tmp_path, monkeypatch, block, text):
    monkeypatch.setattr(corpus_module, "_BLOCK_BYTES", block)
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(text.encode())
    expected, start = [], 0
    for line in text.encode().splitlines(keepends=True):
        if line.strip():
            expected.append([start, start + len(line)])
        start += len(line)
    assert line_ranges(path).tolist() == [pair for pair in expected if pair[1] - pair[0] > 2]


def test_finding_lines_of_a_checked_corpus_gives_its_rows(tmp_path):
    path = write_corpus(tmp_path / "corpus.jsonl", ["a", "", "b" * 1000])
    np.testing.assert_array_equal(line_ranges(path), scan_corpus(path))


def test_a_compressed_corpus_is_told(tmp_path):
    path = write_corpus(tmp_path / "corpus.jsonl", ["oak"])
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match="it is compressed; unpack it with gunzip"):
        scan_corpus(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nothing", r"4: not valid JSON \(Expecting value at column 1\)$"),
        ("[]", "expected a JSON object"),
        ('{"contents": "x"}', "field 'id' must be a string"),
        ('{"id": 3, "contents": "x"}', "field 'id' must be a string"),
        ('{"id": "3"}', "field 'contents' must be a string"),
        ('{"id": "3", "contents": "x", "url": 7}', "field 'url' must be a string"),
        ('{"id": "d1", "contents": "x"}', "field 'id' repeats 'd1'"),
        ('{"id": "3", "contents": "\udc80"}', "not valid JSON"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, message):
    path = write_corpus(tmp_path / "corpus.jsonl", ["oak", "elm"])
    with path.open("ab") as file:
        file.write(b"\n" + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        scan_corpus(path)
    assert str(caught.value).startswith(f"{path}:4: ") and "\n" not in str(caught.value)


def test_ids_of_equal_hash_are_no_repetition(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "hash", lambda text: len(text), raising=False)
    path = write_corpus(tmp_path / "corpus.jsonl", ["x"] * 30)
    assert len(scan_corpus(path)) == 30
    with path.open("a") as file:
        file.write('{"id": "d7", "contents": "x"}\n')
    with pytest.raises(DataError, match=r"corpus.jsonl:31: field 'id' repeats 'd7'"):
        scan_corpus(path)


def test_what_utf8_cannot_hold_is_replaced(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(r'{"id": "0", "contents": "a \ud83c\udf33 b \ud83c c"}')
    assert read_corpus(path).document(0).contents == "a 🌳 b ? c"


def test_a_missing_and_an_empty_corpus(tmp_path):
    for read in (scan_corpus, line_ranges):
        with pytest.raises(DataError, match="cannot be read"):
            read(tmp_path / "nothing")
        (tmp_path / "empty").write_text("\n\n")
        with pytest.raises(DataError, match="holds no documents"):
            read(tmp_path / "empty")


def test_a_row_that_was_never_checked_is_named_when_it_is_read(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "0", "contents": "x"}\nnonsense\n')
    corpus = Corpus(path, line_ranges(path))
    assert corpus.document(0, 2.5).score == 2.5
    with pytest.raises(DataError, match="row 1: not valid JSON"):
        corpus.document(1)


def test_a_file_that_is_cut_while_it_is_open_is_named(tmp_path):
    path = write_corpus(tmp_path / "corpus.jsonl", ["an oak"] * 1000)
    corpus = read_corpus(path)
    os.truncate(path, 5000)
    assert corpus.document(0).id == "d0"
    with pytest.raises(DataError, match=r"corpus\.jsonl: has changed since it was opened"):
        corpus.document(999)


def test_a_file_that_is_replaced_while_it_is_checked_is_named(tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "corpus.jsonl", ["an oak"] * 10)
    new = write_corpus(tmp_path / "new.jsonl", ["an elm"] * 10)

    def scan(path):
        ranges = scan_corpus(path)
        new.replace(path)
        return ranges

    monkeypatch.setattr(corpus_module, "scan_corpus", scan)
    with pytest.raises(DataError, match=r"corpus\.jsonl: has changed since it was opened"):
        read_corpus(path)
