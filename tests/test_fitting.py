from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack

import numpy as np
import pytest

from graphpo_agent.fitting import annotations_of, fits
from graphpo_agent.net.store import CallStore


class Reads(Protocol):
    def read(self) -> str: ...


class Settings(TypedDict, total=False):
    tries: int


OBJECT = {"class": "some:Thing"}
FUNCTION = {"function": "some:thing"}


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [3, 0], [1.5, True, "3", None, [3]]),
        (float, [3, 0.5], [True, "3", None]),
        (float | None, [3, 0.5, None], ["3", []]),
        (bool, [True], [1, "yes", None]),
        (str, ["", "a"], [3, None, ["a"]]),
        (Path | str, ["a", Path("a")], [3, None]),
        (Path, ["a"], [3]),
        (Sequence[str], [[], ["a"]], ["a", [3], None, {"a": 1}]),
        (str | Sequence[str], ["a", ["a"]], [3, [3]]),
        (Sequence[Reads], [[OBJECT]], [["a"], OBJECT["class"]]),
        (tuple[int, ...], [[1, 2]], [1, ["a"]]),
        (Literal["a"] | Literal[False], ["a", False], ["b", 0, True]),
        (Mapping[str, Any] | None, [{"a": 1}, {}, None], [3, "a", []]),
        (dict, [{"a": 1}], [3]),
        (Settings, [{"tries": 1}], [3]),
        (Callable[[str], str], [FUNCTION, len], ["some:thing", 3]),
        (Reads, [OBJECT, FUNCTION, object()], ["a", 3, None, {"a": 1}]),
        (CallStore | None, [OBJECT, None], ["calls.sqlite", 3]),
        (np.ndarray, [OBJECT, np.zeros(1)], [[1.0]]),
        (Any, [3, "a", None, OBJECT], []),
        ("a forward reference", [3, None], []),
        (object, [3, None], []),
    ],
)
def test_what_yaml_can_hold_fits_what_it_may_be(
    annotation: Any, good: Sequence[Any], bad: Sequence[Any]
) -> None:
    assert [value for value in good if not fits(value, annotation)] == []
    assert [value for value in bad if fits(value, annotation)] == []


def test_settings_behind_stars_are_arguments_too() -> None:
    def function(name: str, *rest: int, free=None, **settings: Unpack[Settings]) -> None: ...

    found = annotations_of(function)
    assert (found["name"], found["tries"]) == (str, int)
    assert fits(3, found["free"]) and "settings" not in found
