import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpo_agent.errors import ConfigError, DataError
from graphpo_agent.rollout.segment import SegmentExpander
from graphpo_agent.types import PathState, SamplingParams, Step, Task
from tests.rollout.scripted import EOS, ByteTokenizer, ScriptedPolicy, bytes_of, expand

TASK = Task(id="t1", question="3 > 7 ?", answers=("7",))
SAMPLING = SamplingParams()


def saying(token_ids, prompt_tokens):
    """The script that says ``token_ids`` in order, wherever a segment left off."""
    return lambda context, seed: token_ids[len(context) - prompt_tokens :]


def walk(expander: SegmentExpander, policy: ScriptedPolicy, state: PathState) -> list[Step]:
    steps = []
    for _ in range(expander.max_layers):
        steps += expand(expander, policy, [state], [0], SAMPLING)
        state = steps[-1].state
        if steps[-1].terminal:
            break
    return steps


def grow(token_ids, max_context_tokens=100_000, **options) -> tuple[PathState, list[Step]]:
    expander = SegmentExpander(**options)
    prompt_tokens = expander.start(ScriptedPolicy(lambda c, s: ()), TASK).prompt_tokens
    policy = ScriptedPolicy(saying(token_ids, prompt_tokens), max_context_tokens)
    root = expander.start(policy, TASK)
    return root, walk(expander, policy, root)


def test_root_holds_the_rendered_messages_and_nothing_else():
    expander = SegmentExpander(
        segment_length=4,
        max_response_tokens=8,
        prompt_template=r"Solve {question} in \boxed{}, {question}",
        system_prompt="be brief",
    )
    root = expander.start(ScriptedPolicy(lambda c, s: ()), TASK)
    text = ByteTokenizer().decode(root.prompt_ids)
    assert text == "system\nbe brief" + "user\n" + r"Solve 3 > 7 ? in \boxed{}, 3 > 7 ?"
    assert (root.depth, root.response, root.response_tokens, root.answer) == (0, "", 0, None)


def test_eos_ends_a_segment_early_and_the_path():
    root, steps = grow((*b"12345", EOS, *b"rest"), segment_length=4, max_response_tokens=40)
    assert [step.token_ids for step in steps] == [tuple(b"1234"), (*b"5", EOS)]
    assert [(step.terminal, step.status) for step in steps] == [(False, "ok"), (True, "answered")]
    assert steps[-1].state.response == "12345"
    assert steps[-1].state.context.token_ids == (*root.prompt_ids, *b"12345", EOS)
    assert all(step.loss_mask == (1,) * len(step.token_ids) for step in steps)
    assert steps[-1].state.depth == 2


def test_response_limit_cuts_the_last_segment_and_is_reached_in_max_layers():
    _, steps = grow(tuple(b"x" * 99), segment_length=4, max_response_tokens=10)
    assert [len(step.token_ids) for step in steps] == [4, 4, 2]
    assert [step.status for step in steps] == ["ok", "ok", "out_of_length"]
    assert SegmentExpander(segment_length=4, max_response_tokens=10).max_layers == 3


def test_eos_on_the_last_allowed_token_is_an_answer_not_a_truncation():
    _, steps = grow((*b"xxxxxxx", EOS), segment_length=4, max_response_tokens=8)
    assert steps[-1].status == "answered"


def test_context_limit_binds_before_the_response_limit():
    prompt = len(grow((EOS,), segment_length=1, max_response_tokens=1)[0].prompt_ids)
    _, steps = grow(tuple(b"y" * 99), prompt + 6, segment_length=4, max_response_tokens=50)
    assert [len(step.token_ids) for step in steps] == [4, 2]
    assert steps[-1].status == "out_of_length" and steps[-1].terminal


def test_delimiter_is_awaited_at_or_after_the_segment_length():
    text = b"a;bcd;efghij;kl"
    _, steps = grow((*text, EOS), segment_length=4, max_response_tokens=99, delimiter=";")
    # The first ";" comes too early; the next one at or after 4 tokens ends the segment.
    assert [bytes(step.token_ids) for step in steps[:-1]] == [b"a;bcd;", b"efghij;"]
    assert steps[-1].token_ids == (*b"kl", EOS)


def test_delimiter_exactly_at_the_segment_length_counts():
    _, steps = grow((*b"abc;defg;", EOS), segment_length=4, max_response_tokens=99, delimiter=";")
    assert [bytes(step.token_ids) for step in steps[:-1]] == [b"abc;", b"defg;"]


