"""What all configuration models share: strictness, ranges, objects named by import path."""

import re
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from graphpo_agent.net.checks import check_address

__all__ = [
    "Beta",
    "CallableConfig",
    "FilePath",
    "Fraction",
    "Gibibytes",
    "Natural",
    "NonNegative",
    "Number",
    "ObjectConfig",
    "Positive",
    "Schedule",
    "Seed",
    "Size",
    "Strict",
    "Threads",
    "Url",
    "Whole",
]

_MOST = 10**12
"""Of whatever is counted; products of such numbers are still integers of torch and numpy."""
_IN_NO_PATH = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def _no_boolean(value: Any) -> Any:
    """``steps: yes`` is no number, though Python counts it as 1."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


def _fits_64_bits(value: int) -> int:
    if value >= 2**63:  # pydantic's own message would round the limit
        raise ValueError("Input should be less than 2**63")
    return value


def _can_name_a_file(value: str) -> str:
    if not value or _IN_NO_PATH.search(value):
        raise ValueError("Input should be a path: not empty, without control characters")
    return value


def _is_address(value: str) -> str:
    try:
        return check_address(value)
    except ValueError as error:
        raise ValueError(f"Input should be an address: {error}") from None


_Integer = Annotated[int, BeforeValidator(_no_boolean)]
Whole = Annotated[_Integer, Field(le=_MOST)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
FilePath = Annotated[str, AfterValidator(_can_name_a_file)]
"""A file or directory, or a name on the Hugging Face hub."""

Positive = Annotated[Whole, Field(ge=1)]
Natural = Annotated[Whole, Field(ge=0)]
Threads = Annotated[Positive, Field(le=4096)]
Seed = Annotated[_Integer, Field(ge=0), AfterValidator(_fits_64_bits)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
NonNegative = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[Number, Field(gt=0, allow_inf_nan=False)]
Gibibytes = Annotated[Number, Field(gt=0, le=2**30)]
Url = Annotated[str, AfterValidator(_is_address)]
Schedule = Annotated[tuple[Positive, ...], Field(min_length=1)]


def _names_a_class(value: dict[str, Any]) -> dict[str, Any]:
    name = value.get("class")
    if not isinstance(name, str) or name.count(":") != 1:
        raise ValueError("needs the key 'class' with module:Class, e.g. tools.search:SearchTool")
    return value


ObjectConfig = Annotated[dict[str, Any], AfterValidator(_names_a_class)]
"""``{"class": "module:Class", **arguments}``; an argument may be such a mapping itself."""


def _names_a_callable(value: Any) -> Any:
    """Checked before the union, whose own messages name the type at each of its branches."""
    if isinstance(value, dict):
        return _names_a_class(cast(dict[str, Any], value))
    if not isinstance(value, str):
        raise ValueError("Input should be module:function or a mapping with the key 'class'")
    return value


CallableConfig = Annotated[str | dict[str, Any], BeforeValidator(_names_a_callable)]
"""``module:function``, or an object that is called."""


class Strict(BaseModel):
    """Unknown keys are refused, values do not change.

    A part that does not say its kind is of the kind that it has where the whole part is left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _add_default_kinds(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = cast(dict[str, Any], data)
        parts: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            part, tag, default = given.get(name), field.discriminator, field.default
            if isinstance(part, dict) and isinstance(tag, str) and isinstance(default, BaseModel):
                parts[name] = {tag: getattr(default, tag), **part}
        return given | parts
