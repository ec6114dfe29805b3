"""Live web search: Serper, SerpAPI, Google's custom search, Bing through Bright Data.

Each is a ``Retriever`` whose documents are search results: id and url are the link, the contents a
quoted title, perhaps a date and a source, and the snippet. Keys come from environment variables.
"""

from typing import Any, Unpack
from urllib.parse import urlencode

from graphpo_agent.errors import ToolError
from graphpo_agent.net.client import Reply, Verdict, classify_json, classify_status
from graphpo_agent.net.failures import CallFailed
from graphpo_agent.net.secrets import bearer, secret_from_env
from graphpo_agent.types import Document
from retrievers.web_search import (
    Shared,
    WebSearch,
    answer_document,
    is_chinese,
    items,
    result_document,
)

__all__ = ["BrightDataBingSearch", "GoogleCseSearch", "SerpApiSearch", "SerperSearch"]

_PAGE = 10
"""Results that one page of these engines holds; asking for fewer costs the same."""


class SerperSearch(WebSearch):
    """Google through serper.dev.

    Example: ``SerperSearch(blocked_hosts=["benchmark-mirrors"]).search(["oak height"], topk=3)``
    """

    def __init__(
        self,
        *,
        api_key_env: str = "SERPER_API_KEY",
        base_url: str = "https://google.serper.dev/search",
        gl: str | None = None,
        hl: str | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """Set up; nothing is sent.

        Args:
            api_key_env: the environment variable with the key.
            base_url: where it answers.
            gl: country of the results; None: ``cn`` for Chinese queries, else ``us``.
            hl: language of the results; None: ``zh-cn`` for Chinese queries, else ``en``.
            **shared: see ``Shared``.

        Raises:
            ToolError: the key is not set, or a setting cannot be used.
        """
        key = secret_from_env(api_key_env, shared.get("store"))
        headers = {"X-API-KEY": key}
        super().__init__("serper", classify=_serper, secret_headers=headers, **shared)
        self._url = base_url
        self._gl, self._hl = gl, hl

    def _ask(self, query: str, topk: int) -> list[Document]:
        gl, hl = _locale(query, self._gl, self._hl)
        body = {"q": query, "num": max(topk, _PAGE), "gl": gl, "hl": hl}
        reply = self._service.call("POST", self._url, body=body).json()
        boxes = [each for box in items(reply, "answerBox") for each in answer_document(query, box)]
        return boxes + _results(reply, "organic")


class SerpApiSearch(WebSearch):
    """Google, or another engine that gives ``organic_results``, through serpapi.com.

    Example: ``SerpApiSearch(engine="google").search(["oak height"], topk=3)``
    """

    def __init__(
        self,
        *,
        api_key_env: str = "SERPAPI_API_KEY",
        base_url: str = "https://serpapi.com/search",
        engine: str = "google",
        gl: str | None = None,
        hl: str | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """Set up; ``engine`` as SerpAPI names it, the rest as in ``SerperSearch``."""
        key = secret_from_env(api_key_env, shared.get("store"))
        params = {"api_key": key}
        super().__init__("serpapi", classify=_serpapi, secret_params=params, **shared)
        self._url = base_url
        self._engine = engine
        self._gl, self._hl = gl, hl

    def _ask(self, query: str, topk: int) -> list[Document]:
        gl, hl = _locale(query, self._gl, self._hl)
        params = {"engine": self._engine, "q": query, "gl": gl, "hl": hl}
        if topk > _PAGE:
            params["num"] = str(topk)
        reply = self._service.call("GET", self._url, params=params).json()
        boxes = [each for box in items(reply, "answer_box") for each in answer_document(query, box)]
        return boxes + _results(reply, "organic_results")


class GoogleCseSearch(WebSearch):
    """Google's custom search (programmable search engine); it gives at most ten results a query.

    Example: ``GoogleCseSearch(cse_id="0123456789abcdef0").search(["oak height"], topk=3)``
    """

    def __init__(
        self,
        cse_id: str,
        *,
        api_key_env: str = "GOOGLE_API_KEY",
        base_url: str = "https://www.googleapis.com/customsearch/v1",
        gl: str | None = None,
        hl: str | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """Set up; ``cse_id`` is the search engine's id, the rest as in ``SerperSearch``."""
        if not cse_id:
            raise ToolError("google custom search: cse_id is empty; name the search engine's id")
        params = {"key": secret_from_env(api_key_env, shared.get("store"))}
        super().__init__("google custom search", classify=_google, secret_params=params, **shared)
        self._url = base_url
        self._cse_id = cse_id
        self._gl, self._hl = gl, hl

    def _ask(self, query: str, topk: int) -> list[Document]:
        gl, hl = _locale(query, self._gl, self._hl)
        params = {"cx": self._cse_id, "q": query, "num": _PAGE, "gl": gl, "hl": hl}
        reply = self._service.call("GET", self._url, params=params).json()
        return [
            document
            for item in items(reply, "items")
            for document in result_document(
                item.get("link"),
                item.get("title"),
                item.get("snippet"),
                source=item.get("displayLink"),
            )
        ]


class BrightDataBingSearch(WebSearch):
    """Bing's result page through Bright Data's proxy, as Tree-GRPO searches.

    Example: ``BrightDataBingSearch(zone="serp").search(["oak height"], topk=3)``
    """

    def __init__(
        self,
        zone: str,
        *,
        api_key_env: str = "BRIGHTDATA_API_KEY",
        base_url: str = "https://api.brightdata.com/request",
        market: str | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """Set up; nothing is sent.

        Args:
            zone: the proxy zone of the account.
            api_key_env: the environment variable with the key.
            base_url: where it answers.
            market: Bing's, such as ``de-DE``; None: ``zh-CN`` for Chinese queries, else ``en-US``.
            **shared: see ``Shared``.

        Raises:
            ToolError: the key is not set, or a setting cannot be used.
        """
        if market is not None and market.count("-") != 1:
            raise ToolError(f"bing: market is {market!r}; write a language and a country, as de-DE")
        headers = bearer(api_key_env, shared.get("store"))
        super().__init__("bright data", classify=_brightdata, secret_headers=headers, **shared)
        self._url = base_url
        self._zone = zone
        self._market = market

    def _ask(self, query: str, topk: int) -> list[Document]:
        market = self._market or ("zh-CN" if is_chinese(query) else "en-US")
        language, country = market.split("-")
        fields = {"q": query, "mkt": market, "setLang": language, "brd_json": 1, "cc": country}
        page = f"https://www.bing.com/search?{urlencode(fields)}"
        body = {"zone": self._zone, "url": page, "format": "raw"}
        reply = self._service.call("POST", self._url, body=body).json()
        return [
            document
            for item in items(reply, "organic")
            for document in result_document(
                item.get("link"), item.get("title"), item.get("description")
            )
        ]


def _locale(query: str, gl: str | None, hl: str | None) -> tuple[str, str]:
    """Country and language of a query's results, where they are not given."""
    chinese = is_chinese(query)
    return gl or ("cn" if chinese else "us"), hl or ("zh-cn" if chinese else "en")


def _results(reply: Any, name: str) -> list[Document]:
    """Serper's and SerpAPI's ordinary results."""
    return [
        document
        for item in items(reply, name)
        for document in result_document(
            item.get("link"),
            item.get("title"),
            item.get("snippet"),
            date=item.get("date"),
            source=item.get("source"),
        )
    ]


def _serper(reply: Reply) -> Verdict:
    """A used-up account answers 400."""
    if reply.status == 400 and "not enough credits" in reply.text.lower():
        return "quota"
    return classify_json(reply)


def _serpapi(reply: Reply) -> Verdict:
    """429 is a used-up plan or haste; 200 with an error is a failed search or an empty one."""
    if reply.status == 429 and "run out of searches" in reply.text.lower():
        return "quota"
    verdict = classify_json(reply)
    if verdict is not None:
        return verdict
    fields = reply.json()
    error = fields.get("error") if isinstance(fields, dict) else None
    return "transient" if error and "returned any results" not in str(error) else None


def _google(reply: Reply) -> Verdict:
    """403 and 429 are haste or a used-up day, 400 may be a wrong key; the body says which."""
    reasons, message = _google_error(reply)
    if reasons & {"dailyLimitExceeded", "dailyLimitExceededUnreg", "quotaExceeded"}:
        return "quota"
    if reasons & {"rateLimitExceeded", "userRateLimitExceeded"}:
        return "quota" if "per day" in message else "rate_limit"
    if reply.status == 400 and "api key" in message:
        return "configuration"
    return classify_json(reply)


def _google_error(reply: Reply) -> tuple[set[str], str]:
    """The reasons and the message, in lower case, of ``{"error": {...}}``."""
    if classify_status(reply) is None:
        return set(), ""
    try:
        [error] = items(reply.json(), "error")
    except (CallFailed, ValueError):  # not Google's own answer
        return set(), ""
    reasons = {str(each.get("reason")) for each in items(error, "errors")}
    return reasons, str(error.get("message")).lower()


def _brightdata(reply: Reply) -> Verdict:
    """400 about the zone is a wrong setting."""
    if reply.status == 400 and "zone" in reply.text.lower():
        return "configuration"
    return classify_json(reply)
