r"""BM25 through Lucene (Anserini), without pyserini's Python and without torch.

Lucene scores only documents that can enter the best: the kind of index for millions of documents.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graphpo_agent.errors import DataError, ToolError
from graphpo_agent.net.checks import check_counts
from graphpo_agent.types import Document
from retrievers.corpus import Corpus, line_ranges, plain_text, read_corpus
from retrievers.index_files import (
    build_directory,
    finish_index,
    open_corpus,
    read_manifest,
    refuse_inside,
    relative_path,
)
from retrievers.index_options import check_bm25
from retrievers.jvm import attached, java_command, java_exception, start_jvm
from retrievers.progress import progress

__all__ = ["LuceneRetriever", "build_lucene", "write_lucene"]

_INDEX = "lucene"
_MAX_WORDS = 2**31 - 1
_INDEXER = "io.anserini.index.IndexCollection"
_INDEXED = re.compile(r"([\d,]+) documents indexed")
_LEFT_OUT = re.compile(r"(?:unindexable|skipped|errors): +([\d,]+)")


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

    Args:
        corpus_path: Search-R1's corpus JSONL; it must stay where it is, unchanged.
        directory: where the index goes; an index that is there is replaced.
        threads: that index at once; the corpus is written out once more, in as many parts.
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
    java_command(heap)
    corpus = read_corpus(corpus_path)
    if lucene_index is not None:
        return _adopt(corpus, directory, Path(lucene_index), threads, heap)
    with build_directory(directory) as work:
        made = write_lucene(work, corpus, threads=threads, store_raw=store_raw, heap=heap)
        return finish_index(work, directory, "lucene", corpus, **made)


def write_lucene(
    work: Path, corpus: Corpus, *, threads: int, store_raw: bool, heap: str
) -> dict[str, Any]:
    """Write Lucene's own files of an index; the arguments are those of ``build_lucene``.

    Returns:
        The options and further entries of the manifest.

    Raises:
        DataError: Lucene left documents out.
        ToolError: Java failed.
    """
    command = java_command(heap)
    parts = work / "parts"
    parts.mkdir()
    _write_parts(parts, corpus, threads, store_raw)
    arguments = ["-collection", "JsonCollection", "-generator", "DefaultLuceneDocumentGenerator"]
    arguments += ["-input", str(parts), "-index", str(work / _INDEX), "-threads", str(threads)]
    arguments += ["-optimize", *(["-storeRaw"] if store_raw else [])]
    _run_indexer([*command, _INDEXER, *arguments], len(corpus), corpus.path)
    shutil.rmtree(parts)
    options = {"threads": threads, "store_raw": store_raw, "heap": heap}
    return {"options": options, "index": _INDEX, "jar": Path(command[-1]).name}


def _adopt(
    corpus: Corpus, directory: Path, lucene_index: Path, threads: int, heap: str
) -> dict[str, Any]:
    """An index around a finished one, which stays where it is."""
    refuse_inside(lucene_index / "segments", directory)
    _check_holds_lucene(lucene_index)
    options = {"threads": threads, "store_raw": False, "heap": heap}
    index = relative_path(lucene_index, directory)
    with build_directory(directory) as work:
        return finish_index(work, directory, "lucene", corpus, options, index=index)


class LuceneRetriever:
    r"""A ``Retriever`` over an index of ``build_lucene`` or pyserini. Threads may share it.

    Example::

        LuceneRetriever(Path("index")).search(["Karo Venner mentor"], topk=1)
        # [[Document(id="17", contents='"Karo Venner"\n...', score=9.3)]]
    """

    def __init__(
        self,
        directory: Path | str,
        corpus: Path | str | None = None,
        k1: float = 0.9,
        b: float = 0.4,
        threads: int = 2,
        heap: str = "2g",
    ) -> None:
        """Open the index; Java starts in this process, once.

        Args:
            directory: what ``build_lucene`` wrote, or an index directory of pyserini's.
            corpus: the JSONL behind a pyserini index that does not store its documents, whose ids
                are row numbers (as Search-R1's); its lines are found now, which reads all of it.
            k1: how fast repeated words stop counting; 0.9 is Search-R1's.
            b: how much long documents are marked down, in [0, 1]; 0.4 is Search-R1's.
            threads: that search the queries of one call at once.
            heap: Java's memory, such as ``2g``; the first index opened in a process decides.

        Raises:
            ToolError: the index is missing or incomplete, its corpus has gone or changed, the
                extra lucene is missing, or Java cannot run.
        """
        check_counts("lucene", threads=threads)
        check_bm25("lucene", k1, b)
        directory = Path(directory)
        place, self._corpus = _locate(directory, Path(corpus) if corpus is not None else None)
        self._autoclass = start_jvm(heap)
        self._threads = threads
        self._lucene: Any = attached(self._open, place, k1, b)
        attached(self._check_first_document, directory)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query the documents with the highest score above 0, at most ``topk``.

        Equal scores are in the order of the documents' ids in the index, as strings. A query
        without a word of the corpus finds nothing.
        """
        if not queries:
            return []
        hits = attached(self._hits, [plain_text(query) for query in queries], topk)
        return [[self._document(*hit) for hit in each] for each in hits]

    def _open(self, place: Path, k1: float, b: float) -> Any:
        try:
            searcher = self._autoclass("io.anserini.search.SimpleSearcher")(str(place))
        except java_exception() as error:
            reason = str(error).split("\n", 1)[0]
            raise ToolError(f"{place}: the Lucene index cannot be read ({reason})") from error
        searcher.set_bm25(k1, b)
        # A query may have any number of words; Lucene refuses 1025.
        self._autoclass("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(_MAX_WORDS)
        return searcher

    def _check_first_document(self, directory: Path) -> None:
        """Hits must lead to documents, and to the right ones."""
        if not self._lucene.get_total_num_docs():
            return
        first = self._lucene.doc(0)
        if self._corpus is not None:
            self._document(first.get("id"), 0.0, None)
        elif first.get("raw") is None:
            raise ToolError(
                f"{directory}: the index does not store its documents; give its corpus as well"
            )

    def _hits(self, queries: Sequence[str], topk: int) -> list[list[tuple[str, float, str | None]]]:
        """Id, score and, where no corpus is there, raw text of every hit."""
        make = self._autoclass("java.util.ArrayList")
        texts, names = make(), make()
        for number, query in enumerate(queries):
            texts.add(query)
            names.add(str(number))
        found = self._lucene.batch_search(texts, names, topk, self._threads)
        return [
            [(hit.docid, hit.score, self._raw(hit.docid)) for hit in found.get(str(number))]
            for number in range(len(queries))
        ]

    def _raw(self, docid: str) -> str | None:
        return self._lucene.doc_raw(docid) if self._corpus is None else None

    def _document(self, docid: str, score: float, raw: str | None) -> Document:
        if raw is not None:
            row = json.loads(raw)
            return Document(row["id"], row["contents"], score, row.get("url"))
        assert self._corpus is not None
        if not docid.isdecimal() or int(docid) >= len(self._corpus):
            raise ToolError(
                f"{self._corpus.path}: document {docid!r} of the index is no row of this corpus; "
                "give the corpus that was indexed"
            )
        return self._corpus.document(int(docid), score)


def _locate(directory: Path, corpus: Path | None) -> tuple[Path, Corpus | None]:
    """Where Lucene's files are, and the documents unless Lucene stores them."""
    if (directory / "manifest.json").exists():
        manifest = read_manifest(directory, "lucene")
        stored = manifest["options"]["store_raw"]
        place = directory / manifest["index"]
        return place, None if stored else open_corpus(directory, manifest)
    _check_holds_lucene(directory)
    return directory, None if corpus is None else Corpus(corpus, line_ranges(corpus))


def _check_holds_lucene(directory: Path) -> None:
    if not any(directory.glob("segments_*")):
        raise ToolError(
            f"{directory}: holds no Lucene index; build it with `graphpo index build lucene "
            "--corpus CORPUS --out DIR`"
        )


def _write_parts(parts: Path, corpus: Corpus, count: int, store_raw: bool) -> None:
    """The corpus in ``count`` files of consecutive rows; Anserini indexes each by one thread."""
    size = -(-len(corpus) // count)
    with progress("writing the parts", len(corpus), "doc") as bar:
        for start in range(0, len(corpus), size):
            with (parts / f"{start}.jsonl").open("wb") as file:
                for row in range(start, min(start + size, len(corpus))):
                    file.write(corpus.line(row).strip() if store_raw else _numbered(corpus, row))
                    file.write(b"\n")
                    bar.update()


def _numbered(corpus: Corpus, row: int) -> bytes:
    return json.dumps({"id": str(row), "contents": corpus.document(row).contents}).encode()


def _run_indexer(command: Sequence[str], num_docs: int, corpus_path: Path) -> None:
    """Run Anserini's indexer and follow what it says; it does not outlive this call."""
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
        progress("indexing", num_docs, "doc") as bar,
    ):
        assert process.stdout is not None
        try:
            last, left_out = _follow(process.stdout, bar)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise ToolError(f"lucene: Java ended with status {process.returncode} ({last})")
    if left_out:
        raise DataError(f"{corpus_path}: Lucene could not index {left_out} of {num_docs} documents")


def _follow(lines: Iterable[str], bar: Any) -> tuple[str, int]:
    """The last line that the indexer wrote, and how many documents it left out."""
    last, left_out = "", 0
    for line in lines:
        last = line.strip() or last
        if found := _INDEXED.search(line):
            bar.update(int(found[1].replace(",", "")) - bar.n)
        if found := _LEFT_OUT.search(line):
            left_out += int(found[1].replace(",", ""))
    return last, left_out
