"""Pages of the web through Jina's reader, which fetches them itself and returns their text."""

from graphpo_agent.net.client import HttpService, Limits, Reply, Verdict, classify_json
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.secrets import bearer
from graphpo_agent.net.store import CallStore
from graphpo_agent.plain_text import plain_text
from graphpo_agent.types import Document

__all__ = ["JinaReader"]


class JinaReader:
    """A ``PageReader`` over https://r.jina.ai.

    Example: ``JinaReader(api_key_env="JINA_API_KEY").read("https://example.org/oak")``
    """

    def __init__(
        self,
        *,
        api_key_env: str | None = "JINA_API_KEY",
        base_url: str = "https://r.jina.ai/",
        deadline_s: float = 60.0,
        tries: int = 3,
        concurrency: int = 10,
        per_second: float | None = None,
        store: CallStore | None = None,
    ) -> None:
        """Set up; nothing is sent.

        Args:
            api_key_env: the environment variable with the key; None: without one, which is
                allowed a few pages a minute.
            base_url: where it answers.
            deadline_s: seconds for one page, tries and waits included.
            tries: of one page.
            concurrency: pages under way at once.
            per_second: requests per second at most; None: any number.
            store: recorded pages; None: none.

        Raises:
            ToolError: the key is not set, or a limit is out of range.
        """
        self._url = base_url
        self._service = HttpService(
            "jina reader",
            limits=Limits(
                deadline_s=deadline_s, tries=tries, concurrency=concurrency, per_second=per_second
            ),
            secret_headers=bearer(api_key_env, store),
            store=store,
            classify=_classify,
        )

    def read(self, url: str) -> Document:
        """The page: its quoted title, then its text in Markdown.

        Raises:
            CallFailed: this page cannot be had, or is empty.
            QuotaError: the account is used up.
            ToolError: the key is wrong.
        """
        if not url.lower().startswith(("http://", "https://")):
            raise CallFailed("bad_arguments", f"{url[:200]!r} is no http address")
        reply = self._service.call("POST", self._url, body={"url": plain_text(url)}).json()
        data = reply.get("data") if isinstance(reply, dict) else None
        page = data if isinstance(data, dict) else {}
        content = page.get("content")
        if not isinstance(content, str) or not content.strip():
            raise CallFailed("no_result", f"{url[:200]}: the page has no text")
        title = str(page.get("title") or url).replace('"', '""')
        return Document(id=url, contents=f'"{title}"\n{content}', url=url)


def _classify(reply: Reply) -> Verdict:
    """Whether the reader fails (401, 402, 407, 408, 429, 5xx) or the page does (all other 4xx)."""
    if 400 <= reply.status < 500 and reply.status not in (401, 402, 407, 408, 429):
        return "no_result"
    return classify_json(reply)
