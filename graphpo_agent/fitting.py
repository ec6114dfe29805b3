"""Whether a value that a configuration gives can be what a parameter's annotation asks for."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, Union, Unpack, get_args, get_origin, get_type_hints

__all__ = ["annotations_of", "fits"]

_LISTS = (Sequence, Collection, Iterable, list, tuple)
_PLAIN = (str, int, float, list, Mapping, NoneType)


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotation of each named argument, those of ``**settings: Unpack[Settings]`` included.

    Raises:
        ValueError: the function tells no signature.
    """
    found: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            found[parameter.name] = parameter.annotation
        elif get_origin(parameter.annotation) is Unpack:
            found |= get_type_hints(*get_args(parameter.annotation))
    return found


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value from YAML, or the specification of an object, may be passed.

    Annotations that say nothing about plain values let everything pass.

    Example: ``fits(["a"], Sequence[str])`` and ``fits(3, float | None)`` are true,
    ``fits("a", Sequence[str])`` and ``fits("calls.sqlite", CallStore | None)`` are not.
    """
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    if isinstance(value, Mapping) and ("class" in value or set(value) == {"function"}):
        return True
    if kind in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if kind is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if kind in (None, NoneType):
        return value is None
    if kind is float:
        return type(value) in (int, float)
    if kind in (int, bool, str):
        return type(value) is kind
    if kind is Path:
        return isinstance(value, str | Path)
    if kind in _LISTS:
        return isinstance(value, list | tuple) and (not inner or _all_fit(value, inner[0]))
    return _fits_class(value, kind)


def _all_fit(values: Iterable[Any], annotation: Any) -> bool:
    return all(fits(value, annotation) for value in values)


def _fits_class(value: Any, kind: Any) -> bool:
    """Whether a value may be passed where a mapping, a function or an object is expected."""
    if kind is Callable:
        return not isinstance(value, _PLAIN)
    if kind in (object, Any, inspect.Parameter.empty) or not inspect.isclass(kind):
        return True
    if Protocol in kind.__mro__:
        return not isinstance(value, _PLAIN)
    if issubclass(kind, Mapping | dict):
        return isinstance(value, Mapping)
    return isinstance(value, kind) or not isinstance(value, _PLAIN)
