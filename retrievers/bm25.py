r"""BM25 over a corpus on disk, with bm25s.

The corpus is Search-R1's JSONL, one ``{"id": "0", "contents": "\"Title\"\ntext"}`` per line. The
index directory holds bm25s' arrays, the byte offset of every corpus line and ``manifest.json``.
A loaded index keeps none of these in memory: arrays are mapped, the corpus is read where it is.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import Stemmer
from numpy.typing import NDArray

from graphpo_agent.errors import DataError, ToolError
from graphpo_agent.types import Document
from retrievers.bm25_words import split_words
from retrievers.bm25s_without_jax import bm25s
from retrievers.corpus import Corpus, read_corpus
from retrievers.index_build import Build, build_directory, corpus_source, refuse_inside
from retrievers.index_files import finish_index, open_corpus, read_manifest, reason_of
from retrievers.index_options import check_bm25

__all__ = ["Backend", "Bm25Retriever", "build_bm25", "check_options", "write_bm25"]

Backend = Literal["auto", "numpy", "numba"]

_IDEOGRAPHS = (
    r"\u2e80-\u2fd5\u3005\u3007\u3021-\u3029\u3038-\u303b\u3041-\u309f"
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufad9\U00020000-\U0003ffff"
)
"""Han and Hiragana."""
_KATAKANA = r"\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_LETTER = rf"[^\W{_IDEOGRAPHS}{_KATAKANA}]"
_WORDS = rf"{_LETTER}{{2,}}|(?<!\w['’]){_LETTER}|[{_IDEOGRAPHS}]|[{_KATAKANA}]+"
"""What is a word, as in Lucene's StandardAnalyzer: a run of letters and digits, each of these
ideographs, a run of Katakana. The one letter after the apostrophe of "Venn's" is none."""
_WORDS_UNTOLD = r"(?u)\b\w\w+\b"
"""What is one in an index whose manifest does not say."""


def build_bm25(
    corpus_path: Path,
    directory: Path,
    *,
    k1: float = 0.9,
    b: float = 0.4,
    stemmer: str | None = "english",
    stopwords: str | None = "english",
) -> dict[str, Any]:
    """Index a corpus; the directory appears, or is replaced, only when complete.

    The same call goes on where an interrupted one stopped splitting the corpus into words, as long
    as the corpus, ``stemmer`` and ``stopwords`` are as they were.

    Example: ``build_bm25(Path("corpus.jsonl"), Path("index"))["num_docs"]`` is the number of lines.

    Args:
        corpus_path: Search-R1's corpus JSONL; it must stay where it is, unchanged.
        directory: where the index goes; an index that is there is replaced.
        k1: how fast repeated words stop counting; Lucene's default in Search-R1.
        b: how much long documents are marked down, in [0, 1].
        stemmer: a Snowball language, or None.
        stopwords: a bm25s stop word list, or None.

    Returns:
        The manifest: kind, corpus (relative to the index), its size and the SHA-256 of its first
        MiB, num_docs, the options and ``words``, the pattern of a word.

    Raises:
        DataError: a corpus line that cannot be used, with file, line and field.
        ToolError: an option that cannot be; a directory that holds something else, or cannot be
            written.
    """
    check_options(k1, b, stemmer, stopwords)
    refuse_inside(corpus_path, directory)
    corpus = read_corpus(corpus_path)
    source = {
        "kind": "bm25",
        **corpus_source(corpus),
        "stemmer": stemmer,
        "stopwords": stopwords,
        "words": _WORDS,
        "bm25s": bm25s.__version__,
    }
    with build_directory(directory, source) as build:
        made = write_bm25(build, corpus, k1=k1, b=b, stemmer=stemmer, stopwords=stopwords)
        return finish_index(build.new, directory, "bm25", corpus, **made)


def check_options(k1: float, b: float, stemmer: str | None, stopwords: str | None) -> None:
    """Raise ToolError unless these can be options of ``build_bm25``."""
    check_bm25("bm25", k1, b)
    if stemmer is not None and stemmer not in Stemmer.algorithms():
        known = ", ".join(Stemmer.algorithms())
        raise ToolError(f"bm25: stemmer must be none or one of {known}, found {stemmer!r}")
    try:
        _tokenize(["word"], _WORDS, None, stopwords)
    except ValueError as error:
        raise ToolError(f"bm25: there is no stop word list {stopwords!r}") from error


def write_bm25(
    build: Build, corpus: Corpus, *, k1: float, b: float, stemmer: str | None, stopwords: str | None
) -> dict[str, Any]:
    """Write bm25s' own files of an index; the arguments are those of ``build_bm25``.

    Returns:
        The options and further entries of the manifest.

    Raises:
        DataError: no document has a word that would be indexed.
    """
    rows, vocabulary = split_words(
        build, corpus, lambda texts: _tokenize(texts, _WORDS, stemmer, stopwords)
    )
    if not vocabulary:
        raise DataError(f"{corpus.path}: no document has a word to index; look at its contents")
    index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
    index.index((rows, vocabulary), show_progress=sys.stderr.isatty())
    index.save(build.new)
    options = {"k1": k1, "b": b, "stemmer": stemmer, "stopwords": stopwords}
    return {"options": options, "words": _WORDS, "bm25s": bm25s.__version__}


class Bm25Retriever:
    r"""A ``Retriever`` over an index that ``build_bm25`` made. Threads may share it.

    Example::

        Bm25Retriever(Path("index")).search(["Karo Venner mentor"], topk=1)
        # [[Document(id="17", contents='"Karo Venner"\n...', score=9.3)]]
    """

    def __init__(self, directory: Path | str, backend: Backend = "numpy") -> None:
        """Map the index into memory.

        Args:
            directory: what ``build_bm25`` wrote.
            backend: what adds up the scores. numba is faster on large corpora but compiles for
                seconds at the first query; auto takes it where it is installed.

        Raises:
            ToolError: the index is missing, incomplete, or its corpus has gone or changed; numba
                is asked for and not installed.
        """
        directory = Path(directory)
        self.manifest = read_manifest(directory, "bm25")
        self._corpus = open_corpus(directory, self.manifest)
        try:
            self._index = bm25s.BM25.load(directory, mmap=True, show_progress=False)
            _check_together(self._index, self.manifest["num_docs"])
        except (OSError, ValueError, EOFError) as error:
            raise ToolError(
                f"{directory}: the index cannot be read ({reason_of(error)}); build it again"
            ) from error
        if _use_numba(backend):
            self._index.activate_numba_scorer()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query the documents with the highest score above 0, at most ``topk``.

        Equal scores are in corpus order. A query without a word of the corpus finds nothing.
        """
        options = self.manifest["options"]
        pattern = self.manifest.get("words", _WORDS_UNTOLD)
        tokens = _tokenize(list(queries), pattern, options["stemmer"], options["stopwords"])
        return [self._search_one(words, topk) for words in tokens]

    def _search_one(self, words: Sequence[str], topk: int) -> list[Document]:
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = np.asarray(self._index.get_scores(known))
        return [self._corpus.document(row, float(scores[row])) for row in _best(scores, topk)]


