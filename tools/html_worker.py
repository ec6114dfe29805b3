"""A process that turns HTML and feeds into text; ``tools.html_pool`` starts it and may kill it.

It is run as a file, not as a module: neither this package nor what it imports is loaded.

Asked ``{"page": str, "kind": "html" or "feed", "url": str, "links": bool}`` it answers ``{"title":
str, "text": str, "leads_to": str}``; the protocol is that of ``graphpo_agent/net/answering.py``.
"""

import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import lxml.etree
import lxml.html
import trafilatura

__all__ = ["feed_text", "page_text"]

_PARSER = lxml.html.HTMLParser(
    encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True
)
"""It reads what is up to 2,000 elements deep, not 250: many pages close few of their elements.
Comments would end lines: React writes one between any two pieces of a text."""
_FEED_PARSER = lxml.etree.XMLParser(
    encoding="utf-8", recover=True, resolve_entities=False, no_network=True, remove_comments=True
)
_ATOM = "{http://www.w3.org/2005/Atom}"
_DATES = ("{*}pubDate", "{*}published", "{*}updated", "{*}date")
_BODIES = ("{*}encoded", "{*}content", "{*}description", "{*}summary")
_BLOCKS = ("p", "div", "br", "li", "tr", "pre", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6")
_DROPPED = ("script", "style", "template", "noscript", "iframe", "object", "svg")
_READ_CHARACTERS = 200_000
"""Of a page's text: twice what an evidence extractor shows a model, and read within seconds."""
_HIDING = re.compile(
    r"(?:^|;)(?:display:none|visibility:(?:hidden|collapse)|opacity:0(?:\.0*)?(?:;|!|$)"
    r"|font-size:0(?:\.0*)?(?:px|em|rem|pt|%)?(?:;|!|$)|(?:left|top|text-indent):-(?:999|\d{4}))"
)
"""Far to the left or above is out of sight; a little is how pages are laid out."""

_SPACE = re.compile(r"\s+")
_NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML has no place for."""
_BY_NUMBER = re.compile(r"&#(?:x0*([0-9a-f]{1,7})(?![0-9a-f])|0*(\d{1,7})(?!\d));?", re.IGNORECASE)

_REFRESH = re.compile(
    r"\s*[0-5](?:\.\d*)?\s*[;,]\s*+(?:url\s*=\s*)?+(.+)", re.IGNORECASE | re.DOTALL
)
"""Of a ``<meta>``, after at most 5 seconds; a page that renews itself takes longer."""


def page_text(html: str, url: str, links: bool) -> tuple[str, str, str]:
    """Title and readable text of a page, without what a browser would not show, and its successor.

    Hidden are elements with ``hidden`` or a style attribute that hides them; style sheets are not
    read. What comes after the first 200,000 characters is left out. Links and the successor are
    whole addresses, by the page's ``<base>`` where it has one. Title and text are empty where the
    page holds nothing, the successor's address where a browser would stay on the page.
    """
    tree = _parsed(html)
    if tree is None:
        return "", "", ""
    title = " ".join((tree.findtext(".//title") or "").split())
    _drop_unseen(tree)
    base = _base(tree, url)
    leads_to = _successor(tree, base)
    _cut(tree)
    for link in tree.xpath("//a[@href]"):
        link.set("href", _joined(base, link.get("href")) or link.get("href"))
    _part_blocks(tree)
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


def feed_text(source: str, url: str, links: bool) -> tuple[str, str]:
    """Title and entries of an RSS or Atom feed, as a feed reader lists them.

    An entry is its title, its date and its longest text, each on lines of its own. What comes after
    the first 200,000 characters is left out. A feed without entries is shown as it is written.
    """
    root = lxml.etree.fromstring(_text_only(source).strip().encode(), _FEED_PARSER)
    if root is None:
        return "", source
    title = _one_line(root, "{*}title") or _one_line(root, "{*}channel/{*}title")
    text = ""
    for entry in root.iter("{*}item", "{*}entry"):
        text += f"{_entry_text(entry, url, links)}\n\n"
        if len(text) > _READ_CHARACTERS:
            break
    return (title, text) if text else ("", source)


def _entry_text(entry: lxml.etree._Element, url: str, links: bool) -> str:
    heading, link = _one_line(entry, "{*}title"), _entry_link(entry, url) if links else ""
    if link:
        heading = f"[{heading or link}]({link})"
    dates = (_one_line(entry, name) for name in _DATES)
    bodies = (_shown(body) for name in _BODIES for body in entry.iterfind(name))
    parts = (heading, next(filter(None, dates), ""), max(bodies, key=len, default=""))
    return "\n".join(filter(None, parts))


def _entry_link(entry: lxml.etree._Element, url: str) -> str:
    for link in entry.iterfind("{*}link"):
        if link.get("rel", "alternate") == "alternate":
            return _joined(url, link.get("href") or link.text or "")
    return ""


def _one_line(parent: lxml.etree._Element, name: str) -> str:
    """What is shown of the first child of a name; empty: there is none."""
    found = parent.find(name)
    return "" if found is None else " ".join(_shown(found).split())


def _shown(element: lxml.etree._Element) -> str:
    """The lines of what an element holds: XHTML, escaped HTML, or the plain text of Atom."""
    text = element.text or ""
    if not element.tag.startswith(_ATOM) or element.get("type", "text") != "text":
        html = lxml.etree.tostring(element, encoding="unicode") if len(element) else text
        tree = _parsed(html)
        text = "" if tree is None else _lines_of(tree)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(filter(None, lines))


def _lines_of(tree: lxml.html.HtmlElement) -> str:
    """What a browser would show, each block from a new line on; ``<pre>`` keeps its lines."""
    _drop_unseen(tree)
    parts, kept = [""], 0
    for event, node in lxml.etree.iterwalk(tree, events=("start", "end")):
        if node.tag == "pre":
            kept += 1 if event == "start" else -1
        if node.tag in _BLOCKS:
            parts.append("\n")
        text = (node.text if event == "start" else node.tail) or ""
        parts.append(text if kept else _SPACE.sub(" ", text))
    return "".join(parts)


def _parsed(html: str) -> lxml.html.HtmlElement | None:
    """The elements of a page; None: there are none."""
    try:
        return lxml.html.document_fromstring(_text_only(html).encode(), parser=_PARSER)
    except lxml.etree.ParserError:
        return None


def _text_only(source: str) -> str:
    """With a space for each character that XML has no place for, written as it is or by number.

    NULs are left out, as in a browser.
    """

    def without(match: re.Match[str]) -> str:
        code = int(match[1], 16) if match[1] else int(match[2])
        return " " if code > 0x10FFFF or _NO_TEXT.match(chr(code)) else match[0]

    return _BY_NUMBER.sub(without, _NO_TEXT.sub(" ", source.replace("\0", "")))


def _drop_unseen(tree: lxml.html.HtmlElement) -> None:
    for element in list(tree.iter(lxml.etree.Element)):
        if element.tag in _DROPPED or _is_hidden(element):
            _drop(element)


def _base(tree: lxml.html.HtmlElement, url: str) -> str:
    """What the relative addresses of a page start from."""
    return _joined(url, tree.xpath("string(//base/@href)")) or url


def _joined(base: str, written: str) -> str:
    """A whole address; empty: it is none."""
    try:
        return urljoin(base, written.strip().replace(" ", "%20"))
    except ValueError:
        return ""


def _successor(tree: lxml.html.HtmlElement, base: str) -> str:
    """Where ``<meta http-equiv="refresh" content="0; url=/en/">`` leads; empty: to no web page."""
    for meta in tree.iter("meta"):
        refresh = _REFRESH.fullmatch(meta.get("content", ""))
        if refresh is not None and meta.get("http-equiv", "").strip().lower() == "refresh":
            leads_to = _joined(base, refresh[1].strip(" \t\r\n\"'"))
            return leads_to if leads_to.lower().startswith(("http:", "https:")) else ""
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


def _part_blocks(tree: lxml.html.HtmlElement) -> None:
    """Keep ``Price<div>5 €</div>each`` three words, which trafilatura would write as one."""
    for block in tree.iter("div", "address"):
        block.tail = f" {block.tail or ''}"
        before, parent = block.getprevious(), block.getparent()
        if before is not None and not (before.tail or "").endswith(" "):
            before.tail = f"{before.tail or ''} "
        elif before is None and parent is not None and parent.text:
            parent.text += " "


def _cut(tree: lxml.html.HtmlElement) -> None:
    """Take out the elements that begin after so many characters."""
    characters = 0
    for element in list(tree.iter(lxml.etree.Element)):
        if characters > _READ_CHARACTERS:
            element.getparent().remove(element)
        characters += len(element.text or "") + len(element.tail or "")


def _answer(request: Mapping[str, Any]) -> dict[str, str]:
    source, url, links = request["page"], request["url"], request["links"]
    if request["kind"] == "feed":
        title, text = feed_text(source, url, links)
        return {"title": title, "text": text, "leads_to": ""}
    title, text, leads_to = page_text(source, url, links)
    return {"title": title, "text": text, "leads_to": leads_to}


if __name__ == "__main__":
    net = Path(__file__).resolve().parents[1] / "graphpo_agent" / "net"
    runpy.run_path(str(net / "answering.py"))["answer_requests"](_answer)
