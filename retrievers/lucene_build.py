"""Lucene indexes (Anserini) of a corpus: in parts, so that it can be interrupted, then merged."""

import codecs
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from graphpo_agent.net.checks import check_counts
from retrievers.corpus import Corpus, read_corpus
from retrievers.index_build import Build, build_directory, corpus_source, link, refuse_inside
from retrievers.index_files import finish_index, relative_path
from retrievers.jvm import java_jar
from retrievers.lucene import check_holds_lucene
from retrievers.lucene_process import LuceneProcess, java_failure
from retrievers.progress import progress, say

__all__ = ["build_lucene", "write_lucene"]

_INDEX = "lucene"
_PART_BYTES = 1 << 28
"""Of the corpus, at most, between two points from which an interrupted build goes on."""
_ANSERINI = ("-collection", "JsonCollection", "-generator", "DefaultLuceneDocumentGenerator")
_SO_FAR = re.compile(r"([\d,]+) documents indexed")
_COUNTED = re.compile(r"(?:- empty|^in the index): +([\d,]+)$")
_ERROR = re.compile(r" (?:ERROR|FATAL) .*? - (.+)")


def build_lucene(
    corpus_path: Path,
    directory: Path,
    *,
    threads: int = 2,
    store_raw: bool = False,
    heap: str = "2g",
    lucene_index: Path | str | None = None,
) -> dict[str, Any]:
    """Index a corpus; the directory appears, or is replaced, only when complete.

    The same call goes on after the last complete part of an interrupted one, as long as the corpus
    and ``store_raw`` are as they were.

    Args:
        corpus_path: Search-R1's corpus JSONL; it must stay where it is, unchanged.
        directory: where the index goes; an index that is there is replaced.
        threads: that index at once.
        store_raw: keep the rows in the index too, under their own ids, so that pyserini can use
            it without the corpus. Otherwise documents are numbered by corpus row.
        heap: Java's memory, such as ``2g``.
        lucene_index: a finished index of pyserini's whose ids are the row numbers of this corpus
            (Search-R1's), to be used where it is instead of indexing anything.

    Returns:
        The manifest; see ``finish_index``.

    Raises:
        DataError: a corpus line that cannot be used, with file, line and field.
        ToolError: a directory that holds something else, or cannot be written; the extra lucene
            is missing; Java failed.
    """
    check_counts("lucene", threads=threads)
    refuse_inside(corpus_path, directory)
    jar = java_jar(heap).name
    if lucene_index is not None:
        return _adopt(corpus_path, directory, Path(lucene_index), threads, heap)
    corpus = read_corpus(corpus_path)
    source = {
        "kind": "lucene",
        **corpus_source(corpus),
        "store_raw": store_raw,
        "jar": jar,
        "part_bytes": _PART_BYTES,
    }
    with build_directory(directory, source) as build:
        made = write_lucene(build, corpus, threads=threads, store_raw=store_raw, heap=heap)
        return finish_index(build.new, directory, "lucene", corpus, **made)


def write_lucene(
    build: Build, corpus: Corpus, *, threads: int, store_raw: bool, heap: str
) -> dict[str, Any]:
    """Write Lucene's own files of an index; the arguments are those of ``build_lucene``.

    Returns:
        The options and further entries of the manifest.

    Raises:
        ToolError: Java failed, or left documents out.
    """
    jar = java_jar(heap).name
    starts = _part_starts(corpus)
    parts = [build.kept / f"part-{start}" for start in starts]
    arguments = ["-threads", str(threads), *(["-storeRaw"] if store_raw else [])]
    arguments += ["-optimize"] if len(parts) == 1 else []
    with LuceneProcess(heap) as lucene:
        with progress("indexing", len(corpus), "doc", initial=build.rows) as bar:
            for start, stop, part in zip(starts, [*starts[1:], len(corpus)], parts, strict=True):
                if start >= build.rows:
                    rows = build.kept / "rows"
                    _write_rows(rows, corpus, range(start, stop), threads, store_raw)
                    _index_rows(lucene, rows, part, arguments, stop - start, bar)
                    build.record(stop)
        _gather(lucene, parts, build.new / _INDEX)
    options = {"threads": threads, "store_raw": store_raw, "heap": heap}
    return {"options": options, "index": _INDEX, "jar": jar}


def _adopt(
    corpus_path: Path, directory: Path, lucene_index: Path, threads: int, heap: str
) -> dict[str, Any]:
    """An index around a finished one, which stays where it is."""
    refuse_inside(lucene_index / "segments", directory)
    check_holds_lucene(lucene_index)
    corpus = read_corpus(corpus_path)
    options = {"threads": threads, "store_raw": False, "heap": heap}
    index = relative_path(lucene_index, directory)
    with build_directory(directory) as build:
        return finish_index(build.new, directory, "lucene", corpus, options, index=index)


def _part_starts(corpus: Corpus) -> list[int]:
    """The first row of every part; none takes more bytes of the corpus than it may, or one row."""
    begins, ends = corpus.ranges[:, 0], corpus.ranges[:, 1]
    starts = [0]
    while True:
        full = int(np.searchsorted(ends, begins[starts[-1]] + _PART_BYTES, side="right"))
        starts.append(max(full, starts[-1] + 1))
        if starts[-1] >= len(corpus):
            return starts[:-1]


def _write_rows(place: Path, corpus: Corpus, rows: range, count: int, store_raw: bool) -> None:
    """Rows in ``count`` files of consecutive ones; Anserini indexes each by one thread."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    size = -(-len(rows) // count)
    for start in range(0, len(rows), size):
        with (place / f"{start}.jsonl").open("wb") as file:
            for row in rows[start : start + size]:
                file.write(_bare(corpus.line(row)) if store_raw else _numbered(corpus, row))
                file.write(b"\n")


def _bare(line: bytes) -> bytes:
    """Without the mark that a file may begin with: no JSON for Java."""
    return line.strip().removeprefix(codecs.BOM_UTF8)


def _numbered(corpus: Corpus, row: int) -> bytes:
    return json.dumps({"id": str(row), "contents": corpus.document(row).contents}).encode()


def _index_rows(
    lucene: LuceneProcess,
    rows: Path,
    part: Path,
    arguments: Sequence[str],
    num_docs: int,
    bar: "tqdm[Any]",
) -> None:
    """An index of what ``_write_rows`` wrote, which is then removed."""
    shutil.rmtree(part, ignore_errors=True)
    first = bar.n
    counted, reason = 0, "Java does not say why"
    for line in lucene.index([*_ANSERINI, "-input", str(rows), "-index", str(part), *arguments]):
        if found := _SO_FAR.search(line):
            bar.update(first + _number(found[1]) - bar.n)
        if found := _COUNTED.search(line):
            counted += _number(found[1])
        if found := _ERROR.search(line):
            reason = found[1]
    if counted != num_docs:
        text = f"lucene: {counted:,} of {num_docs:,} documents were indexed ({reason})"
        raise java_failure(text)
    bar.update(first + num_docs - bar.n)
    shutil.rmtree(rows)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _gather(lucene: LuceneProcess, parts: Sequence[Path], index: Path) -> None:
    """One index of one segment; the parts stay as they are."""
    if len(parts) == 1:
        index.mkdir()
        for file in parts[0].iterdir():
            link(file, index / file.name)
    else:
        say(f"merging {len(parts)} parts")
        lucene.merge(parts, index)
