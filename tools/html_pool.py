"""A few processes that turn HTML and feeds into text, each killed when a page takes too long.

Parsers of HTML are quadratic on hostile pages and cannot be interrupted; a process can.
"""

from pathlib import Path
from typing import Literal

from graphpo_agent.net.deadline import Deadline
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.processes import ProcessPool

__all__ = ["HtmlPool"]

_WORKER = Path(__file__).with_name("html_worker.py")


class HtmlPool:
    """Turns pages into text in processes of its own; safe to use from several threads.

    Example::

        HtmlPool(workers=2, seconds=10.0).text("<title>Oak</title><p>a tree", "html",
                                               "https://e.org/", links=False,
                                               deadline=Deadline(30.0))
        # ("Oak", "a tree", "")
    """

    def __init__(self, workers: int, seconds: float) -> None:
        """Allow so many processes and so long for each page; a process starts when needed."""
        self._seconds = seconds
        self._pool = ProcessPool(
            _WORKER, workers, purpose="pages cannot be read", needs="trafilatura lxml_html_clean"
        )

    def text(
        self,
        page: str,
        kind: Literal["html", "feed"],
        url: str,
        links: bool,
        deadline: Deadline,
    ) -> tuple[str, str, str]:
        """Title and text of a page, and the address it leads to at once; empty: nowhere.

        Args:
            page: its source.
            kind: what it is read as.
            url: where it is; relative links are resolved against it.
            links: keep links, as Markdown.
            deadline: of the wait for a free process.

        Raises:
            CallFailed: no_result: the page takes too long or too much memory, which is the page's
                doing whenever it is read; transient: no process was free by the deadline.
            ToolError: no process can be started.
        """
        request = {"page": page, "kind": kind, "url": url, "links": links}
        answer = self._pool.ask(request, self._seconds, deadline)
        if answer is None:
            raise CallFailed("no_result", f"{url}: the page is too complex to be read")
        return answer["title"], answer["text"], answer["leads_to"]
