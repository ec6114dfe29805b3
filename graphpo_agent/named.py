"""What a configuration names by import path: functions, and objects with their arguments."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from graphpo_agent.errors import ConfigError

__all__ = ["callable_of", "constructed"]


def callable_of(spec: str | Mapping[str, Any], *parameters: str) -> Callable[..., Any]:
    """A named function, or a built object, that can be called with these parameters, by position.

    Example: ``callable_of("graphpo_agent.rewards.qa:token_f1", "task", "outcome")``

    Raises:
        ConfigError: there is none, or it takes others.
    """
    path = spec if isinstance(spec, str) else spec["class"]
    function = _named(path) if isinstance(spec, str) else constructed(spec)
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        wanted = ", ".join(parameters)
        raise ConfigError(f"{path!r} cannot be called with ({wanted}): {error}") from None
    return function


def constructed(spec: Mapping[str, Any]) -> Any:
    """Build ``{"class": "module:Class", **arguments}``, nested ones first.

    Among the arguments, ``{"class": ...}`` is an object and ``{"function": "module:name"}`` that
    function; lists may hold either.

    Raises:
        ConfigError: the class does not exist or does not take these arguments.
    """
    make = _named(spec["class"])
    arguments = {name: _argument(value) for name, value in spec.items() if name != "class"}
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{spec['class']}: {error}") from None
    return make(**arguments)


def _argument(value: Any) -> Any:
    if isinstance(value, list):
        return [_argument(each) for each in value]
    if isinstance(value, dict) and "class" in value:
        return constructed(value)
    if isinstance(value, dict) and set(value) == {"function"}:
        return _named(value["function"])
    return value


def _named(path: str) -> Callable[..., Any]:
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"{path!r}: write module:name")
    try:
        value = getattr(import_module(module_name), name)
    except (ImportError, ValueError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"cannot find {path!r} (module:name): {error}") from None
    if not callable(value):
        raise ConfigError(f"{path!r} is no function or class")
    return value
