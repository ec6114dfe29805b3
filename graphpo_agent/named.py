"""What a configuration names by import path: functions, and objects with their arguments."""

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from traceback import extract_tb
from typing import Annotated, Any, Literal, Unpack, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from graphpo_agent.errors import ConfigError

__all__ = ["callable_of", "check_constructible", "constructed"]

_OF_IMPORTS = (__file__, importlib.__file__)
_AS_IN_YAML = ConfigDict(arbitrary_types_allowed=True, strict=True)


def callable_of(spec: str | Mapping[str, Any], *parameters: str) -> Callable[..., Any]:
    """A named function, or a built object, that can be called with these parameters, by position.

    Example: ``callable_of("graphpo_agent.rewards.qa:token_f1", "task", "outcome")``

    Raises:
        ConfigError: there is none, or it takes others.
    """
    path = spec if isinstance(spec, str) else spec["class"]
    function = _named(path) if isinstance(spec, str) else constructed(spec)
    if inspect.isclass(function):
        raise ConfigError(f"{path!r} is a class: write {{class: {path!r}}} and its arguments")
    try:
        inspect.signature(function).bind(*parameters)
    except (TypeError, ValueError) as error:
        wanted = ", ".join(parameters)
        raise ConfigError(f"{path!r} cannot be called with ({wanted}): {error}") from None
    return function


def constructed(spec: Mapping[str, Any], parts: Sequence[str] = ()) -> Any:
    """Build ``{"class": "module:Class", **arguments}``, nested ones first.

    Among the arguments, ``{"class": ...}`` is an object and ``{"function": "module:name"}`` that
    function; lists may hold either.

    Args:
        spec: the class and its arguments.
        parts: attributes that the object must have, those of the protocol that it is to follow.

    Raises:
        ConfigError: the class does not exist, does not take these arguments or their values, or
            lacks one of the parts.
    """
    check_constructible(spec)
    arguments = {name: _argument(value) for name, value in spec.items() if name != "class"}
    try:
        built = _named(spec["class"])(**arguments)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split()) + _raised_at(error)
        raise ConfigError(f"{spec['class']} cannot be built so: {reason}") from error
    missing = [part for part in parts if not hasattr(built, part)]
    if missing:
        raise ConfigError(f"{spec['class']} has no {', '.join(missing)}")
    return built


def check_constructible(spec: Any) -> None:
    """Find everything that a specification names, build nothing.

    Args:
        spec: as for ``constructed``, or any value that one may hold.

    Raises:
        ConfigError: as for ``constructed``, as far as names and signatures tell.
    """
    if isinstance(spec, list):
        for each in spec:
            check_constructible(each)
    elif isinstance(spec, Mapping) and "class" in spec:
        arguments = {name: value for name, value in spec.items() if name != "class"}
        _check_arguments(spec["class"], arguments)
        check_constructible(list(arguments.values()))
    elif _is_function(spec):
        _named(spec["function"])


def _check_arguments(path: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError unless what is named takes these arguments, as far as it tells."""
    function = _named(path)
    try:
        signature = inspect.signature(function)
        annotations = _annotations(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    try:
        signature.bind(**arguments)
    except TypeError as error:
        taken = ", ".join(signature.parameters) or "no arguments"
        raise ConfigError(f"{path}: {error}; it takes {taken}{_no_class(function)}") from None
    for name, value in arguments.items():
        misfit = _misfit(value, annotations[name]) if name in annotations else None
        if misfit is not None:
            raise ConfigError(f"{path}: {name} {misfit}")


def _no_class(function: Callable[..., Any]) -> str:
    if not inspect.isfunction(function):
        return ""
    return "; it is a function: write its name alone, or {function: …} among arguments"


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Those of the named arguments, and of ``**settings: Unpack[Settings]``."""
    found: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            found[parameter.name] = parameter.annotation
        elif get_origin(parameter.annotation) is Unpack:
            found |= get_type_hints(*get_args(parameter.annotation))
    return {name: kind for name, kind in found.items() if kind is not inspect.Parameter.empty}


def _misfit(value: Any, annotation: Any) -> str | None:
    """What a value from YAML would have to be; None: it may be passed, as all yet to be built may.

    Bounds are told by an annotation such as ``Annotated[int, Field(ge=1)]``, anything else by a
    validator whose ValueError says what was found.
    """
    if _is_to_be_built(value):
        return None
    try:
        adapter = TypeAdapter(annotation, config=_AS_IN_YAML)
        adapter.validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        found = f", found {value!r:.80}"
        if get_origin(annotation) is not Annotated:
            return f"must be {_kind(annotation)}{found}"
        [first, *_] = error.errors()
        told = first.get("ctx", {}).get("error")
        if told is not None:
            return f"is not valid: {told}"
        return f"is not valid: {first['msg'].lower()}{found}"
    except (PydanticUserError, SchemaError):  # the annotation says nothing about plain values
        return None
    except TypeError:  # JSON has no such keys, dates for example
        return None
    return None


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    return f"of type {inspect.formatannotation(annotation)}"


def _is_to_be_built(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_to_be_built(each) for each in value)
    return isinstance(value, Mapping) and ("class" in value or _is_function(value))


def _is_function(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"function"}


def _argument(value: Any) -> Any:
    if isinstance(value, list):
        return [_argument(each) for each in value]
    if isinstance(value, Mapping) and "class" in value:
        return constructed(value)
    return _named(value["function"]) if _is_function(value) else value


def _named(path: Any) -> Callable[..., Any]:
    if not isinstance(path, str) or ":" not in path:
        raise ConfigError(f"{path!r:.80}: write module:name")
    module_name, _, name = path.partition(":")
    try:
        value = getattr(import_module(module_name), name)
    except (ImportError, ValueError, TypeError, AttributeError, SyntaxError) as error:
        where = _raised_at(error) or _in_its_place(module_name)
        raise ConfigError(f"cannot find {path!r} (module:name): {error}{where}") from None
    if not callable(value):
        raise ConfigError(f"{path!r} is no function or class")
    return value


def _raised_at(error: Exception) -> str:
    """Which line of a module that is named raised it, or led to it; empty: none did."""
    for frame in extract_tb(error.__traceback__):
        if frame.filename not in _OF_IMPORTS and not frame.filename.startswith("<frozen"):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def _in_its_place(module_name: str) -> str:
    """Which file a module has, or the package that it is looked for in; empty: neither is there."""
    for name in (module_name, module_name.partition(".")[0]):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            return f" ({name} is {file})"
    return ""