def _check_together(index: bm25s.BM25, num_docs: int) -> None:
    """Raise ValueError unless the files of an index are of the sizes that the others tell."""
    scores, words = index.scores, len(index.vocab_dict) - ("" in index.vocab_dict)
    starts, ends = scores["indptr"], int(scores["indptr"][-1])
    sizes = scores["num_docs"], len(starts) - 1, len(scores["indices"]), len(scores["data"])
    if sizes != (num_docs, words, ends, ends):
        raise ValueError("it is that of another index")


def _use_numba(backend: Backend) -> bool:
    if backend not in ("auto", "numpy", "numba"):
        raise ToolError(f"bm25: backend must be auto, numpy or numba, found {backend!r}")
    if backend == "numba" and not bm25s.NUMBA_AVAILABLE:
        raise ToolError("bm25: backend numba needs `pip install numba`; or use backend: numpy")
    return backend != "numpy" and bm25s.NUMBA_AVAILABLE


def _best(scores: NDArray[np.float32], topk: int) -> list[int]:
    """Rows of the ``topk`` highest scores above 0, best first, equal scores in row order."""
    rows = np.flatnonzero(scores > 0)
    if len(rows) > topk:
        least = np.partition(scores[rows], len(rows) - topk)[len(rows) - topk]
        rows = rows[scores[rows] >= least]
    order = np.lexsort((rows, -scores[rows]))
    return rows[order][:topk].tolist()


def _tokenize(
    texts: list[str], pattern: str, stemmer: str | None, stopwords: str | None
) -> list[list[str]]:
    """Words as they are indexed. Threads may not share a stemmer, so each call has its own."""
    if not texts:
        return []
    tokens = bm25s.tokenize(
        texts,
        token_pattern=pattern,
        stopwords=stopwords or [],
        stemmer=_stems(stemmer) if stemmer else None,  # pyright: ignore[reportArgumentType]
        return_ids=False,
        show_progress=False,
    )
    return tokens  # pyright: ignore[reportReturnType]


def _stems(stemmer: str) -> Callable[[list[str]], list[str]]:
    """The stem of each word, or the word where nothing is left of it, as porter does with "s"."""
    stem = Stemmer.Stemmer(stemmer).stemWord
    return lambda words: [stem(word) or word for word in words]
