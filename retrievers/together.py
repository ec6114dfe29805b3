"""Several queries at once, of which some may fail."""

from collections.abc import Callable, Sequence

from graphpo_agent.errors import ToolError
from graphpo_agent.net.checks import check_documents
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.parallel import in_threads
from graphpo_agent.protocols import Retriever
from graphpo_agent.types import Document

__all__ = ["Answer", "PartlyFailed", "answers_of", "search_batches", "settle"]

Answer = list[Document] | CallFailed
"""What one query found, or why it found nothing."""


class PartlyFailed(CallFailed):
    """A search in which at least one query got no answer; it is of the first failure's kind.

    Example: ``PartlyFailed([[document], CallFailed("rate_limit", "429")]).answers[0]`` is
    ``[document]``.

    Attributes:
        answers: for each query its documents, or why it has none.
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        failures = [answer for answer in answers if isinstance(answer, CallFailed)]
        super().__init__(failures[0].kind, str(failures[0]))
        self.answers = tuple(answers)


def answers_of(retriever: Retriever, queries: Sequence[str], topk: int) -> Sequence[Answer]:
    """What a retriever finds for each query; a query that fails spoils no other one's answer.

    Raises:
        ToolError: it is misconfigured, its quota is used up, or it does not return a list of
            documents for each query.
    """
    try:
        return _checked(retriever.search(queries, topk), type(retriever).__name__, len(queries))
    except PartlyFailed as error:
        return error.answers
    except CallFailed as error:
        return [error] * len(queries)


def _checked(found: Sequence[list[Document]], name: str, count: int) -> Sequence[list[Document]]:
    if not isinstance(found, Sequence):
        raise ToolError(f"{name}.search returned {type(found).__name__}, no list of lists")
    if len(found) != count:
        raise ToolError(f"{name}.search returned {len(found)} lists for {count} queries")
    for documents in found:
        check_documents(f"{name}.search", documents)
    return found


def search_batches(
    search: Callable[[Sequence[str]], Sequence[Answer]],
    batches: Sequence[Sequence[str]],
    concurrency: int,
) -> dict[str, Answer]:
    """The answer to each query of each batch, ``concurrency`` batches at a time.

    A batch that is refused (``bad_arguments``) is asked again in halves: it may be one query's
    doing.

    Raises:
        ToolError: what ``search`` raised; batches that have not begun are not searched.
    """

    def one(batch: Sequence[str]) -> Sequence[Answer]:
        try:
            return search(batch)
        except CallFailed as failure:
            if failure.kind == "bad_arguments" and len(batch) > 1:
                half = len(batch) // 2
                return [*one(batch[:half]), *one(batch[half:])]
            return [failure] * len(batch)

    if len(batches) < 2:  # needs no thread
        answers = [one(batch) for batch in batches]
    else:
        answers = in_threads(one, batches, concurrency)
    return {
        query: answer
        for batch, found in zip(batches, answers, strict=True)
        for query, answer in zip(batch, found, strict=True)
    }


def settle(answers: Sequence[Answer]) -> list[list[Document]]:
    """The documents of each query.

    Raises:
        PartlyFailed: one of them has none.
    """
    documents = [answer for answer in answers if not isinstance(answer, CallFailed)]
    if len(documents) < len(answers):
        raise PartlyFailed(answers)
    return documents
