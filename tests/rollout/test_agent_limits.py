"""Where turns and paths end: limits of turns, observations, responses and contexts."""

import pytest

from graphpo_agent.errors import DataError
from graphpo_agent.rollout.scheduler import PolicyScheduler
from graphpo_agent.types import Document
from tests.rollout.scripted import ByteTokenizer, Library, ScriptedPolicy, bytes_of, expand
from tests.rollout.walking import (
    ANSWER,
    KARO,
    LITA,
    MUTE,
    SAMPLING,
    SEARCH_KARO,
    SEARCH_LITA,
    SHELVES,
    TASK,
    make,
    observation_of,
    turns,
    walk,
)


def test_turn_cut_by_its_own_limit_without_an_action_is_invalid():
    policy = ScriptedPolicy(turns(bytes_of("x" * 50), ANSWER))
    _, steps = walk(make(max_turn_tokens=45), policy)
    assert sum(steps[0].loss_mask) == 45 and steps[0].status == "invalid_action"


@pytest.mark.parametrize("last", [SEARCH_LITA, MUTE])
def test_last_turn_without_an_answer_ends_the_path_and_runs_no_tool(last):
    tool = Library(SHELVES)
    _, steps = walk(make(tool, max_turns=2), ScriptedPolicy(turns(SEARCH_KARO, last)))
    assert (steps[-1].terminal, steps[-1].status) == (True, "out_of_turns")
    assert steps[-1].token_ids == last and 0 not in steps[-1].loss_mask
    assert tool.batches == [["Karo"]] and steps[-1].tool_calls == 0


def test_answer_in_the_last_turn_counts():
    _, steps = walk(make(max_turns=1), ScriptedPolicy(turns(ANSWER)))
    assert steps[-1].status == "answered" and steps[-1].state.answer == "1987"


@pytest.mark.parametrize(
    ("max_response_tokens", "edge", "path"), [(4000, 400, 1600), (1000, 400, 1000), (90, 90, 90)]
)
def test_what_a_turn_and_a_path_can_cost_at_most(max_response_tokens, edge, path):
    expander = make(max_response_tokens=max_response_tokens)
    assert (expander.edge_tokens, expander.path_tokens) == (edge, path)
    policy = ScriptedPolicy(turns(SEARCH_KARO))
    root = expander.start(policy, TASK)
    assert expander.tokens_left(policy, root) == path
    if max_response_tokens == 4000:
        (step,) = expand(expander, policy, [root], [0], SAMPLING)
        assert expander.tokens_left(policy, step.state) == 1200


def test_response_limit_inside_a_turn_ends_the_path():
    tool = Library(SHELVES)
    limit = len(SEARCH_KARO)
    _, steps = walk(make(tool, max_response_tokens=limit), ScriptedPolicy(turns(SEARCH_KARO)))
    assert (steps[0].terminal, steps[0].status, tool.batches) == (True, "out_of_length", [])
    _, steps = walk(make(max_response_tokens=limit - 1), ScriptedPolicy(turns(SEARCH_KARO)))
    assert steps[0].token_ids == SEARCH_KARO[:-1] and steps[0].status == "out_of_length"


@pytest.mark.parametrize(
    ("limit", "status"),
    [(None, "out_of_length"), (31, "out_of_length"), (30, "out_of_length"), (29, "out_of_budget")],
)
def test_a_turn_that_the_response_ends_as_early_as_the_budget_is_out_of_length(limit, status):
    policy = ScriptedPolicy(turns(bytes_of("x" * 50)))
    expander = make(max_response_tokens=30)
    root = expander.start(policy, TASK)
    scheduler = PolicyScheduler(policy, overlap=False)
    ((step,),) = scheduler.run([expander.expand(scheduler, [root], [0], SAMPLING, limit)])
    assert (step.status, step.terminal) == (status, True)
    assert len(step.token_ids) == min(30, limit or 30)


def test_an_answer_on_the_last_token_of_the_budget_counts():
    policy = ScriptedPolicy(turns(ANSWER))
    expander = make()
    root = expander.start(policy, TASK)
    scheduler = PolicyScheduler(policy, overlap=False)
    work = expander.expand(scheduler, [root], [0], SAMPLING, len(ANSWER))
    ((step,),) = scheduler.run([work])
    assert (step.status, step.state.answer) == ("answered", "1987")


def test_answer_on_the_last_token_of_the_response_limit_counts():
    _, steps = walk(make(max_response_tokens=len(ANSWER)), ScriptedPolicy(turns(ANSWER)))
    assert steps[0].status == "answered" and steps[0].state.answer == "1987"


@pytest.mark.parametrize("limit", ["response", "context"])
def test_observation_that_leaves_no_room_to_go_on_is_left_out(limit):
    whole = len(SEARCH_KARO) + len(ByteTokenizer().encode(observation_of(KARO)))
    for slack, goes_on in ((0, False), (1, True)):
        expander, context = make(), 100_000
        prompt = expander.start(ScriptedPolicy(turns()), TASK).prompt_tokens
        if limit == "response":
            expander = make(max_response_tokens=whole + slack)
        else:
            context = prompt + whole + slack
        policy = ScriptedPolicy(turns(SEARCH_KARO, ANSWER), context)
        (step,) = expand(expander, policy, [expander.start(policy, TASK)], [0], SAMPLING)
        assert step.terminal != goes_on and step.tool_calls == 1
        assert (step.status == "out_of_length") != goes_on
        assert (len(step.token_ids) == len(SEARCH_KARO)) != goes_on
        assert step.state.memory.documents_found == ((KARO,) if goes_on else ())


def test_long_observation_is_cut_inside_its_tags_and_unseen_documents_are_not_found():
    opening, closing = "\n\n<information>", "</information>\n\n"
    long = Document("9", '"Long"\n' + "x" * 300)
    tool = Library({"Karo": (KARO, long, LITA)})
    _, steps = walk(
        make(tool, max_observation_tokens=90), ScriptedPolicy(turns(SEARCH_KARO, ANSWER))
    )
    observed = steps[0].token_ids[len(SEARCH_KARO) :]
    text = ByteTokenizer().decode(observed)
    assert len(observed) == 90 and text.startswith(opening) and text.endswith(closing)
    assert steps[0].state.memory.documents_found == (KARO, long)


def test_character_split_by_the_turn_limit_does_not_spoil_the_next_turn():
    policy = ScriptedPolicy(turns(bytes_of("<think>é"), bytes_of("<answer> é </answer>")))
    root = make().start(policy, TASK)
    (cut,) = expand(make(max_turn_tokens=8), policy, [root], [0], SAMPLING)
    assert cut.state.response == "<think>\ufffd" and cut.status == "invalid_action"
    (last,) = expand(make(), policy, [cut.state], [0], SAMPLING)
    assert last.state.answer == "é"
    assert last.state.response == "<think>\ufffd\n<answer> é </answer>"


def test_prompt_without_room_names_the_task():
    with pytest.raises(DataError, match="task 't1'"):
        make().start(ScriptedPolicy(turns(), max_context_tokens=100), TASK)
