import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError
from graphpo_agent.rollout.agent_memory import AgentMemory
from graphpo_agent.rollout.summarize import (
    SUMMARY_REQUEST,
    KeyDescriber,
    PolicySummary,
    TextDescriber,
    documents_key,
)
from graphpo_agent.types import Document, PathState, SamplingParams, StateDescription, Task
from tests.rollout.scripted import (
    EOS,
    ByteTokenizer,
    ScriptedPolicy,
    TokenContext,
    bytes_of,
    describe,
)


def state_of(question="Who?", found=(), answer=None, response="", token_ids=(1, 2), memory=None):
    return PathState(
        task=Task(id="t", question=question, answers=()),
        context=TokenContext(tuple(token_ids)),
        depth=0,
        prompt_ids=(1, 2),
        response=response,
        answer=answer,
        memory=memory
        or AgentMemory(documents_found=tuple(Document(i, f"T{i}\ntext") for i in found)),
    )


SILENT = ScriptedPolicy(lambda context, seed: (EOS,))


@given(st.permutations(["7", "3", "11"]))
def test_documents_key_forgets_the_order_and_the_cost_of_the_search(found):
    key = documents_key(state_of(found=found))
    assert key == documents_key(state_of(found=("3", "7", "11")))
    documents = state_of(found=found).memory.documents_found
    assert key == documents_key(
        state_of(memory=AgentMemory((), documents, tool_calls=9, invalid_actions=2))
    )


def test_documents_key_tells_states_apart():
    states = [
        state_of(),
        state_of(question="What?"),
        state_of(found=("1",)),
        state_of(found=("1", "2")),
        state_of(found=("12",)),
        state_of(memory=AgentMemory(facts=("1",))),
        state_of(memory=AgentMemory(facts=("12",))),
        state_of(answer=""),
        state_of(answer="null"),
        state_of(found=("1",), answer="x"),
        state_of(question='Who?", ["1"], null]'),
    ]
    keys = [documents_key(state) for state in states]
    assert len(set(keys)) == len(keys)


def test_documents_key_normalises_question_and_answer():
    assert documents_key(state_of(question=" WHO  ?", answer="ﬁ ve")) == documents_key(
        state_of(question="who ?", answer="FI  VE ")
    )


def test_documents_key_does_not_tell_wide_letters_from_others():
    assert documents_key(state_of(answer="１９８７")) == documents_key(state_of(answer="1987"))


def test_key_describer_hands_on_the_key_or_none():
    describer = KeyDescriber(lambda state: state.answer)
    states = [state_of(answer="a"), state_of()]
    assert describe(describer, SILENT, states) == [StateDescription(key="a"), StateDescription()]


def test_a_key_that_is_no_string_names_the_task():
    with pytest.raises(ConfigError, match="the state key is 7, want a string or None"):
        describe(KeyDescriber(lambda state: 7), SILENT, [state_of()])


def test_text_describer_gives_the_end_of_the_response_and_the_question_at_the_root():
    describer = TextDescriber(max_characters=4)
    texts = [
        d.text for d in describe(describer, SILENT, [state_of(), state_of(response="1 + 2 = 3")])
    ]
    assert texts == ["Who?", "2 = 3"[-4:]]


def test_policy_summary_continues_each_path_greedily_and_counts_its_tokens():
    request = tuple(ByteTokenizer().encode(SUMMARY_REQUEST))

    def script(context, seed):
        assert context[-len(request) :] == request
        return (*b"  known: %d " % len(context[: -len(request)]), EOS)

    policy = ScriptedPolicy(script)
    states = [state_of(), state_of(token_ids=(1, 2, 5, 263, 9))]
    describer = PolicySummary(max_summary_tokens=30)
    described = describe(describer, policy, states)
    assert [one.text for one in described] == ["known: 2", "known: 5"]
    assert [one.summary_tokens for one in described] == [12, 12]
    assert policy.sampling == [SamplingParams(temperature=0.0)] * 2
    assert [state.context.token_ids for state in states] == [(1, 2), (1, 2, 5, 263, 9)]


def test_policy_summary_is_cut_at_its_limit():
    describer = PolicySummary(max_summary_tokens=5)
    policy = ScriptedPolicy(lambda context, seed: bytes_of("known: 1234"))
    assert describe(describer, policy, [state_of()]) == [
        StateDescription(text="known", summary_tokens=5)
    ]


def test_a_summary_that_the_context_cuts_is_no_description():
    request = "Sum up:"
    context_limit = 2 + len(request) + len("known: 1") + 1

    def script(context, seed):
        return (*b"known: %d" % len(context[: -len(request)]), EOS)

    policy = ScriptedPolicy(script, context_limit)
    states = [state_of(token_ids=range(1, 1 + length)) for length in (2, 3, 10, 11, 30)]
    describer = PolicySummary(max_summary_tokens=30, request=request)
    described = describe(describer, policy, states)
    assert [one.text for one in described] == ["known: 2", None, None, None, None]
    assert [one.summary_tokens for one in described] == [9, 8, 1, 0, 0]
    assert describer.counts == {"summary/failed": 4}


def test_a_policy_that_writes_nothing_gives_no_description():
    policy = ScriptedPolicy(lambda context, seed: (*b" \n", EOS))
    describer = PolicySummary(max_summary_tokens=30)
    assert describe(describer, policy, [state_of()]) == [StateDescription(summary_tokens=3)]
    assert describer.counts == {"summary/failed": 1}
