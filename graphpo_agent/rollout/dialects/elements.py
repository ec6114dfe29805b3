"""Tagged elements in a policy's words, and the same tags made harmless in anybody else's."""

import re
from collections.abc import Iterable

__all__ = ["TagGuard", "first_element"]


def first_element(text: str, tag: str, opening: str = "last") -> tuple[int, str] | None:
    """Where the first complete element of a tag closes, and its stripped content; linear time.

    Tags are spelled exactly. The content starts at the last opening tag before that close, or at
    the first one with ``opening="first"``.

    Example: ``first_element("<a> x <a> y </a>", "a") == (12, "y")``
    """
    start_tag, end_tag = f"<{tag}>", f"</{tag}>"
    first = text.find(start_tag)
    if first < 0:
        return None
    close = text.find(end_tag, first + len(start_tag))
    if close < 0:
        return None
    start = first if opening == "first" else text.rfind(start_tag, first, close)
    return close, text[start + len(start_tag) : close].strip()


class TagGuard:
    """Makes a dialect's tags in other people's text harmless.

    The ``<`` of every such tag, opening or closing, in any case and spacing and with attributes or
    none, becomes ``‹`` (U+2039).

    Example: ``TagGuard(["answer"]).disarm("< /Answer x>") == "‹ /Answer x>"``
    """

    def __init__(self, tags: Iterable[str]) -> None:
        names = "|".join(map(re.escape, tags))
        self._pattern = re.compile(rf"<(?=\s*+(?:/\s*+)?(?:{names})\b)", flags=re.IGNORECASE)

    def disarm(self, text: str) -> str:
        """``text`` without a tag that could be read as one."""
        return self._pattern.sub("‹", text)
