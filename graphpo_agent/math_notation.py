r"""A mathematical answer in one notation, and the number that it is.

What an expression means is not asked here: ``rewards.math_worker`` compares them.
"""

import re
from fractions import Fraction
from unicodedata import normalize

__all__ = ["as_number", "plain"]

_SIGNS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "∞": r"\infty ",
        "≈": r"\approx ",
        "≡": r"\equiv ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "·": r"\cdot ",
        "∙": r"\cdot ",
    }
)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_PARTS = re.compile("[¼½¾⅐-⅞]")
_COMMANDS = {
    re.compile(r"\\degree(?![a-zA-Z])|\^(?:o(?![a-zA-Z\d])|\{o\})"): r"^\\circ ",
    re.compile(r"\\varnothing(?![a-zA-Z])"): r"\\emptyset ",
    re.compile(r"\\lbrace(?![a-zA-Z])"): r"\\{",
    re.compile(r"\\rbrace(?![a-zA-Z])"): r"\\}",
    re.compile(r"\\[Bb]igg?[lrm]?(?![a-zA-Z])"): "",
}
"""Other spellings of what math-verify reads."""
_COUNTED = re.compile(
    r"(?P<text>\\(?:text|mbox|mathrm)\{ ?)?([-+]?\d[\d.,]*)"
    r" ([A-Za-z]{4,}(?: [A-Za-z]{2,})*) ?(?(text)\})"
)
"""A number of things. Fewer letters may be factors."""
_NO_THINGS = re.compile(
    r"\b(?:alpha|beta|gamma|delta|theta|lambda|sigma|omega|sqrt|infinity|factorial|choose|log|sin"
    r"|cos|percent|hundred|thousand|million|billion|trillion|dozen|score|hal(?:f|ves)|thirds?"
    r"|quarters?|fourths|fifths|tenths|squared|cubed|over|plus|minus|times|base|more|less|fewer"
    r"|most|least|maybe|perhaps|about|not|n?or|and|but|to|if|for|when|where)\b",
    re.IGNORECASE,
)
"""Words that say which number it is, or that it may be another."""
_EMPHASIS = re.compile(r"(\*\*|__|`)(.+)\1")
_ROOTS = re.compile(r"√(?:(\d+|[a-z])|\((\d+|[a-z])\))")
_STOP = re.compile(r"\s*(?:(?<!\.)[.。]|\\\\)$")
_MARKS = re.compile(r"(?:\*\*)?(?<!\\)(?:\$\$?|\\[()\[\]])(?:\*\*)?")
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALES = "|".join(_ZEROS)
_GOES_ON = re.compile(
    r"[-+*/^_=<>|&{\\]\s*\$|\d\$|\$\d"
    r"|\$\s*(?:[-+*/=<>|&]\s*[-\d.(\\]|[\^_}\\%]|percent$)"
    rf"|\$\s*(?i:{_SCALES})\b"
)
_HEDGE = re.compile(
    r"\bn?or\b|\bnot\W*\$|\b(?:and|but)\W*[\d$]|[\d$]\W*(?:and|but)\b|[,;]\s*[-+]?\d|\d\s*[,;]",
    re.IGNORECASE,
)
_SAYS = re.compile(r"^(?:(?:the )?(?:final )?answer is:? |= ?(?!=))", re.IGNORECASE)
_GROUPS = re.compile(r"(?<=\d)(?:,?\s*\\!\s*|\\[,;: ]|\{,\}|\\text\{,\}|~)(?=\d{3})")
_SPACES = re.compile(r"(?:(?<!\\)\\(?:[,!;: ]|(?:q?quad|displaystyle)\b)|\s|~)+")
_CONSTANT = re.compile(r"\\mathrm\{\s*([ei])\s*\}")
_SAID = re.compile(r"\\(?:text|mbox)\{([^{}]*(?:\(|\bor\b)[^{}]*)\}")
_BEHIND = re.compile(r"(?<=[\w})\]%]) \(([^()]*)\)$")
_EXPLAINS = re.compile(r"=|\\text|(?<![\\a-zA-Z])(?:[a-zA-Z]{2,} [a-zA-Z\d]|[a-zA-Z]{4,}$)")
_ADDS = re.compile(r"\b(?:or|and)\b")
_PERCENT = re.compile(r" ?(?:\\?%|\bpercent|\\text\{\s*percent\s*\})(?: ?\\text\{[^{}]*\})?$")
_NAMED = re.compile(r"^[^=\d]*= ?(?=[^=]*%$)")
_ASSIGNED = re.compile(r"([A-Za-z]) ?= ?([^=<>]+)")
_NEXT = re.compile(r", ?(?:and )?| and | ?\\text\{ ?and ?\} ?")
_MIXED = re.compile(r"(?<![\d.,_^/])(\d{1,50}) (\d{1,50})/(\d{1,50})(?![\d.])")
_BASE = re.compile(r"(?<![a-z\d.^_\\])(\d+) ?_ ?(?!\{?10\b)(?:\{(\d+)\}|(\d+))")
_SCALE = re.compile(
    rf"(?<=[\d}}]) ?(?:({_SCALES})\b|\\(?:text|mbox|mathrm)\{{ ?({_SCALES})\b ?([^{{}}]*)\}})",
    re.IGNORECASE,
)
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\{(\d{1,20})\}(?!\d)")
_SHORT = re.compile(r"\\[dt]?frac ?(?:\{(\d{1,50})\}|(\d)) ?(?:\{(\d{1,50})\}|(\d))")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?%?")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:(?P<decimal>\d{1,50}(?:\.\d{0,50})?|\.\d{1,50})"
    r"|(?P<top>\d{1,50})/(?P<bottom>\d{1,50})"
    r"|(?P<whole>\d{0,50}) ?\\frac\{(?P<over>\d{1,50})\}\{(?P<under>\d{1,50})\})(?P<percent>%?)"
)


