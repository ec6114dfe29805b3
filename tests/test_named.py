from typing import Any

import pytest

from graphpo_agent.errors import ConfigError
from graphpo_agent.named import callable_of, check_constructible, constructed
from graphpo_agent.rewards.qa import token_f1
from graphpo_agent.types import Outcome, Task


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
    assert constructed({"class": HERE, "left": {"a": {"b": 1}}}).left == {"a": {"b": 1}}


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
        ({"class": HERE, "left": 1, "up": 2}, "unexpected keyword argument 'up'"),
        ({"class": HERE, "left": [{"class": HERE}]}, "missing a required argument"),
        ({"class": HERE, "left": {"function": "x"}}, "write module:name"),
        ({"class": HERE, "left": {"class": 5}}, "5: write module:name"),
        ({"class": ".tests:Pair"}, "cannot find '.tests:Pair'"),
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


def test_an_object_that_is_not_called_so_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be called with"):
        callable_of("graphpo_agent.rewards.qa:normalize_answer", "task", "outcome")
