"""What a model's call hands on to the functions in its layers."""

from typing import TypeVar

from graphpo_agent.errors import ModelError

__all__ = ["handed_on"]

T = TypeVar("T")


def handed_on(argument: T | None) -> T:
    """What the model's call was given for an attention layer.

    Raises:
        ModelError: nothing came through; the layers in between drop arguments they do not know.
    """
    if argument is None:
        raise ModelError(
            "the model's layers do not hand arguments on to transformers' attention interface; "
            "use another model family"
        )
    return argument
