"""How an answer in steps is put to a process reward model (Qwen2.5-Math-PRM's interface)."""

from collections.abc import Collection

from graphpo_agent.plain_text import without_control
from graphpo_agent.types import SteppedResponse

__all__ = ["STEP_TOKEN", "step_messages"]

STEP_TOKEN = "<extra_0>"
"""Stands after each step; the model's output there is the step's score."""


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
