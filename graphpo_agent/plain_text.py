"""Text that every encoding can hold."""

__all__ = ["plain_text"]


def plain_text(text: str) -> str:
    """``text`` with ``?`` for every half of a surrogate pair, which UTF-8 and no token can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