def test_without_a_delimiter_in_sight_a_segment_is_twice_as_long():
    _, steps = grow((*b"x" * 20, EOS), segment_length=4, max_response_tokens=99, delimiter=";")
    assert [len(step.token_ids) for step in steps] == [8, 8, 5]


def test_a_character_split_over_segments_is_decoded_whole():
    text = "é→é🙂.é"
    _, steps = grow((*text.encode(), EOS), segment_length=3, max_response_tokens=99)
    assert "\ufffd" in steps[0].state.response  # the border lies inside "→" here
    assert steps[-1].state.response == text


def test_sampled_tokens_are_never_retokenised():
    sampled = (*bytes_of("abab</search>ab"), 263, EOS)
    assert tuple(ByteTokenizer().encode(ByteTokenizer().decode(sampled))) != sampled[:-1]
    root, steps = grow(sampled, segment_length=2, max_response_tokens=99)
    path = tuple(i for step in steps for i in step.token_ids)
    assert path == sampled
    assert steps[-1].state.context.token_ids == (*root.prompt_ids, *sampled)


def test_siblings_share_their_parent_and_differ_by_seed():
    expander = SegmentExpander(segment_length=3, max_response_tokens=9)
    policy = ScriptedPolicy(lambda context, seed: (*b"%d" % (111 * seed), EOS))
    root = expander.start(policy, TASK)
    steps = expand(expander, policy, [root] * 3, [1, 2, 1], SAMPLING)
    assert [step.state.response for step in steps] == ["111", "222", "111"]
    assert root.context.token_ids == root.prompt_ids and root.memory == ()


def test_every_segment_is_sampled_with_its_seed_and_the_given_parameters():
    expander = SegmentExpander(segment_length=3, max_response_tokens=9)
    policy = ScriptedPolicy(lambda context, seed: b"abc")
    root = expander.start(policy, TASK)
    expand(expander, policy, [root, root], [5, 6], SamplingParams(temperature=0.3, top_p=0.9))
    assert policy.sampling == [SamplingParams(temperature=0.3, top_p=0.9)] * 2
    assert [request.seed for request in policy.requests] == [5, 6]


def test_prompt_without_room_for_a_token_names_the_task():
    expander = SegmentExpander(segment_length=3, max_response_tokens=9)
    prompt_tokens = expander.start(ScriptedPolicy(lambda c, s: ()), TASK).prompt_tokens
    with pytest.raises(DataError, match=r"task 't1': its prompt has \d+ tokens") as caught:
        expander.start(ScriptedPolicy(lambda c, s: (), prompt_tokens), TASK)
    assert "\n" not in str(caught.value)
    expander.start(ScriptedPolicy(lambda c, s: (), prompt_tokens + 1), TASK)


def test_a_prompt_of_no_tokens_names_the_task():
    expander = SegmentExpander(segment_length=3, max_response_tokens=9)
    policy = ScriptedPolicy(lambda c, s: ())
    policy.tokenizer.render = lambda prompt: []
    with pytest.raises(DataError, match=r"task 't1': the tokenizer makes no tokens") as caught:
        expander.start(policy, TASK)
    assert "\n" not in str(caught.value)


def test_template_without_a_place_for_the_question_is_refused():
    with pytest.raises(ConfigError, match=r"\{question\}"):
        SegmentExpander(segment_length=3, max_response_tokens=9, prompt_template="Solve.")


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.sampled_from([*range(97, 105), ord(";"), 263, 0xC3, 0xA9]), max_size=60),
    segment_length=st.integers(1, 9),
    max_response_tokens=st.integers(1, 50),
    delimiter=st.sampled_from([None, ";", "b;"]),
)
def test_any_path_is_the_sampled_tokens_in_order_within_the_limits(
    words, segment_length, max_response_tokens, delimiter
):
    sampled = (*words, EOS)
    root, steps = grow(
        sampled,
        segment_length=segment_length,
        max_response_tokens=max_response_tokens,
        delimiter=delimiter,
    )
    path = tuple(i for step in steps for i in step.token_ids)
    assert path == sampled[:max_response_tokens]
    assert steps[-1].state.context.token_ids == (*root.prompt_ids, *path)
    assert steps[-1].terminal and not any(step.terminal for step in steps[:-1])
    assert (steps[-1].status == "answered") == (path[-1] == EOS)
    longest = segment_length if delimiter is None else 2 * segment_length
    assert all(segment_length <= len(step.token_ids) <= longest for step in steps[:-1])
    assert steps[-1].state.response == ByteTokenizer().decode(path)
