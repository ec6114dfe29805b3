"""Turns that go on behind a stop string in their call's code, for engines to draw.

They fit into a context of 128 tokens.
"""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from graphpo_agent.engines.local.engine import LocalEngine
from graphpo_agent.engines.local.options import ImitationOptions, OptimizerOptions
from graphpo_agent.engines.tokenizer import HfTokenizer
from graphpo_agent.protocols import Policy
from graphpo_agent.rollout.agent import TurnExpander
from graphpo_agent.rollout.dialects.hermes import HermesDialect, ToolSignature
from graphpo_agent.types import Demonstration, Message, Piece, SamplingParams, Step, Task
from tests.rollout.scripted import Printer, expand

CALL = '<tool_call>{"name": "py", "arguments": {"code": "</answer>"}}</tool_call>'
QUESTION: Message = {"role": "user", "content": "1 + 1"}
LESSONS = 60


def learner_of_call(model: PreTrainedModel, tokenizer: HfTokenizer) -> LocalEngine:
    """What ``teach_call`` needs."""
    imitation = ImitationOptions(1e-2, LESSONS, 0)
    return LocalEngine(model, tokenizer, OptimizerOptions(), imitation=imitation)


def teach_call(engine: Any) -> None:
    """Teach a policy to answer the question with the call, mostly."""
    for _ in range(LESSONS):
        engine.imitate([Demonstration("t", (QUESTION,), (Piece(CALL, trained=True),))])


def draw_turns(policy: Policy) -> list[Step]:
    """The first turns of eight paths."""
    expander = TurnExpander(
        dialect=HermesDialect({"py": ToolSignature("py", "", {})}, system_prompt=""),
        tools={"py": Printer()},
        max_turns=2,
        max_turn_tokens=60,
        max_observation_tokens=45,
        max_response_tokens=128,
    )
    root = expander.start(policy, Task("t", QUESTION["content"], ("2",)))
    return expand(expander, policy, [root] * 8, range(8), SamplingParams())


def check_turns(steps: Sequence[Step], model: PreTrainedModel, tokenizer: HfTokenizer) -> None:
    """Some turns are the call, and all have the log-probabilities of one pass over their tokens."""
    prompt = tokenizer.render((QUESTION,))
    calls = 0
    for step in steps:
        count = sum(step.loss_mask)
        calls += step.status == "ok" and tokenizer.decode(step.token_ids[:count]) == CALL
        tokens = (*prompt, *step.token_ids)
        assert cast(Any, step.state.context).token_ids == tokens
        with torch.no_grad():
            scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        span = slice(len(prompt), len(prompt) + count)
        expected = [scores[i - 1, tokens[i]].item() for i in range(len(tokens))[span]]
        assert step.logprobs[:count] == pytest.approx(expected, abs=1e-4)
    assert calls > 1
