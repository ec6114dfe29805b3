"""The text of JSON tool calls in ``<tool_call>``: where their strings and their code stand."""

import re

__all__ = ["FENCE", "STRING_OR_CODE", "ends_inside_call", "without_call_text"]

FENCE = r"```(?:json)?+\s*+"
"""What may open a call (three backticks)."""
STRING_OR_CODE = r'"(?:[^"\\]|\\.?)*+(?P<end>"?)|<code>.*+'
"""A string, to its end or that of the text, or all that follows where code begins."""
_BEGUN = re.compile(rf"\s*+(?:{FENCE})?+\{{")
_STRINGS_AND_CODE = re.compile(STRING_OR_CODE, re.DOTALL)
_CALL_TAG = re.compile(r"(</?tool_call>)")


def ends_inside_call(text: str) -> bool:
    """Whether a text ends in a string or in the code of a call that has not closed."""
    _, opened, call = text.rpartition("<tool_call>")
    if not opened or "</tool_call>" in call or not _BEGUN.match(call):
        return False
    return any(part["end"] != '"' for part in _STRINGS_AND_CODE.finditer(call))


def without_call_text(text: str) -> str:
    """A text with an ``x`` for each string of its calls and for their code.

    Example: ``without_call_text('<tool_call>{"name": "</answer>"}')`` is ``'<tool_call>{x: x}'``.
    """
    parts = _CALL_TAG.split(text)
    for i in range(2, len(parts), 2):
        if parts[i - 1] == "<tool_call>" and _BEGUN.match(parts[i]):
            parts[i] = _STRINGS_AND_CODE.sub("x", parts[i])
    return "".join(parts)
