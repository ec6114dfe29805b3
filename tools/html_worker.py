"""A process that turns HTML into text; started by ``tools.html_pool``, which may kill it.

It is run as a file, not as a module: neither this package nor what it imports is loaded.

Asked ``{"html": str, "url": str, "links": bool}`` it answers ``{"title": str, "text": str,
"leads_to": str}``; the protocol is that of ``graphpo_agent/net/answering.py``.
"""

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lxml.etree
import lxml.html
import trafilatura

__all__ = ["page_text"]

_PARSER = lxml.html.HTMLParser(encoding="utf-8")
_DROPPED = ("script", "style", "template", "noscript", "iframe", "object", "svg")
_HIDING = re.compile(
    r"(?:^|;)(?:display:none|visibility:(?:hidden|collapse)|opacity:0(?:\.0*)?(?:;|!|$)"
    r"|font-size:0(?:\.0*)?(?:px|em|rem|pt|%)?(?:;|!|$)|(?:left|top|text-indent):-(?:999|\d{4}))"
)
"""Far to the left or above is out of sight; a little is how pages are laid out."""

_REFRESH = re.compile(
    r"\s*[0-5](?:\.\d*)?\s*[;,]\s*+(?:url\s*=\s*)?+(.+)", re.IGNORECASE | re.DOTALL
)
"""Of a ``<meta>``, after at most 5 seconds; a page that renews itself takes longer."""


def page_text(html: str, url: str, links: bool) -> tuple[str, str, str]:
    """Title and readable text of a page, without what a browser would not show, and its successor.

    Hidden are elements with ``hidden`` or a style attribute that hides them; style sheets are not
    read. Title and text are empty where the page holds nothing, the successor's address where a
    browser would stay on the page.
    """
    try:
        tree = lxml.html.document_fromstring(html.replace("\0", "").encode(), parser=_PARSER)
    except lxml.etree.ParserError:
        return "", "", ""
    title = " ".join((tree.findtext(".//title") or "").split())
    for element in list(tree.iter(lxml.etree.Element)):
        if element.tag in _DROPPED or _is_hidden(element):
            _drop(element)
    leads_to = _successor(tree)
    text = trafilatura.extract(
        tree,
        url=url,
        output_format="txt",
        include_comments=False,
        include_links=links,
        include_tables=True,
        favor_recall=True,
    )
    return title, text or "", leads_to


def _successor(tree: lxml.html.HtmlElement) -> str:
    """Where ``<meta http-equiv="refresh" content="0; url=/en/">`` leads; empty: nowhere."""
    for meta in tree.iter("meta"):
        refresh = _REFRESH.fullmatch(meta.get("content", ""))
        if refresh is not None and meta.get("http-equiv", "").strip().lower() == "refresh":
            return refresh[1].strip(" \t\r\n\"'")
    return ""


def _is_hidden(element: lxml.html.HtmlElement) -> bool:
    """Whether a browser would not show it; whole pages hide themselves until a script runs."""
    if element.tag in ("html", "body"):
        return False
    style = "".join(element.get("style", "").lower().split())
    return "hidden" in element.attrib or bool(_HIDING.search(style))


def _drop(element: lxml.html.HtmlElement) -> None:
    if element.getparent() is not None:
        element.drop_tree()


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    title, text, leads_to = page_text(request["html"], request["url"], request["links"])
    return {"title": title, "text": text, "leads_to": leads_to}


if __name__ == "__main__":
    net = Path(__file__).resolve().parents[1] / "graphpo_agent" / "net"
    runpy.run_path(str(net / "answering.py"))["answer_requests"](_answer)
