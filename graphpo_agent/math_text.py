r"""Where a mathematical text states its answer."""

import re

__all__ = ["final_answer", "last_boxed"]

_BRACE = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\boxed\s*(?P<bare>\d+(?:\.\d+)?)|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_DISPLAYED = {r"\[": r"\]", r"\(": r"\)", "$$": "$$", "$": "$"}
_LINE = re.compile(
    r"^[ \t>#*_-]*(?:the[ \t]+)?(?:final[ \t]+)?answer[ \t*_]*(?:is[ \t*_]*)?[:：]"
    r"[\s*_]*(\S[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_STOP = re.compile(r"([*_`])[.。]$")
"""Behind an emphasis."""


def final_answer(response: str) -> str | None:
    r"""The last thing that a response states as its answer; None where it states none.

    That is the content of its last complete ``\boxed{}``, or the rest of its last line
    ``Answer: …``, whichever comes later; what stands before ``</think>`` does not count.

    Example: ``final_answer("First \\boxed{4}, then \\boxed{5}.")`` is ``"5"``, and
    ``final_answer("**Answer:** $34$")`` is ``"$34$"``.
    """
    text = response.rpartition("</think>")[2]
    lines = list(_LINE.finditer(text))
    start = lines[-1].start() if lines else 0
    boxed = last_boxed(text[start:])
    if boxed is None and lines:
        return _of_line(text, lines[-1])
    return boxed


def _of_line(text: str, line: re.Match[str]) -> str | None:
    """What a line ``Answer: …`` says, or the formula that is displayed below it."""
    told = _STOP.sub(r"\1", line[1].strip()).strip(" \t\r*_`")
    if "\\boxed" in told:  # cut off
        return last_boxed(text[: line.start()])
    if told in _DISPLAYED:
        told = text[line.end() :].partition(_DISPLAYED[told])[0].strip()
    return told or None


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{}`` whose braces are balanced; None without one.

    A number behind ``\boxed`` without braces counts as well.

    Example: ``last_boxed("\\boxed{\\frac{1}{2}} \\boxed{")`` is ``"\\frac{1}{2}"``.
    """
    found: tuple[int, int] | None = None
    opened: list[int | None] = []  # where the content of each open box begins; None: other braces
    for brace in _BRACE.finditer(text):
        if brace.lastgroup == "close" and opened:
            start = opened.pop()
            if start is not None and (found is None or start > found[0]):
                found = start, brace.start()
        elif brace.lastgroup == "bare":
            found = brace.span("bare")
        elif brace.lastgroup in ("box", "open"):
            opened.append(brace.end() if brace.lastgroup == "box" else None)
    return None if found is None else text[slice(*found)].strip()
