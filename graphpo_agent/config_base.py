"""What all configuration models share: strictness, ranges, objects named by import path."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = [
    "Beta",
    "Fraction",
    "NonNegative",
    "ObjectConfig",
    "Positive",
    "Schedule",
    "Size",
    "Strict",
]

Positive = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Schedule = Annotated[tuple[Positive, ...], Field(min_length=1)]


def _names_a_class(value: dict[str, Any]) -> dict[str, Any]:
    name = value.get("class")
    if not isinstance(name, str) or name.count(":") != 1:
        raise ValueError("needs the key 'class' with module:Class, e.g. tools.search:SearchTool")
    return value


ObjectConfig = Annotated[dict[str, Any], AfterValidator(_names_a_class)]
"""``{"class": "module:Class", **arguments}``; an argument may be such a mapping itself."""


class Strict(BaseModel):
    """Unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)