def plain(text: str) -> str:
    r"""Without marks of mathematics, the full stop and a remark behind it, and spacing commands.

    A single formula among words is what they speak of, and stands alone, unless they name another
    answer (``$5$ or 6``). Signs, mixed numbers, millions and decimals that repeat become LaTeX, a
    percentage is ``20%`` without its name, a base other than ten a factor, and values of different
    names are a tuple, in the order of the names (``y = 2, x = 1`` is ``(1,2)``).

    Example: ``plain("$4 2/3$ (for n = 1)")`` is ``"4\\frac{2}{3}"``.
    """
    text = _RAISED.sub(lambda run: f"^{{{normalize('NFKC', run[0])}}}", text)
    text = _ROOTS.sub(r"\\sqrt{\1\2}", _PARTS.sub(_part, text).translate(_SIGNS))
    for spelling, known in _COMMANDS.items():
        text = spelling.sub(known, text)
    text = _STOP.sub("", text.replace(r"\$", "").strip()).strip()
    if marked := _EMPHASIS.fullmatch(text):
        text = _STOP.sub("", marked[2]).strip()
    counted = _COUNTED.fullmatch(text)
    if counted and not _NO_THINGS.search(counted[3]):
        text = f"${counted[2]}$ {counted[3]}"
    text = _SAID.sub(r" \1 ", _formula(_MARKS.sub("$", text)))
    text = _SPACES.sub(" ", _GROUPS.sub("", text)).strip()
    text = _CONSTANT.sub(r"\1", _without_remark(_SAYS.sub("", text)))
    text = _NAMED.sub("", _PERCENT.sub("%", text))
    text = _SHORT.sub(r"\\frac{\1\2}{\3\4}", _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = _SCALE.sub(_power_of_ten, text)
    return _REPEATING.sub(_repeated, _BASE.sub(r"\1\\beta_{\2\3}", _by_name(text)))


def as_number(text: str) -> Fraction | None:
    """An integer, a decimal, mixed or repeating number, a fraction or a percentage, exactly.

    The text is ``plain``. None: it is something else.

    Example: ``as_number("75%")`` is ``Fraction(3, 4)``.
    """
    found = _NUMBER.fullmatch(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    if found is None:
        return None
    under = int(found["bottom"] or found["under"] or 1)
    if under == 0:
        return None
    whole = Fraction(found["decimal"] or found["whole"] or 0)
    size = whole + Fraction(int(found["top"] or found["over"] or 0), under)
    return (-size if found["sign"] == "-" else size) / (100 if found["percent"] else 1)


def _formula(text: str) -> str:
    """The only formula among words; else all of it without the marks."""
    around = re.fullmatch(r"([^$]*)\$([^$]+)\$([^$]*)", text)
    if around is None:
        return text.replace("$", "")  # several formulas are one list
    words = f"{around[1]}${around[3]}"
    spoken_of = re.search(r"[^\W\d_]", words) and not _GOES_ON.search(words)
    return around[2] if spoken_of and not _HEDGE.search(words) else text.replace("$", "")


def _by_name(text: str) -> str:
    """The values of several names in the order of the names; anything else as it is."""
    found = [_ASSIGNED.fullmatch(part) for part in _NEXT.split(text)]
    values = {each[1]: each[2] for each in found if each}
    if not 1 < len(values) == len(found):
        return text
    return f"({','.join(values[name] for name in sorted(values))})"


def _without_remark(text: str) -> str:
    """Without a parenthesis behind it that explains: ``5 (for n = 3)`` is ``5``."""
    behind = _BEHIND.search(text)
    if behind is None or _ADDS.search(behind[1]) or not _EXPLAINS.search(behind[1]):
        return text
    return text[: behind.start()]


def _part(sign: re.Match[str]) -> str:
    top, _, bottom = normalize("NFKC", sign[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _power_of_ten(match: re.Match[str]) -> str:
    word, in_text, unit = match.groups()
    power = rf"\cdot 10^{{{_ZEROS[(word or in_text).lower()]}}}"
    return rf"{power} \text{{{unit}}}" if unit else power


def _repeated(match: re.Match[str]) -> str:
    whole, once, again = match.groups()
    top = int(whole + once + again) - int(whole + once or 0)
    return rf"\frac{{{top}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"
