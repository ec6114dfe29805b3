"""Bytes of a page to text that is safe to show: charset, no text at all, unseen characters."""

import codecs
import re

from tools.charsets import codec_of

__all__ = ["clean_text", "decode_page", "is_binary"]

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_META_CHARSET = re.compile(
    rb"""(?:<meta[^>]{0,512}?charset|^\s*<\?xml[^>]{0,512}?encoding)"""
    rb"""\s*=\s*["']?\s*([A-Za-z0-9_:.+-]{1,40})"""
)
_META_BYTES = 2048

_HEAD_CHARACTERS = 4096
_BINARY = re.compile("[\x01-\x08\x0b\x0e-\x1a\x1c-\x1f]")
"""Controls that no text has many of (WHATWG MIME Sniffing, section 3, calls them binary data)."""

_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_UNSEEN = re.compile(
    "["
    "\x00-\x08\x0e-\x1f\x7f-\x9f"  # controls but tab and newline
    "\xad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0"  # fillers and soft hyphen
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction marks, embeddings, overrides
    "\u200b-\u200d\u2060-\u2065\u206a-\u206f\ufeff"  # zero width, invisible operators
    "\ufe00-\ufe0f\U000e0100-\U000e01ef"  # variation selectors
    "\U000e0000-\U000e00ff"  # tags, which spell ASCII unseen
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U00013430-\U0001343f"  # layout of notation
    "\ufff0-\ufffb\ud800-\udfff"  # annotation marks, lone surrogates
    "]"
)
_SPACE = "[ \t\xa0\u1680\u2000-\u200a\u202f\u205f\u3000]"
_SPACES = re.compile(f"(?<!{_SPACE}){_SPACE}++$", re.MULTILINE)
"""Looked at once from their first on: a page may hold millions in a row."""
_GAPS = re.compile("\n{3,}")


def clean_text(text: str) -> str:
    r"""Text without characters that change it unseen, lines ended by ``\n``.

    Taken out are control characters, direction overrides, zero-width and tag characters,
    variation selectors and lone surrogates; also spaces at the ends of lines and more than one
    blank line in a row.

    Example: ``clean_text("a\u202eb\u200b \r\n\r\n\r\n\x1b[2Jc")`` is ``"ab\n\n[2Jc"``.
    """
    text = _UNSEEN.sub("", _LINE_ENDS.sub("\n", text))
    return _GAPS.sub("\n\n", _SPACES.sub("", text)).strip()


def decode_page(body: bytes, declared: str | None) -> str:
    """A page's characters.

    The charset is the byte order mark's, else the declared one (HTTP header), else that of an XML
    declaration or a ``<meta>`` among the first bytes, else UTF-8, else windows-1252; names of no
    known charset are passed over. Where these can be read the page is not in UTF-16: they mean
    UTF-8 then.
    What does not fit the charset becomes U+FFFD.
    """
    for mark, charset in _BYTE_ORDER_MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(charset, "replace")
    meta = _META_CHARSET.search(body[:_META_BYTES].lower())
    stated = codec_of(declared) if declared else None
    if stated is None and meta is not None:
        stated = codec_of(meta[1].decode("ascii"))
        stated = "utf-8" if stated in ("utf-16-le", "utf-16-be") else stated
    if stated is not None:
        return body.decode(stated, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        cut_inside = error.end == len(body) and error.reason == "unexpected end of data"
        return body.decode("utf-8" if cut_inside else "cp1252", "replace")


def is_binary(text: str) -> bool:
    r"""Whether decoded bytes were no text: an image or an archive, a PDF, or still compressed.

    Example: ``is_binary("\x89PNG\r\n\x1a\n\0\0\0\rIHDR\x02\x03\x08\x06")``
    """
    head = text[:_HEAD_CHARACTERS]
    return head.startswith("%PDF-") or len(_BINARY.findall(head)) > 2 + len(head) / 100
