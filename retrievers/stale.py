"""Documents that may be out of date, as a toy world of searching needs them."""

from collections.abc import Sequence
from pathlib import Path

from graphpo_agent.errors import DataError
from graphpo_agent.types import Document
from retrievers.corpus import read_corpus

__all__ = ["StaleRetriever"]

_NOT = "not "
_STATES = " : "


class StaleRetriever:
    r"""A ``Retriever`` whose first answer may be out of date; asking again gives the next one.

    A document's text states a value, ``Karo Venner mentor : Lita Bosdal``. The query
    ``Karo Venner mentor`` finds what is stated about it in corpus order, so outdated documents
    stand before the present one; the query ``not Lita Bosdal : Karo Venner mentor`` leaves out
    those that state Lita Bosdal. Only who has seen an answer can ask again, and what a query finds
    depends on the query alone: nobody's earlier queries are remembered. The corpus is held in
    memory. Threads may share it.

    Example::

        retriever = StaleRetriever("corpus.jsonl")
        retriever.search(["Karo Venner mentor", "not Lita Bosdal : Karo Venner mentor"], topk=1)
        # [[Document("17", '"old"\nKaro Venner mentor : Lita Bosdal')],
        #  [Document("18", '"new"\nKaro Venner mentor : Domi Wornal')]]
    """

    def __init__(self, corpus: Path | str) -> None:
        """Read the corpus, Search-R1's JSONL.

        Raises:
            DataError: it cannot be read, or a document states nothing.
        """
        documents = read_corpus(Path(corpus))
        self._stated: dict[str, list[tuple[str, Document]]] = {}
        for row in range(len(documents)):
            document = documents.document(row)
            subject, _, value = document.text.partition(_STATES)
            if not (subject and value) or subject.startswith(_NOT):
                raise DataError(
                    f"{corpus}: document {document.id} must have the text 'subject : value', "
                    f"the subject not beginning with '{_NOT}', found {document.text!r:.60}"
                )
            self._stated.setdefault(subject, []).append((value, document))

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query the first ``topk`` documents about it that state another value."""
        return [self._search_one(query)[:topk] for query in queries]

    def _search_one(self, query: str) -> list[Document]:
        doubted, subject = None, query
        if query.startswith(_NOT):
            doubted, _, subject = query.removeprefix(_NOT).partition(_STATES)
        return [document for value, document in self._stated.get(subject, ()) if value != doubted]
