"""Seeds that belong to a place in a graph, not to the order in which things ran."""

from hashlib import blake2b

__all__ = ["derive_seed"]


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed from what names a continuation (run seed, step, task, layer, node, sibling).

    Example: ``derive_seed(0, 3, "kb-1f0c", 2, 7, 1)`` is the same number on every machine.
    """
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
