"""Text that every encoding can hold, and that is nothing but text to a model."""

import re
from collections.abc import Collection

__all__ = ["plain_text", "without_control"]

_CONTROL = r"<[|｜][^\s<>|｜]+[|｜]>"


def plain_text(text: str) -> str:
    """``text`` with ``?`` for every half of a surrogate pair, which UTF-8 and no token can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def without_control(text: str, spellings: Collection[str]) -> str:
    """The text with its control tokens broken by a space, ``<|im_end|>`` as ``< |im_end|>``.

    Args:
        text: by whoever wrote it.
        spellings: control tokens, besides everything of the form ``<|name|>``, also with the wide
            bars of DeepSeek's models.
    """
    longest_first = sorted(spellings, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), _CONTROL])
    return re.sub(pattern, lambda found: f"{found[0][0]} {found[0][1:]}", text)
