"""How numbers are written for people; NaN, the undefined, is always a dash."""

import math

__all__ = ["UNDEFINED", "compact", "duration", "fixed", "in_table", "percent", "signed"]

UNDEFINED = "–"


def fixed(value: float, digits: int) -> str:
    """A number with a fixed count of decimals.

    >>> fixed(0.625, 2), fixed(float("nan"), 2)
    ('0.62', '–')
    """
    return f"{value:.{digits}f}" if math.isfinite(value) else UNDEFINED


def in_table(text: str) -> str:
    r"""A text as a cell of a Markdown table.

    >>> in_table("key|text")
    'key\\|text'
    """
    return text.replace("|", r"\|")


def signed(value: float, digits: int) -> str:
    """A number that always shows its sign; a rounded zero has none.

    >>> signed(0.7, 2), signed(-0.25, 1), signed(-0.001, 2)
    ('+0.70', '−0.2', '0.00')
    """
    if not math.isfinite(value):
        return UNDEFINED
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else "−") + text


def percent(share: float) -> str:
    """A share in [0, 1] as percent.

    >>> percent(0.634)
    '63.4%'
    """
    return f"{100 * share:.1f}%" if math.isfinite(share) else UNDEFINED


def compact(value: float) -> str:
    """A magnitude with three significant digits, from 1e-3 on in at most six characters.

    >>> compact(0), compact(950), compact(34_512), compact(1.2e6), compact(0.034), compact(2.5e-6)
    ('0', '950', '34.5k', '1.2M', '0.034', '2.5e-06')
    """
    if not math.isfinite(value):
        return UNDEFINED
    size = abs(value)
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{value / unit:.3g}{suffix}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter.

    >>> duration(8.4), duration(250), duration(3_725), duration(float("nan"))
    ('8s', '4m10s', '1h02m', '–')
    """
    if not math.isfinite(seconds):
        return UNDEFINED
    whole = round(max(seconds, 0))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"
