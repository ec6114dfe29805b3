"""What a page is to be read as, by its Content-Type and its first characters."""

import re
from typing import Literal

__all__ = ["PageKind", "is_text", "page_kind", "parse_content_type"]

PageKind = Literal["html", "feed", "text"]
"""``feed`` is RSS or Atom; ``text`` is shown as it is written."""

_HTML = frozenset(("text/html", "application/xhtml+xml"))
_XML = frozenset(("text/xml", "application/xml"))
_UNSTATED = frozenset(("", "*/*", "unknown/unknown", "application/unknown"))
_FEEDS = frozenset(("rss", "feed", "rdf:rdf"))
_FIRST_TAG = re.compile(
    r"(?:\s|<\?.*?\?>|<!--.*?-->|<!doctype[^\[>]*(?:\[.*?\]\s*)?>)*+<([a-z][\w.:-]*)[\s/>]",
    re.IGNORECASE | re.DOTALL,
)
"""Behind what may precede it: declarations, comments and the document type."""


def parse_content_type(header: str) -> tuple[str, str | None]:
    """Type and charset of a Content-Type header.

    Example: ``'Text/HTML; charset="UTF-8"'`` gives ``("text/html", "UTF-8")``.
    """
    content_type, *parameters = header.split(";")
    pairs = [parameter.partition("=") for parameter in parameters]
    charsets = [
        value.strip(" \"'") for name, _, value in pairs if name.strip().lower() == "charset"
    ]
    return content_type.strip().lower(), charsets[0] if charsets else None


def is_text(content_type: str) -> bool:
    """Whether a page of this type may be text; where none is stated, its bytes will tell."""
    readable = content_type == "application/json" or content_type.startswith("text/")
    return readable or content_type in _UNSTATED or _is_xml(content_type)


def page_kind(content_type: str, text: str) -> PageKind:
    """What a text is to be read as, where ``is_text`` holds.

    Where no type is stated, what begins with a tag is HTML (WHATWG MIME Sniffing, section 7, knows
    the tags that a page begins with). A feed is known by its first tag, whatever its type is. XML
    that is neither feed nor XHTML is shown with its tags, as in a browser.

    Example: ``page_kind("application/xml", '<?xml version="1.0"?><rss version="2.0">')`` is
    ``"feed"``.
    """
    match = _FIRST_TAG.match(text)
    tag = match[1].lower() if match is not None else ""
    if content_type in _UNSTATED and tag:
        content_type = "text/xml" if text.lstrip().startswith("<?xml") else "text/html"
    if content_type not in _HTML and not _is_xml(content_type):
        return "text"
    if tag in _FEEDS:
        return "feed"
    return "html" if content_type in _HTML or tag == "html" else "text"


def _is_xml(content_type: str) -> bool:
    application = content_type.startswith("application/") and content_type.endswith("+xml")
    return application or content_type in _XML
