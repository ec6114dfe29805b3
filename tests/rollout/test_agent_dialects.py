"""Paths in dialects other than Search-R1's."""

import json
import math

import pytest

from graphpo_agent.rollout.agent import TurnExpander
from graphpo_agent.rollout.dialects.asearcher import ASearcherDialect
from graphpo_agent.rollout.dialects.hermes import HermesDialect, ToolSignature
from tests.rollout.scripted import (
    END_OF_MESSAGE,
    EOS,
    START,
    ByteTokenizer,
    Library,
    Printer,
    ScriptedPolicy,
    bytes_of,
    expand,
)
from tests.rollout.walking import ANSWER, MUTE, SAMPLING, SHELVES, TASK, walk

HERMES = HermesDialect({"search": ToolSignature("search", "", {})}, documents="search_r1")
HERMES_CALL = bytes_of('<tool_call>{"name": "search", "arguments": {"query": "Karo"}}</tool_call>')


def test_a_hermes_path_is_a_conversation_in_the_chat_template():
    said = iter([HERMES_CALL, MUTE, (*HERMES_CALL, EOS), ANSWER])
    policy = ScriptedPolicy(lambda context, seed: next(said))
    expander = TurnExpander(
        dialect=HERMES,
        tools={"search": Library(SHELVES)},
        max_turns=4,
        max_turn_tokens=400,
        max_observation_tokens=400,
        max_response_tokens=4000,
    )
    root, steps = walk(expander, policy)
    encode = ByteTokenizer().encode

    def reply(text, after_eos):
        inside = encode("user\n") + encode(f"<tool_response>\n{text}\n</tool_response>")
        return (() if after_eos else (EOS,)) + (START, *inside, END_OF_MESSAGE, START)

    correction = HERMES.parse("hm").reason
    shown = 'Doc 1(Title: "Karo Venn") mentor : Lita Bosdal'
    assert [step.token_ids for step in steps] == [
        (*HERMES_CALL, *reply(shown, after_eos=False)),
        (*MUTE, *reply(correction, after_eos=True)),
        (*HERMES_CALL, *reply(shown, after_eos=False)),  # stopped at the call's end, before EOS
        ANSWER,
    ]
    assert [sum(step.loss_mask) for step in steps] == [
        len(HERMES_CALL),
        len(MUTE),
        len(HERMES_CALL),
        len(ANSWER),
    ]
    path = [i for step in steps for i in step.token_ids]
    assert steps[-1].state.context.token_ids == (*root.prompt_ids, *path)


CODE = "print('<answer>x</answer>')\nprint('</answer>')"


@pytest.mark.parametrize("limit", [400, 90, 30])
@pytest.mark.parametrize(
    "call",
    [
        json.dumps({"name": "python", "arguments": {"code": CODE}}),
        f'{{"name": "python", "arguments": {{}}}}\n<code>\n{CODE}\n</code>',
    ],
)
def test_an_answer_tag_in_a_calls_code_does_not_end_the_turn(call, limit):
    said = bytes_of(f"<tool_call>\n{call}\n</tool_call>")
    begun: list[int] = []
    seeds: list[int] = []

    def script(context, seed):
        begun.append(len(context))
        seeds.append(seed)
        return said[len(context) - begun[0] :]

    policy = ScriptedPolicy(script)
    expander = TurnExpander(
        dialect=HermesDialect({"python": ToolSignature("python", "", {})}),
        tools={"python": Printer()},
        max_turns=2,
        max_turn_tokens=limit,
        max_observation_tokens=400,
        max_response_tokens=4000,
    )
    (step,) = expand(expander, policy, [expander.start(policy, TASK)], [7], SAMPLING)
    num_sampled = sum(step.loss_mask)
    assert step.token_ids[:num_sampled] == said[:limit]
    assert len(set(seeds)) == len(seeds)
    assert not any(math.isnan(p) for p in step.logprobs[:num_sampled])
    observed = ByteTokenizer().decode(step.token_ids[num_sampled:])
    if limit == 400:
        assert step.status == "ok" and len(seeds) == 3
        assert CODE.replace("<", "‹") in observed
    else:
        assert step.status == "invalid_action"


def test_an_asearcher_prompt_is_plain_text():
    dialect = ASearcherDialect()
    expander = TurnExpander(
        dialect=dialect,
        tools={"search": Library(SHELVES), "access": Library({})},
        max_turns=2,
        max_turn_tokens=400,
        max_observation_tokens=400,
        max_response_tokens=4000,
    )
    said = iter([bytes_of("</think><search> Karo </search>"), ANSWER])
    root, steps = walk(expander, ScriptedPolicy(lambda context, seed: next(said)))
    assert list(root.prompt_ids) == ByteTokenizer().encode(dialect.render(TASK))
    observed = ByteTokenizer().decode(steps[0].token_ids)
    assert observed.endswith(
        '<information>\n[Doc 1](7):\n"Karo Venn"\nmentor : Lita Bosdal\n</information>\n\n<think>\n'
    )
    assert steps[-1].state.answer == "1987"


def test_turns_that_go_on_and_turns_that_have_ended_keep_their_places():
    code = json.dumps({"name": "python", "arguments": {"code": CODE}})
    said = {
        1: bytes_of(f"<tool_call>\n{code}\n</tool_call>"),
        2: bytes_of("<answer>1987</answer>"),
        3: bytes_of('<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>'),
    }

    def script(context, seed):
        behind = context[len(root.prompt_ids) :]
        return said[seed] if not behind else said[1][len(behind) :]

    policy = ScriptedPolicy(script)
    expander = TurnExpander(
        dialect=HermesDialect({"python": ToolSignature("python", "", {})}),
        tools={"python": Printer()},
        max_turns=2,
        max_turn_tokens=400,
        max_observation_tokens=400,
        max_response_tokens=4000,
    )
    root = expander.start(policy, TASK)
    seeds = [2, 1, 3, 1]
    steps = expand(expander, policy, [root] * 4, seeds, SAMPLING)
    assert [step.status for step in steps] == ["answered", "ok", "ok", "ok"]
    for step, seed in zip(steps, seeds, strict=True):
        assert step.token_ids[: sum(step.loss_mask)] == said[seed]
    assert [step.tool_calls for step in steps] == [0, 1, 1, 0]
