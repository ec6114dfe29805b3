import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, Unpack, runtime_checkable

import pytest

from graphpo_agent.errors import ConfigError
from graphpo_agent.named import callable_of, check_constructible, constructed
from graphpo_agent.net.store import CallStore
from graphpo_agent.rewards.qa import token_f1
from graphpo_agent.types import Outcome, Task

TOKEN_F1 = {"function": "graphpo_agent.rewards.qa:token_f1"}


class Pair:
    def __init__(self, left: Any, right: Any = None) -> None:
        self.left = left
        self.right = right


class Whole:
    def __init__(self, number: Any) -> None:
        self.number = int(number)


class Odd:
    def __init__(self, number: Any) -> None:
        raise ValueError(f"{number}\nis even")


HERE = "tests.test_named:Pair"
TASK = Task("t", "q", ("oak tree",))


def test_objects_functions_and_lists_of_them_are_built_inside_out() -> None:
    spec = {
        "class": HERE,
        "left": [{"class": HERE, "left": 1}, 2],
        "right": {"function": "graphpo_agent.rewards.qa:token_f1"},
    }
    check_constructible(spec)
    built = constructed(spec)
    assert isinstance(built.left[0], Pair) and (built.left[0].left, built.left[1]) == (1, 2)
    assert built.right is token_f1


def test_plain_mappings_are_arguments_as_they_are() -> None:
    for plain in ({"a": {"b": 1}}, {"function": "f", "of": 1}):
        assert constructed({"class": HERE, "left": plain}).left == plain


def test_keys_of_a_mapping_may_be_dates() -> None:
    spec = {"class": "tests.test_named:Pair", "left": {date(2026, 1, 1): "closed"}}
    assert constructed(spec).left == {date(2026, 1, 1): "closed"}


def test_a_module_that_is_no_python_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_written.py").write_text("def reward(task, outcome:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot find 'half_written:reward'") as caught:
        callable_of("half_written:reward", "task", "outcome")
    assert "\n" not in str(caught.value)


def test_what_a_module_itself_raises_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "own_reward_of_numpy.py"
    module.write_text("import math\n\nPI = math.py\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"no attribute 'py' ({module}:3)")):
        callable_of("own_reward_of_numpy:reward", "task", "outcome")
    module.write_text("class Reward:\n    def __init__(self):\n        self.size = len(None)\n")
    with pytest.raises(ConfigError, match=re.escape(f"has no len() ({module}:3)")):
        constructed({"class": "own_reward_of_numpy:Reward"})


def test_a_module_in_the_place_of_the_one_that_is_meant_is_named() -> None:
    for path in ("tools.own:Tool", "tools:Tool"):  # of somebody's directory of the same name
        with pytest.raises(ConfigError, match=r"\(tools is .*tools/__init__\.py\)"):
            check_constructible({"class": path})


def test_a_reward_is_a_function_or_an_object_that_is_called() -> None:
    f1 = callable_of("graphpo_agent.rewards.qa:token_f1", "task", "outcome")
    spec = {
        "class": "graphpo_agent.rewards.qa:Binarize",
        "threshold": 0.5,
        "reward": {"function": "graphpo_agent.rewards.qa:token_f1"},
    }
    binary = callable_of(spec, "task", "outcome")
    outcome = Outcome("", answer="oak")
    assert (f1(TASK, outcome), binary(TASK, outcome)) == (pytest.approx(2 / 3), 1.0)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"class": "tests.test_named:Gone"}, "cannot find 'tests.test_named:Gone'"),
        ({"class": "nowhere:X"}, "cannot find 'nowhere:X'"),
        ({"class": "tests.test_named:TASK"}, "is no function or class"),
        ({"class": HERE}, "missing a required argument: 'left'"),
        (
            {"class": HERE, "left": 1, "up": 2},
            "unexpected keyword argument 'up'; it takes left, right",
        ),
        ({"class": HERE, "left": [{"class": HERE}]}, "missing a required argument"),
        ({"class": HERE, "left": {"function": "x"}}, "write module:name"),
        ({"class": HERE, "left": {"class": 5}}, "5: write module:name"),
        ({"class": ".tests:Pair"}, "cannot find '.tests:Pair'"),
        (
            {"class": "graphpo_agent.rewards.qa:token_f1"},
            "it takes task, outcome; it is a function: write its name alone",
        ),
        (
            {"class": "graphpo_agent.rewards.asearcher:ASearcherReward", "metric": "f2"},
            "metric must be one of f1, em, found 'f2'",
        ),
        ({"class": "builtins:dict", "a": 1}, "no signature found"),
        (
            {"class": "graphpo_agent.net.client:Limits", "tries": "many"},
            "tries must be of type int",
        ),
        (
            {"class": "retrievers.remote:RemoteRetriever", "urls": "h:1", "store": "calls.sqlite"},
            "store must be of type .*CallStore | None, found 'calls.sqlite'",
        ),
        (
            {"class": "retrievers.remote:RemoteRetriever", "urls": ["h:1", "http://u:secret@h"]},
            r"urls is not valid: server: 'http://\*\*\*@h' is no address; write http://HOST:PORT$",
        ),
        (
            {"class": "retrievers.remote:RemotePages", "urls": "ftp://host/access"},
            "urls is not valid: server: 'ftp://host/access' is no address",
        ),
        (
            {"class": "retrievers.web:SerperSearch", "blocked_hosts": "a.org"},
            "blocked_hosts must be of type",
        ),
    ],
)
def test_what_cannot_be_built_is_one_line_before_anything_is(spec: Any, says: str) -> None:
    for attempt in (check_constructible, constructed):
        with pytest.raises(ConfigError, match=says):
            attempt(spec)


