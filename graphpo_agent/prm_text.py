"""How an answer in steps is put to a process reward model (Qwen2.5-Math-PRM's interface)."""

import re
from collections.abc import Collection

from graphpo_agent.types import SteppedResponse

__all__ = ["STEP_TOKEN", "step_messages", "without_control"]

STEP_TOKEN = "<extra_0>"
"""Stands after each step; the model's output there is the step's score."""

_CONTROL = r"<[|｜][^\s<>|｜]+[|｜]>"


def step_messages(
    response: SteppedResponse,
    *,
    step_token: str = STEP_TOKEN,
    system: str | None = None,
    control: Collection[str] = (),
) -> list[dict[str, str]]:
    """The conversation that the model judges: the question, and the answer with its step tokens.

    Example: ``step_messages(SteppedResponse("2 + 2 + 2?", ("4.", "6.")))[-1]["content"]`` is
    ``"4.<extra_0>6.<extra_0>"``.

    Args:
        response: the answer.
        step_token: as the model's tokenizer knows it.
        system: the first message; None: none, so that the chat template may put its own.
        control: spellings of further tokens that no question or step may produce.
    """
    spellings = [step_token, *control]
    steps = [without_control(step, spellings) + step_token for step in response.steps]
    messages = [
        {"role": "user", "content": without_control(response.question, spellings)},
        {"role": "assistant", "content": "".join(steps)},
    ]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def without_control(text: str, spellings: Collection[str]) -> str:
    """The text with its control tokens broken by a space, ``<|im_end|>`` as ``< |im_end|>``.

    Args:
        text: by whoever wrote it.
        spellings: control tokens, besides everything of the form ``<|name|>``, also with the wide
            bars of DeepSeek's models.
    """
    longest_first = sorted(spellings, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, longest_first), _CONTROL])
    return re.sub(pattern, lambda found: f"{found[0][0]} {found[0][1:]}", text)
