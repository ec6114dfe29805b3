r"""BM25 through Lucene (Anserini), without pyserini's Python and without torch.

Lucene scores only documents that can enter the best: the kind of index for millions of documents.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphpo_agent.errors import ToolError, first_line
from graphpo_agent.net.checks import check_counts
from graphpo_agent.plain_text import plain_text
from graphpo_agent.types import Document
from retrievers.corpus import Corpus, line_ranges
from retrievers.index_files import open_corpus, read_manifest
from retrievers.index_options import check_bm25
from retrievers.jvm import attached, java_exception, start_jvm

__all__ = ["LuceneRetriever", "check_holds_lucene"]

_MAX_WORDS = 2**31 - 1


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
            reason = first_line(error)
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
    check_holds_lucene(directory)
    return directory, None if corpus is None else Corpus(corpus, line_ranges(corpus))


def check_holds_lucene(directory: Path) -> None:
    """Raise ToolError unless Lucene's own files are in a directory."""
    if not any(directory.glob("segments_*")):
        raise ToolError(
            f"{directory}: holds no Lucene index; build it with `graphpo index build lucene "
            "--corpus CORPUS --out DIR`"
        )