def test_a_value_that_the_class_cannot_use_is_one_line() -> None:
    spec = {"class": "tests.test_named:Whole", "number": "many"}
    check_constructible(spec)
    with pytest.raises(ConfigError, match="test_named:Whole cannot be built so: invalid lit"):
        constructed(spec)
    with pytest.raises(ConfigError, match="test_named:Odd cannot be built so: 2 is even"):
        constructed({"class": "tests.test_named:Odd", "number": 2})


def test_a_class_named_like_a_function_is_refused() -> None:
    path = "graphpo_agent.rewards.search_r1:SearchR1Reward"
    with pytest.raises(ConfigError, match=f"'{path}' is a class: write {{class: '{path}'}}"):
        callable_of(path, "task", "outcome")


def test_an_object_that_is_not_called_so_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be called with"):
        callable_of("graphpo_agent.rewards.qa:normalize_answer", "task", "outcome")


@runtime_checkable
class Reads(Protocol):
    def read(self) -> str: ...


class Unchecked(Protocol):
    def read(self) -> str: ...


class Settings(TypedDict, total=False):
    tries: int


OBJECT = {"class": HERE, "left": 1}
FUNCTION = {"function": "graphpo_agent.rewards.qa:token_f1"}


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, [3, 0], [1.5, True, "3", None, [3]]),
        (float, [3, 0.5], [True, "3", None]),
        (float | None, [3, 0.5, None], ["3", []]),
        (bool, [True], [1, "yes", None]),
        (str, ["", "a"], [3, None, ["a"]]),
        (Path | str, ["a"], [3, None]),
        (Path, ["a"], [3]),
        (Sequence[str], [[], ["a"]], ["a", [3], None, {"a": 1}]),
        (str | Sequence[str], ["a", ["a"]], [3, [3]]),
        (Sequence[Reads], [[OBJECT]], [["a"], "a"]),
        (tuple[int, ...], [[1, 2]], [1, ["a"]]),
        (Literal["a"] | Literal[False], ["a", False], ["b", True]),
        (Mapping[str, Any] | None, [{"a": 1}, {}, None], [3, "a", []]),
        (Callable[[str], str], [FUNCTION], ["some:thing", 3]),
        (Reads, [OBJECT, FUNCTION], ["a", 3, None, {"a": 1}]),
        (CallStore | None, [OBJECT, None], ["calls.sqlite", 3]),
        (Any, [3, "a", None, OBJECT], []),
        (Unchecked, [3, OBJECT], []),
        ("AForwardReference", [3, None], []),
    ],
)
def test_arguments_are_of_the_annotated_types(
    annotation: Any, good: list[Any], bad: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(value): ...

    take.__annotations__ = {"value": annotation}
    monkeypatch.setattr("tests.test_named.take", take, raising=False)
    for value in good:
        check_constructible({"class": "tests.test_named:take", "value": value})
    for value in bad:
        with pytest.raises(ConfigError, match="value must be of type"):
            check_constructible({"class": "tests.test_named:take", "value": value})


def take_settings(name: str, free=None, **settings: Unpack[Settings]) -> None: ...


def test_settings_behind_stars_are_arguments_too() -> None:
    spec = {"class": "tests.test_named:take_settings", "name": "a", "free": [1], "tries": 3}
    check_constructible(spec)
    with pytest.raises(ConfigError, match="tries must be of type int"):
        check_constructible(spec | {"tries": "many"})


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            {"class": "graphpo_agent.rewards.qa:Binarize", "threshold": 2, "reward": TOKEN_F1},
            "threshold is not valid: input should be less than or equal to 1, found 2",
        ),
        (
            {"class": "graphpo_agent.rewards.search_r1:SearchR1Reward", "retrieval_score": -1},
            "retrieval_score is not valid: input should be greater than or equal to 0, found -1",
        ),
        (
            {"class": "graphpo_agent.rewards.tree_grpo:TreeGrpoReward", "call_tag": "act"},
            "call_tag must be one of search, tool_call, found 'act'",
        ),
        (
            {"class": "tools.search:SearchTool", "topk": 0, "retriever": {"class": "x:Y"}},
            "topk is not valid: input should be greater than or equal to 1, found 0",
        ),
    ],
)
def test_bounds_of_values_are_checked_without_building(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_constructible(spec)
    assert str(error.value).startswith(f"{spec['class']}: {says}")
