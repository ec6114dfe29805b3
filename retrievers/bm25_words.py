"""A corpus as numbered words on disk, written so that it can be interrupted."""

from array import array
from collections.abc import Callable, Iterator
from itertools import islice

from retrievers.corpus import Corpus
from retrievers.index_build import Build
from retrievers.progress import progress

__all__ = ["split_words"]

_CHUNK_DOCS = 10_000
"""Documents between two checkpoints."""
_WORDS_FILE = "words.i32"
"""The number of every word, one document after the other."""
_LENGTHS_FILE = "lengths.i32"
"""How many words each document has."""
_VOCABULARY_FILE = "vocabulary.txt"
"""One word a line, in the order in which they were met: its line is its number."""


def split_words(
    build: Build, corpus: Corpus, split: Callable[[list[str]], list[list[str]]]
) -> tuple[list["array[int]"], dict[str, int]]:
    """Number all words of a corpus, from where an interrupted build of it stopped.

    Args:
        build: where the words are written; ``build.rows`` documents are there already.
        corpus: what to split.
        split: texts to the words of each; none has a line end in it.

    Returns:
        The word numbers of every document and the vocabulary, word to number.
    """
    vocabulary = _vocabulary(build)
    with progress("splitting into words", len(corpus), "doc", initial=build.rows) as bar:
        for start in range(build.rows, len(corpus), _CHUNK_DOCS):
            texts = corpus.texts(start, start + _CHUNK_DOCS)
            known, numbers, lengths = len(vocabulary), array("i"), array("i")
            for words in split(texts):
                numbers.extend(vocabulary.setdefault(word, len(vocabulary)) for word in words)
                lengths.append(len(words))
            met = "".join(f"{word}\n" for word in islice(vocabulary, known, None))
            build.record(
                start + len(texts),
                {
                    _WORDS_FILE: numbers.tobytes(),
                    _LENGTHS_FILE: lengths.tobytes(),
                    _VOCABULARY_FILE: met.encode(),
                },
            )
            bar.update(len(texts))
    return list(_documents(build)), vocabulary


def _vocabulary(build: Build) -> dict[str, int]:
    """The words that were met so far."""
    if not build.rows:
        return {}
    words = (build.kept / _VOCABULARY_FILE).read_bytes().decode().split("\n")[:-1]
    return {word: number for number, word in enumerate(words)}


def _documents(build: Build) -> Iterator["array[int]"]:
    """The word numbers of each document, as they are on disk."""
    lengths = array("i", (build.kept / _LENGTHS_FILE).read_bytes())
    with (build.kept / _WORDS_FILE).open("rb") as file:
        for length in lengths:
            words = array("i")
            words.fromfile(file, length)
            yield words
