"""What the live search engines share: queries at once, locale, documents, blocked hosts."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from graphpo_agent.net.blocklist import BlockList
from graphpo_agent.net.client import HttpService, Limits, Reply, Verdict
from graphpo_agent.net.store import CallStore
from graphpo_agent.plain_text import plain_text
from graphpo_agent.types import Document
from retrievers.together import search_batches, settle

__all__ = ["Shared", "WebSearch", "answer_document", "is_chinese", "items", "result_document"]

_MAX_QUERY_CHARS = 2000
_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff]")
_OTHER_HAN_SCRIPTS = re.compile("[\u3040-\u30ff\uac00-\ud7af]")  # Japanese, Korean


class Shared(TypedDict, total=False):
    """The arguments that all engines take. Each may be left out.

    Example: ``SerperSearch(deadline_s=10, blocked_hosts=["benchmark-mirrors"])``
    """

    deadline_s: float
    """Seconds for one query, tries and waits included; 30."""
    tries: int
    """Of one query; 4."""
    concurrency: int
    """Queries under way at once; 16."""
    per_second: float | None
    """Requests per second at most; None: any number."""
    blocked_hosts: Sequence[str]
    """Results from there are left out; see ``BlockList``."""
    store: CallStore | None
    """Recorded answers, without keys; None: none."""


class WebSearch(ABC):
    """A ``Retriever`` over a search engine; a subclass says how it is asked."""

    def __init__(
        self,
        name: str,
        *,
        classify: Callable[[Reply], Verdict],
        secret_headers: Mapping[str, str] | None = None,
        secret_params: Mapping[str, str] | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """Set up; nothing is sent.

        Args:
            name: what messages call the engine.
            classify: what a reply of this engine means.
            secret_headers: credentials sent as headers.
            secret_params: credentials sent in the query string.
            **shared: see ``Shared``.

        Raises:
            ToolError: a limit out of range or a pattern that blocks nothing.
        """
        self._concurrency = shared.get("concurrency", 16)
        self._blocked = BlockList(shared.get("blocked_hosts", ()))
        limits = Limits(
            deadline_s=shared.get("deadline_s", 30.0),
            tries=shared.get("tries", 4),
            concurrency=self._concurrency,
            per_second=shared.get("per_second"),
        )
        self._service = HttpService(
            name,
            limits=limits,
            secret_headers=secret_headers,
            secret_params=secret_params,
            store=shared.get("store"),
            classify=classify,
        )

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """For each query at most ``topk`` documents, an answer box first where there is one.

        Equal queries are asked once, a blank one not at all; 2,000 characters of a query count.

        Raises:
            PartlyFailed: a query got no usable answer; it carries those of the others.
            QuotaError: the account is used up.
            ToolError: the key or another setting is wrong.
        """
        asked = [" ".join(plain_text(query).split())[:_MAX_QUERY_CHARS] for query in queries]
        unique = [query for query in dict.fromkeys(asked) if query]
        batches = [[query] for query in unique]
        found = search_batches(lambda b: [self._one(b[0], topk)], batches, self._concurrency)
        return settle([found[query] if query else [] for query in asked])

    def _one(self, query: str, topk: int) -> list[Document]:
        unique: dict[str, Document] = {}
        for document in self._ask(query, topk):
            unique.setdefault(document.id, document)
        allowed = [d for d in unique.values() if not (d.url and self._blocked.covers(d.url))]
        return allowed[:topk]

    @abstractmethod
    def _ask(self, query: str, topk: int) -> list[Document]:
        """What the engine found, best first, perhaps more than ``topk``."""


def is_chinese(query: str) -> bool:
    """Whether a query is written in Chinese characters, Japanese and Korean left out."""
    return bool(_HAN.search(query)) and not _OTHER_HAN_SCRIPTS.search(query)


def items(reply: Any, name: str) -> list[Mapping[str, Any]]:
    """The objects of a list in an engine's answer; none where it is absent or no list.

    Example: ``items({"organic": [{"link": "a"}, None]}, "organic")`` is ``[{"link": "a"}]``.
    """
    value = reply.get(name) if isinstance(reply, dict) else None
    found = value if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, dict)]


def result_document(
    link: Any, title: Any, snippet: Any, *, date: Any = None, source: Any = None
) -> list[Document]:
    r"""One result as a list of one document; of none where it has no link.

    Example: ``result_document("https://a.org", "Oak", "A tree.", date="3 May 2024")`` has the
    contents ``'"Oak"\nDate published: 3 May 2024\nA tree.'``. Whatever else is missing is left
    out; a missing title is the link.
    """
    url = _text(link)
    if not url:
        return []
    lines = [_quoted(_text(title) or url)]
    lines += [f"Date published: {_text(date)}"] if _text(date) else []
    lines += [f"Source: {_text(source)}"] if _text(source) else []
    lines += [_text(snippet)] if _text(snippet) else []
    return [Document(id=url, contents="\n".join(lines), url=url)]


def answer_document(query: str, box: Mapping[str, Any]) -> list[Document]:
    """An answer box as a list of one document; of none where it holds no text.

    Its id differs from that of the same page's ordinary result.
    """
    texts = [_text(box.get(name)) for name in ("answer", "result", "snippet")]
    if not any(texts):
        return []
    lines = [_quoted(_text(box.get("title")) or query), *filter(None, texts)]
    url = _text(box.get("link"))
    return [Document(id=f"answer:{url or query}", contents="\n".join(lines), url=url or None)]


def _text(value: Any) -> str:
    """A string or number in one line; anything else is empty."""
    return " ".join(str(value).split()) if type(value) in (str, int, float) else ""


def _quoted(title: str) -> str:
    """As titles stand in Search-R1's corpora: inner quotes doubled."""
    return '"' + title.replace('"', '""') + '"'
