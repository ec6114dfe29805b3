"""What came out of the calibration, in words whose numbers are those of ``calibration.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Choices", "differing_cells", "findings", "served_alike"]

Choices = Mapping[str, Mapping[str, Any]]
"""The ``choices`` of ``calibration.json``: name to ``{"recommended": row, "rows": [row…]}``."""

ENCODER, SERVED = "frozen_encoder", ("frozen_openai", "frozen_tei")
"""The last two embed what the first one embeds, with the same encoder behind an endpoint."""

PAPER = 0.92


def findings(choices: Choices, tolerance: float, score_error: float) -> str:
    """A few sentences: who merges how many rightly, at which kappa, and what fails.

    The endpoints are left out: they give the encoder's numbers.

    Args:
        choices: at least one with keys, and one with a threshold.
        tolerance: of the spread inside classes.
        score_error: with nothing merged.
    """
    shown = {name: choice for name, choice in choices.items() if name not in SERVED}
    tuned = {name: c["rows"] for name, c in shown.items() if c["rows"][0]["threshold"] is not None}
    keys = {name: c["rows"][0] for name, c in shown.items() if name not in tuned}
    found = {name: shown[name]["recommended"] for name in tuned if shown[name]["recommended"]}
    ranked = sorted(found, key=lambda name: -_right(found[name]))
    failing = [name for name in tuned if name not in found]
    sentences = [
        _keys(keys, score_error, tolerance),
        _ranked({name: found[name] for name in ranked}) if ranked else "",
        f"For {_listed(failing)} no κ keeps the spread within {tolerance:g}." if failing else "",
        _at_paper({name: _row(rows, PAPER) for name, rows in tuned.items()}, tolerance),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _keys(keys: Mapping[str, Mapping[str, Any]], score_error: float, tolerance: float) -> str:
    measured = {name: row for name, row in keys.items() if row["spread"] is not None}
    if not measured:
        return "No pair that merges by its keys was measured."
    parts = [
        f"`{name}` merges {row['merged_pairs']:,} pairs, {row['right']:.1%} of them right (spread "
        f"inside classes {row['spread']:.2f}, with its bound "
        f"{'within' if row['spread_upper'] <= tolerance else 'beyond'} {tolerance:g}; error of S "
        f"{row['score_error']:.3f})"
        for name, row in measured.items()
    ]
    return (
        f"Of the keys, {_joined(parts)}; with nothing merged the error of S is {score_error:.3f}."
    )


def _ranked(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """All recommended rows in order, and how much of the reference they find."""
    recalls = {name: row["recall"] for name, row in rows.items()}
    low, most = min(recalls.values()), max(recalls, key=lambda name: recalls[name])
    return (
        "With vectors, the recommended κ and the merges that are right there are: "
        + "; ".join(_at(name, row) for name, row in rows.items())
        + f". They merge {low:.1%} to {recalls[most]:.1%} of the pairs that are one state by the "
        f"run's own key, `{most}` most of them."
    )


def _at(name: str, row: Mapping[str, Any]) -> str:
    return (
        f"`{name}` {row['threshold']:g}, {_right(row):,.0f} of {row['merged_pairs']:,} "
        f"(error of S {row['score_error']:.3f})"
    )


def _at_paper(rows: Mapping[str, Mapping[str, Any]], tolerance: float) -> str:
    known = {name: row for name, row in rows.items() if row["spread_upper"] is not None}
    within = [name for name, row in known.items() if row["spread_upper"] <= tolerance]
    spreads = [row["spread"] for name, row in known.items() if name not in within]
    if not known:
        return f"At the paper's κ of {PAPER} nothing was measured."
    if not spreads:
        return f"At the paper's κ of {PAPER} all of them stay within {tolerance:g}."
    good = f"only {_listed(within)} would do" if within else "none of them would do"
    classes = "the classes of the others" if within else "their classes"
    return (
        f"At the paper's κ of {PAPER} {good}: the spread inside {classes} is {min(spreads):.2f} to "
        f"{max(spreads):.2f} of that between any two states."
    )


def differing_cells(choices: Choices, name: str) -> tuple[int, int]:
    """Numbers of a served choice's rows that are not ``frozen_encoder``'s, and all of them."""
    pairs = [
        (own[field], row[field])
        for own, row in zip(choices[ENCODER]["rows"], choices[name]["rows"], strict=True)
        for field in own
    ]
    return sum(a != b for a, b in pairs), len(pairs)


def served_alike(choices: Choices) -> str:
    """Whether the endpoints give the encoder's rows, in words."""
    parts: list[str] = []
    for name in SERVED:
        differing, total = differing_cells(choices, name)
        parts.append(f"{total - differing} of the {total} numbers of `{name}`")
    return f"Equal to those of `{ENCODER}` are {_joined(parts)}."


def _row(rows: Sequence[Mapping[str, Any]], threshold: float) -> Mapping[str, Any]:
    return next(row for row in rows if row["threshold"] == threshold)


def _right(row: Mapping[str, Any]) -> float:
    return row["right"] * row["merged_pairs"]


def _listed(names: Sequence[str]) -> str:
    return _joined([f"`{name}`" for name in names])


def _joined(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
